"""Assertions on rows hold if they hold on each replica, and nothing is gathered for them."""

import numpy as np
import pytest
import tensorflow as tf
from simulated_replicas import Simulation


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
