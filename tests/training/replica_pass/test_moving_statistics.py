"""How replicas agree on changed variables, by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.replica_pass import moving_statistics

# Three replicas with 3, 1 and 0 of 4 examples; the values they end with; what all get.
TABLE = [
    ("float32", "none", 10.0, [2.0, 6.0, 9.0], 3.0),  # 2 * 3/4 + 6 * 1/4
    ("float32", "sum", 10.0, [12.0, 11.0, 10.0], 13.0),  # 10 + 2 + 1 + 0
    ("float32", "only_first_replica", 10.0, [2.0, 6.0, 9.0], 2.0),
    ("int32", "none", 10, [11, 12, 13], 11),
    ("bool", "none", False, [True, False, False], True),
    ("int64", "sum", 10, [12, 11, 10], 13),
    ("uint8", "sum", 10, [12, 11, 10], 13),
    ("bfloat16", "none", 10.0, [2.0, 6.0, 9.0], 3.0),
    ("float16", "none", 0.0, [2047.0, 2047.0, 0.0], 2047.0),
]


@pytest.mark.parametrize(("dtype", "aggregation", "old", "new", "expected"), TABLE)
def test_the_common_value(dtype, aggregation, old, new, expected):
    """Floats are averaged by examples, sums add up, others follow the first replica."""
    variable = keras.Variable(old, dtype=dtype, trainable=False, aggregation=aggregation)
    old = tf.constant(old, dtype)
    total = sum(
        moving_statistics.contribution(
            variable, old, tf.constant(value, dtype), tf.constant(part), tf.constant(replica)
        )
        for replica, (value, part) in enumerate(zip(new, [0.75, 0.25, 0.0], strict=True))
    )
    result = moving_statistics.merged(old, total)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.numpy(), expected)


def test_a_single_replica_keeps_its_value():
    """Whatever the sums would be: also where old and new are infinite."""
    for aggregation in ("none", "sum", "only_first_replica"):
        variable = keras.Variable(0.0, aggregation=aggregation)
        old, new = tf.constant(np.inf), tf.constant(3.0)
        own = moving_statistics.contribution(variable, old, new, tf.constant(1.0), tf.constant(0))
        assert float(moving_statistics.merged(old, own)) == 3.0
