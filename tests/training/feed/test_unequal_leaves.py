"""Replicas get leaves whole that are not as long as the first one of a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of

from keras_multigpu.training.feed import cutter
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import whole
from keras_multigpu.training.shares import normalized
from keras_multigpu.training.steps.steps_of_model import StepFunctions


def rows_of(count):
    return np.arange(3.0 * count, dtype="float32").reshape(count, 3) / 64


def batch(labelled, unlabelled):
    x = {"labelled": rows_of(labelled), "unlabelled": rows_of(unlabelled)}
    return x, np.ones((labelled, 1), "float32")


def lengths_in_steps(batches):
    """The lengths of the leaves that each replica gets, in the steps of batches."""
    found = []

    def make(spec):
        def step(shares):
            found.append([list(map(len, keras.tree.flatten(rows.data)[:-1])) for rows in shares])

        return step

    steps = StepFunctions(make, Cutter(2), eager=True)
    for shares in batches:
        steps(shares)
    return found


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("read_by_python", [False, True])
def test_a_leaf_that_is_not_as_long_as_the_first_is_not_cut(copied, read_by_python, monkeypatch):
    """Three rows of six would pass for those of one replica."""
    monkeypatch.setattr(cutter, "has_own_memory", lambda device: copied)
    rows = [(4, 4), (3, 3), (3, 2), (6, 3), (2, 0), (5, 5)]
    batches = [(np.ones((x, 1)), np.ones((y, 2))) for x, y in rows]
    signature = (tf.TensorSpec((None, 1)), tf.TensorSpec((None, 2)))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    if read_by_python:
        found = lengths_in_steps(map(Cutter(2), map(normalized, batches)))
    else:
        read = [execution.batches for execution in Feed(Cutter(2), data).epoch(4)]
        found = lengths_in_steps(shares for batches in read for shares in batches)
    assert found == [
        [[2, 2], [2, 2]],
        [[2, 2], [1, 1]],
        [[2, 2], [1, 2]],
        [[3, 3], [3, 3]],
        [[1, 0], [1, 0]],
        [[3, 3], [2, 2]],
    ]


def test_parts_of_a_strategy_are_put_together_where_their_lengths_differ():
    """A leaf of one row belongs to the examples of all parts."""
    parts = [batch(2, 0), batch(3, 4)]
    parts = [normalized((*part, np.ones(1, "float32"))) for part in parts]
    spread = replicas_of(2).experimental_distribute_values_from_function

    def of_each(*leaves):
        return spread(lambda context: leaves[context.replica_id_in_sync_group])

    together = whole(keras.tree.map_structure(of_each, *parts))
    assert [len(leaf) for leaf in keras.tree.flatten(together)] == [5, 4, 5, 1]
    assert together[0]["labelled"].numpy().tolist() == [*rows_of(2).tolist(), *rows_of(3).tolist()]


def test_leaves_that_every_replica_gets_may_have_any_length():
    x = {"a": np.ones((6, 2), "float32"), "one": np.ones((1, 3), "float32"), "scalar": 2.0}
    spec = (
        {"a": tf.TensorSpec((None, 2)), "one": tf.TensorSpec((1, 3)), "scalar": tf.TensorSpec(())},
        tf.RaggedTensorSpec((None, None), tf.float32),
        tf.TensorSpec((None,)),
    )
    whole = (x, tf.ragged.constant([[1.0]] * 6), np.ones(6, "float32"))
    data = tf.data.Dataset.from_generator(lambda: iter([whole]), output_signature=spec)
    (waiting,) = Cutter(4).ahead(data)
    for shares in (waiting, Cutter(4)(normalized(whole))):
        lengths = [(len(rows.data[0]["a"]), len(rows.data[0]["one"])) for rows in shares.rows]
        assert lengths == [(2, 1), (2, 1), (1, 1), (1, 1)]
