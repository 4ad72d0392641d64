"""How a global batch is cut, and the specs of its shares: by hand, for every kind of tensor."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.shares import (
    as_given,
    batch_size_of,
    join_shares,
    normalized,
    share_spec,
)

FIVE = np.arange(10.0, dtype="float32").reshape(5, 2)
RAGGED = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])
SPARSE = tf.sparse.from_dense(FIVE)


@pytest.mark.parametrize(
    ("size", "replicas", "expected"),
    [
        (5, 1, [[0, 1, 2, 3, 4]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 3, [[0], [1], []]),
    ],
)
def test_shares_are_contiguous_and_in_order(size, replicas, expected):
    batch = tf.range(size), None, None
    shares = Cutter(replicas)(batch)
    assert [rows.data[0].numpy().tolist() for rows in shares.rows] == expected
    assert shares.counts == [int(rows.examples) for rows in shares.rows] == list(map(len, expected))
    assert {int(rows.global_batch_size) for rows in shares.rows} == {size}


def test_every_part_of_a_batch_is_cut_at_the_same_rows():
    x = {"dense": tf.constant(FIVE), "ragged": RAGGED, "sparse": SPARSE, "none": None}
    batch = x, tf.range(5), tf.constant(3.0)
    x, y, weight = Cutter(2)(batch).rows[1].data
    assert x["dense"].numpy().tolist() == FIVE[3:].tolist()
    assert x["ragged"].to_list() == [[4, 5, 6], [7]]
    assert tf.sparse.to_dense(x["sparse"]).numpy().tolist() == FIVE[3:].tolist()
    assert x["none"] is None and y.numpy().tolist() == [3, 4]
    assert float(weight) == 3.0


def test_a_single_row_belongs_to_all_examples():
    context = tf.constant([[7.0]])
    for size, expected, rows in [(4, [2, 2], [[[7]], [[7]]]), (1, [1, 0], [[[7]], []])]:
        batch = (context, tf.ones((size, 2))), None, None
        shares = Cutter(2)(batch)
        assert shares.counts == expected
        assert [own.data[0][0].numpy().tolist() for own in shares.rows] == rows
    spec = (tf.TensorSpec([1, 1]), tf.TensorSpec([None, 2])), None, None
    assert [leaf.shape.as_list() for leaf in share_spec(spec, 2)] == [[None, 1], [None, 2]]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("static", [True, False])
def test_datasets_are_cut_as_batches_are(size, static):
    ragged = tf.concat([RAGGED, RAGGED], axis=0)[:size]
    x = {"dense": tf.ones((size, 2))}
    if size > 1:
        # Of a batch of one nobody can tell what is one row for all from the only example's.
        x |= {"ragged": ragged, "context": tf.constant([[7.0]])}
    data = tf.data.Dataset.from_tensors((x, tf.range(size)))
    if not static:
        data = data.map(open_sizes)
    (shares,) = Cutter(3).ahead(data)
    batch = normalized((x, tf.range(size)))
    for rows, expected in zip(shares.rows, Cutter(3)(batch).rows, strict=True):
        found, wanted = (tf.nest.flatten(each.data) for each in (rows, expected))
        assert int(rows.examples) == len(expected.data[1])
        assert int(rows.global_batch_size) == size
        for leaf, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(*(getattr(t, "flat_values", t) for t in (leaf, other)))
    again = join_shares(shares.rows, shares.spec)
    for leaf, wanted in zip(tf.nest.flatten(again), tf.nest.flatten(batch), strict=True):
        np.testing.assert_array_equal(*(getattr(t, "flat_values", t) for t in (leaf, wanted)))


X = tf.ones((2, 1))
FORMS = [X, (X,), (X, X), (X, None), (X, None, None), (X, X, None), (X, X, X), ((X, X),)]


@pytest.mark.parametrize("given", FORMS, ids=lambda given: str(len(keras.tree.flatten(given))))
def test_a_batch_keeps_the_form_in_which_it_came(given):
    batch = normalized(given)
    for found in (batch, join_shares(Cutter(2)(batch).rows, batch)):
        assert str(as_given(found)) == str(given)


def open_sizes(x, y):
    """The same batch with an unknown size."""
    dense = tf.numpy_function(lambda leaf: leaf, [x["dense"]], tf.float32)
    dense.set_shape([None, 2])
    y = tf.numpy_function(lambda leaf: leaf, [y], tf.int32)
    y.set_shape([None])
    return {**x, "dense": dense}, y


def test_a_batch_without_a_batch_axis_is_refused():
    with pytest.raises(ValueError, match="no array with a batch axis"):
        batch_size_of((tf.constant(1.0), None, None))
