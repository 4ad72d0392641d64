"""Tensors come out of a pack as they went in."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.exchange import packing


def test_packs_by_dtype_and_gives_back_order_and_shapes():
    """Small tensors share a pack of their dtype, scalars and empty ones included."""
    tensors = [
        tf.constant([[1.0, 2.0], [3.0, 4.0]]),
        tf.constant([5, 6]),
        tf.constant(7.0),
        tf.zeros((0, 3)),
    ]
    layout = packing.Packing(tensors)
    packs = layout.pack(tensors)
    assert [pack.numpy().tolist() for pack in packs] == [[5, 6], [1, 2, 3, 4, 7]]
    for before, after in zip(tensors, layout.unpack(packs), strict=True):
        assert before.shape == after.shape
        np.testing.assert_array_equal(before, after)


@pytest.fixture
def small_buckets(monkeypatch):
    """Sixteen bytes, which are four numbers, fill a bucket, or are large."""
    monkeypatch.setattr(packing, "BUCKET", 16)
    monkeypatch.setattr(packing, "LARGE", 16)


def numbered(*sizes):
    """Tensors of so many numbers, the first all 0, the second all 1 and so on."""
    return [tf.fill([size], float(number)) for number, size in enumerate(sizes)]


def contents(packs):
    return [pack.numpy().tolist() for pack in packs]


@pytest.mark.usefixtures("small_buckets")
def test_a_full_bucket_is_closed():
    """In the order in which tensors come to be; they come out in their own."""
    tensors = numbered(1, 2, 3, 1)
    layout = packing.Packing(tensors, order=[3, 2, 1, 0])
    packs = layout.pack(tensors)
    assert contents(packs) == [[3, 2, 2, 2], [1, 1, 0]]
    assert contents(layout.unpack(packs)) == contents(tensors)


@pytest.mark.usefixtures("small_buckets")
def test_large_tensors_travel_alone():
    """They are not copied, and do not keep others waiting that were there before them."""
    tensors = numbered(1, 4, 1, 5)
    layout = packing.Packing(tensors)
    assert contents(layout.pack(tensors)) == [[1] * 4, [0, 2], [3] * 5]


@pytest.mark.usefixtures("small_buckets")
def test_the_last_buckets_are_small(monkeypatch):
    """Of what is left each takes half, if that is worth a sum."""
    monkeypatch.setattr(packing, "SMALLEST", 8)
    packs = packing.Packing(tensors := numbered(*[1] * 11)).pack(tensors)
    # No more than 16 bytes, half of 28, half of 12 but at least 8, and the rest.
    assert contents(packs) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10]]


@pytest.mark.usefixtures("small_buckets")
def test_half_the_bytes_fill_half_a_bucket():
    """Those count that travel; what travels in another dtype travels apart."""
    tensors = numbered(1, 3, 4, 1)
    layout = packing.Packing(tensors, sent_as=[tf.float32, *3 * [tf.bfloat16]])
    packs = layout.pack(tensors)
    assert contents(packs) == [[0], [1] * 3 + [2] * 4 + [3]]
    sent = []
    back = layout.summed(packs, lambda packs: sent.extend(packs) or packs)
    assert [pack.dtype for pack in sent] == [tf.float32, tf.bfloat16]
    assert [pack.dtype for pack in back] == [tf.float32, tf.float32]


@pytest.mark.usefixtures("small_buckets")
def test_one_tensor_is_taken_out_of_its_pack():
    """From the beginning, the middle and the end of a pack, and one that travels alone."""
    tensors = [tf.constant([1.0, 2.0]), tf.ones((2, 2)), tf.constant(3.0), tf.constant([[4.0]])]
    layout = packing.Packing(tensors, order=[2, 0, 1, 3])
    packs = layout.pack(tensors)
    for index, tensor in enumerate(tensors):
        np.testing.assert_array_equal(layout.one(packs, index), tensor, strict=True)


@pytest.mark.usefixtures("small_buckets")
def test_the_endings_of_packs_hold_the_last_tensors():
    """Of each pack as much as the last tensors fill; packs without any are left out."""
    tensors = [tf.constant([1.0]), tf.fill([4], 2.0), tf.constant([3.0]), tf.constant([4])]
    layout = packing.Packing(tensors)
    packs = layout.pack(tensors)
    assert [contents(layout.endings(packs, first)) for first in range(5)] == [
        [[2, 2, 2, 2], [1, 3], [4]],
        [[2, 2, 2, 2], [3], [4]],
        [[3], [4]],
        [[4]],
        [],
    ]


def test_gradients_come_in_the_order_of_the_backward_pass():
    """Those of the last layer first, whatever the order of the variables."""
    found = []

    @tf.function
    def backward(first, last, side):
        with tf.GradientTape() as tape:
            tape.watch([first, last, side])
            loss = tf.tanh(first * side) * last
        gradients = tape.gradient(loss, [first, last, side])
        found.append([("first", "last", "side")[i] for i in packing.order_of_backward(gradients)])
        return [tf.reshape(gradient, []) for gradient in gradients]

    gradients = backward(*map(tf.constant, (1.0, 2.0, 3.0)))
    assert found[0][0] == "last" and set(found[0][1:]) == {"first", "side"}
    # Without a graph all are there.
    assert packing.order_of_backward(gradients) == [0, 1, 2]


def test_nothing_makes_no_pack():
    """A model without weights has nothing to sum."""
    layout = packing.Packing([])
    assert layout.pack([]) == layout.unpack([]) == []
