"""Sizes are counted as one device counts them, beyond the range of an int32, too."""

import numpy as np
import pytest
import tensorflow as tf
from simulated_replicas import Simulation

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
