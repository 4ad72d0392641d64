"""Replicas get leaves whole that are not as long as the first one of a batch.

The model takes labelled and unlabelled rows, as semi-supervised ones do, and Keras trains it.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.training.feed import cutter
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import whole
from keras_multigpu.training.shares import normalized
from keras_multigpu.training.steps.steps_of_model import StepFunctions

LABELLED, UNLABELLED = 5, 14


class Both(keras.Model):
    """Predicts each labelled row, shifted by the mean of the unlabelled rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        moved = keras.ops.mean(self.dense(x["unlabelled"]), axis=0)
        return self.dense(x["labelled"]) + moved


def rows_of(count):
    return np.arange(3.0 * count, dtype="float32").reshape(count, 3) / 64


def batch(labelled=LABELLED, unlabelled=UNLABELLED):
    x = {"labelled": rows_of(labelled), "unlabelled": rows_of(unlabelled)}
    return x, np.ones((labelled, 1), "float32")


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return batch()


def zipped():
    """Batches of both kinds of rows, of unknown sizes."""

    def of(size):
        return tf.data.Dataset.from_tensor_slices(rows_of(4 * size)).batch(size)

    both = tf.data.Dataset.zip(of(LABELLED), of(UNLABELLED))
    return both.map(
        lambda one, other: ({"labelled": one, "unlabelled": other}, tf.ones_like(one)[:, :1])
    )


DATA = {"dataset": zipped, "endless": lambda: zipped().repeat(), "PyDataset": Sequence}


def compiled(replicas):
    """The model, not built yet."""
    model = kmg.distribute(Both(), replicas_of(replicas))
    model.compile("sgd", "mse", steps_per_execution=2)
    return model


def test_arrays_of_different_lengths_are_named_by_keras():
    for replicas in (1, 2):
        with pytest.raises(ValueError, match="sizes: 5, 14"):
            compiled(replicas).fit(*batch(), verbose=0)


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


@pytest.mark.parametrize(
    ("name", "replicas", "eager"),
    [("dataset", 1, True), ("endless", 2, False), ("PyDataset", 3, False)],
)
@pytest.mark.in_test_all("leaves are cut in one way", after=1)
def test_replicas_train_as_keras(name, replicas, eager):
    made = DATA[name]
    results = []
    for distribute in (False, True):
        keras.utils.set_random_seed(1)
        model = compiled(replicas) if distribute else Both()
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eager)
        history = model.fit(made(), steps_per_epoch=2, shuffle=False, verbose=0).history
        scores = model.evaluate(made(), steps=2, verbose=0)
        results.append((history, scores, model.predict(made(), steps=2, verbose=0)))
    for ours, theirs in zip(*map(keras.tree.flatten, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


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
