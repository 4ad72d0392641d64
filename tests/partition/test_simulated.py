"""What replicas compute together is what one device computes: moments, sizes, zeros, assertions."""

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


FUNCTIONS = {
    "gathered": lambda x: tf.sort(x),
    "largest": tf.reduce_max,
    "smallest": tf.reduce_min,
    "product": tf.reduce_prod,
    "first": lambda x: x[0],
    "of Python": lambda x: tf.numpy_function(lambda rows: rows, [x], tf.float32),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_negative_zeros_stay_negative(name):
    split = Simulation(FUNCTIONS[name], [tf.TensorSpec([None])], replicas=3)
    (found,) = split((2, 0, 1), np.full(3, -0.0, "float32"))
    assert np.all(found == 0) and np.all(np.signbit(found))


WIDE = tf.int64
SIZES = {
    "a product": (lambda x: tf.reduce_prod(tf.shape(x, WIDE) * 10_000), 3_200_000_000),
    "a cast product": (
        lambda x: tf.reduce_prod(tf.cast(tf.shape(x), WIDE) * 10_000),
        3_200_000_000,
    ),
    "a large factor": (lambda x: tf.size(x, WIDE) * 10**12, 32 * 10**12),
    "beyond an int64": (lambda x: tf.shape(x, WIDE)[0] * 2**62 * 2**2 + 3, 3),
    # What follows is worth nothing on one device, and has to be worth the same on several.
    "an int32 that starts over": (lambda x: tf.shape(x)[0] * 2**30 + 1, 1),
    "one that is cast": (lambda x: tf.cast(tf.shape(x)[0] * 2**28, WIDE), -(2**31)),
    "a factor beyond it": (lambda x: tf.shape(x)[0] * 10**9 * 10, 80 * 10**9 - 19 * 2**32),
    "constants": (lambda x: tf.shape(x)[0] + tf.constant(2**20) * 2**20, 8),
    "a comparison": (lambda x: tf.constant(2**20) * 2**20 > 5, False),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_one_device(name):
    function, expected = SIZES[name]
    split = Simulation(function, [tf.TensorSpec([None, 4])], replicas=3)
    x = np.ones((8, 4), "float32")
    assert split.whole(tf.constant(x)).numpy() == expected
    assert split((3, 3, 2), x) == [expected]


@tf.function
def called(x):
    tf.debugging.assert_non_negative(x)
    return x


FORMS = {
    "debugging": lambda x: (tf.debugging.assert_non_negative(x), x)[1],
    "of two": lambda x: (tf.debugging.assert_less(x, x + 1.0), x)[1] * called(x),
    "inside": called,
    "plain": lambda x: (tf.debugging.Assert(tf.reduce_all(x >= 0.0), [x]), x)[1],
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_asserted_where_they_are(name):
    split = Simulation(FORMS[name], [tf.TensorSpec([None, 2])], replicas=3)
    assert split.step.cost.moved == []
    x = np.arange(8, dtype="float32").reshape(4, 2)
    np.testing.assert_array_equal(split((2, 2, 0), x)[0], FORMS[name](tf.constant(x)))
    x[3] = [-1.0, np.inf]
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        split((2, 2, 0), x)


def test_a_condition_that_has_other_uses_is_that_of_all_rows():
    def function(x):
        is_positive = tf.reduce_all(x > 0.0)
        tf.debugging.Assert(is_positive | (x[0] < 5.0), ["first"])
        return tf.where(is_positive, x, -x)

    split = Simulation(function, [tf.TensorSpec([None])], replicas=2)
    np.testing.assert_array_equal(split((1, 1), np.array([1.0, -2.0], "float32"))[0], [-1.0, 2.0])


def test_that_any_row_fulfils_a_condition_is_asserted_of_all():
    def function(x):
        tf.debugging.Assert(tf.reduce_any(x > 0.0), ["none"])
        return x

    split = Simulation(function, [tf.TensorSpec([None])], replicas=2)
    assert split((1, 1), np.array([1.0, -2.0], "float32"))[0].tolist() == [1.0, -2.0]


WITHOUT_ROWS = {
    # Kernels that fail without rows.
    "places": lambda x: tf.gather_nd(tf.transpose(x), [[1], [0]]),
    "mirrored": lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"),
    # A part that is zero would become NaN.
    "finite factor": lambda x: tf.matmul(
        tf.reduce_sum(x, 0, keepdims=True), tf.constant([[2.0], [1.0]])
    ),
    "infinite factor": lambda x: tf.matmul(
        tf.reduce_sum(x, 0, keepdims=True), tf.constant([[np.inf], [1.0]])
    ),
    # The axis of one row stays.
    "squeezed": lambda x: tf.squeeze(tf.ensure_shape(x, [3, 2])),
    "reshaped": lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 2]),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_replica_may_have_no_rows(name):
    x = np.arange(1.0, 7.0, dtype="float32").reshape(3, 2)
    (found,) = Simulation(WITHOUT_ROWS[name], [tf.TensorSpec([None, None])], 3)((2, 0, 1), x)
    np.testing.assert_array_equal(found, WITHOUT_ROWS[name](tf.constant(x)))
