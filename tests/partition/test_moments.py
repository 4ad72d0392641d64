"""Mean and variance of the batch take one sum, and are as precise as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from simulated_replicas import Simulation

OPEN = tf.TensorSpec([None, 3, 4], tf.float32)


def moments(x):
    return tf.nn.moments(x, [0, 1])


def variance(x):
    return keras.ops.mean(x, axis=(0, 1)), tf.math.reduce_variance(x, [0, 1])


def gradient(x):
    """The gradient of a normalised batch."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, spread = tf.nn.moments(x, [0, 1], keepdims=True)
        loss = tf.reduce_sum(tf.tanh((x - mean) * tf.math.rsqrt(spread + 1e-3)) ** 3)
    return tape.gradient(loss, x)


@pytest.mark.parametrize("counts", [(3, 2), (5, 0, 1), (2, 2, 2)])
@pytest.mark.parametrize("function", [moments, variance, gradient])
def test_moments_are_those_of_one_device(function, counts):
    x = np.random.default_rng(0).normal(3.0, 2.0, (sum(counts), 3, 4)).astype("float32")
    split = Simulation(function, [OPEN], len(counts))
    whole = tf.nest.flatten(function(tf.constant(x)))
    for mine, theirs in zip(split(counts, x), whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def test_variance_survives_a_large_mean():
    """Sums of plain squares, in 24 bits, would lose all of it."""
    x = np.random.default_rng(0).normal(4096.0, 1e-2, (6, 3, 4)).astype("float32")
    _, found = Simulation(moments, [OPEN], 3)((3, 0, 3), x)
    np.testing.assert_allclose(found, x.astype("float64").var((0, 1)), rtol=2e-2)


def test_mean_and_variance_take_one_sum():
    split = Simulation(moments, [OPEN], 2)
    assert [each.kind for each in split.step.cost.moved] == ["summed"]


def test_the_backward_pass_takes_one_more_sum():
    split = Simulation(gradient, [OPEN], 2)
    rounds = [len(part.cuts) for part in split.local._stages]
    assert len([count for count in rounds if count]) == 2
