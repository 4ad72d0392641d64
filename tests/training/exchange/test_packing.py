"""Tensors come out of a pack as they went in."""

import numpy as np
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
    assert [pack.numpy().tolist() for pack in packs] == [[1, 2, 3, 4, 7], [5, 6]]
    for before, after in zip(tensors, layout.unpack(packs), strict=True):
        assert before.shape == after.shape
        np.testing.assert_array_equal(before, after)


def test_large_tensors_travel_alone(monkeypatch):
    """A tensor of at least `LARGE` elements is not copied into a pack with others."""
    monkeypatch.setattr(packing, "LARGE", 4)
    tensors = [tf.zeros(2), tf.ones(4), tf.ones(3)]
    layout = packing.Packing(tensors)
    assert sorted(pack.shape[0] for pack in layout.pack(tensors)) == [4, 5]
    assert [t.shape[0] for t in layout.unpack(layout.pack(tensors))] == [2, 4, 3]


def test_one_tensor_is_taken_out_of_its_pack(monkeypatch):
    """From the beginning, the middle and the end of a pack, and one that travels alone."""
    monkeypatch.setattr(packing, "LARGE", 4)
    tensors = [tf.constant([1.0, 2.0]), tf.ones((2, 2)), tf.constant(3.0), tf.constant([[4.0]])]
    layout = packing.Packing(tensors)
    packs = layout.pack(tensors)
    for index, tensor in enumerate(tensors):
        np.testing.assert_array_equal(layout.one(packs, index), tensor, strict=True)


def test_the_beginnings_of_packs_hold_the_first_tensors(monkeypatch):
    """Of each pack as much as the first tensors fill; packs without any are left out."""
    monkeypatch.setattr(packing, "LARGE", 4)
    tensors = [tf.constant([1.0]), tf.fill([4], 2.0), tf.constant([3.0]), tf.constant([4])]
    layout = packing.Packing(tensors)
    packs = layout.pack(tensors)

    def firsts(count):
        return sorted(part.numpy().tolist() for part in layout.beginnings(packs, count))

    assert [firsts(count) for count in range(5)] == [
        [],
        [[1]],
        [[1], [2, 2, 2, 2]],
        [[1, 3], [2, 2, 2, 2]],
        [[1, 3], [2, 2, 2, 2], [4]],
    ]


def test_nothing_makes_no_pack():
    """A model without weights has nothing to sum."""
    layout = packing.Packing([])
    assert layout.pack([]) == layout.unpack([]) == []
