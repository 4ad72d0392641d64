"""A zero keeps its sign on its way between replicas: the sign of `1 / x` depends on it."""

import numpy as np
import pytest
import tensorflow as tf
from simulated_replicas import Simulation

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
