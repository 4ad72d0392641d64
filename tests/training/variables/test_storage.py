"""Storages in parts: which slots are divided, how, and who sees the parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of

from keras_multigpu.keras_internals.variable_internals import VariableInParts
from keras_multigpu.partition.layouts import Block, Rows, Shard
from keras_multigpu.training.variables import storage

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("shape", "dtype", "replicas", "expected"),
    [
        ((256, 256), "float32", 3, True),
        ((256, 256), "bfloat16", 3, True),
        ((256, 256), "int32", 3, False),
        # Smaller ones are updated together with others.
        ((255, 256), "float32", 3, False),
        # Five units of 64 rows of an odd length.
        ((257, 257), "float32", 5, True),
        ((257, 257), "float32", 6, False),
    ],
)
def test_large_slots_of_floats_are_divided(shape, dtype, replicas, expected):
    slot = keras.KerasTensor(shape, dtype)
    assert storage.can_be_divided(slot, replicas) == expected


@pytest.mark.parametrize(
    ("shape", "axis", "shard", "lengths"),
    [
        ((300, 256), 0, Shard(300, 1), [100, 100, 100]),
        ((2, 300, 300), 1, Shard(300, 8), [104, 104, 92]),
        ((257, 257), 0, Shard(257, 64), [128, 128, 1]),
    ],
)
def test_parts_have_multiples_of_64_numbers_of_the_longest_axis(shape, axis, shard, lengths):
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    made = storage.in_parts(value, "slot", DEVICES)
    assert storage.layout_of(made) == Rows(axis, (Block(shard),))
    assert [part.shape[axis] for part in made.parts] == lengths
    assert all(part.shape.num_elements() % 64 == 0 for part in made.parts[:-1])
    assert [part.device for part in made.parts] == DEVICES
    np.testing.assert_array_equal(made.numpy(), value)


def test_a_graph_of_one_device_finds_whole_values():
    made, plain = storage.in_parts(np.ones((300, 256)), "slot", DEVICES), tf.Variable(1.0)
    one = storage.for_one_device(made)
    assert not isinstance(one, VariableInParts) and storage.for_one_device(plain) is plain
    with storage.whole_values([made, plain]):
        one.assign(3 * one)
    assert made.numpy().max() == 3
    assert tf.size(tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=one.dtype)) == 0


def test_replicas_of_a_loop_of_ones_own_are_refused():
    """Each would assign all parts."""
    made = storage.in_parts(np.zeros((300, 256), "float32"), "slot", DEVICES)
    with pytest.raises(RuntimeError, match="is sharded"):
        replicas_of(2).run(lambda: made.assign(tf.zeros(made.shape)))
