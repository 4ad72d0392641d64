"""Packed tensors are unpacked unchanged."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.exchange import packing


def test_tensors_are_packed_by_dtype_and_keep_order_and_shapes():
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
    """A bucket is full, and a tensor large, at sixteen bytes, which are four numbers."""
    monkeypatch.setattr(packing, "BUCKET", 16)
    monkeypatch.setattr(packing, "LARGE", 16)


def numbered(*sizes):
    """Tensors of these sizes, filled with 0, 1 and so on."""
    return [tf.fill([size], float(number)) for number, size in enumerate(sizes)]


def contents(packs):
    return [pack.numpy().tolist() for pack in packs]


@pytest.mark.usefixtures("small_buckets")
def test_a_full_bucket_is_closed():
    tensors = numbered(1, 3, 2, 1)
    layout = packing.Packing(tensors)
    packs = layout.pack(tensors)
    assert contents(packs) == [[0, 1, 1, 1], [2, 2, 3]]
    assert contents(layout.unpack(packs)) == contents(tensors)


@pytest.mark.usefixtures("small_buckets")
def test_large_tensors_travel_alone():
    tensors = numbered(1, 4, 1, 5)
    layout = packing.Packing(tensors)
    assert contents(layout.pack(tensors)) == [[1] * 4, [0, 2], [3] * 5]


@pytest.mark.usefixtures("small_buckets")
def test_the_last_buckets_are_small(monkeypatch):
    monkeypatch.setattr(packing, "SMALLEST", 8)
    packs = packing.Packing(tensors := numbered(*[1] * 11)).pack(tensors)
    # No more than 16 bytes, half of 28, half of 12 but at least 8, and the rest.
    assert contents(packs) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10]]


@pytest.mark.usefixtures("small_buckets")
def test_half_the_bytes_fill_half_a_bucket():
    tensors = [tf.cast(each, tf.bfloat16) for each in numbered(3, 4, 1)]
    packs = packing.Packing(tensors).pack(tensors)
    assert contents(packs) == [[0] * 3 + [1] * 4 + [2]]


def test_tensors_of_unknown_size_share_a_pack():
    spec = tf.TensorSpec([None, 2])

    @tf.function(input_signature=[spec, spec])
    def packed(first, second):
        tensors = [first, tf.constant([9.0]), second]
        layout = packing.Packing(tensors)
        packs = layout.pack(tensors)
        unpacked = layout.unpack(packs)
        assert [tensor.shape.as_list() for tensor in unpacked] == [[None, 2], [1], [None, 2]]
        return packs, unpacked

    packs, unpacked = packed([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    assert contents(packs) == [[9], [1, 2, 3, 4, 5, 6]]
    assert contents(unpacked) == [[[1, 2]], [9], [[3, 4], [5, 6]]]


def test_no_tensors_make_no_pack():
    layout = packing.Packing([])
    assert layout.pack([]) == layout.unpack([]) == []
