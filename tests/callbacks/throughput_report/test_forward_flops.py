"""The floating-point operations of a forward pass."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.callbacks.throughput_report.forward_flops import forward_flops

INPUT = keras.Input((6, 6, 4))


def attention(x):
    """Two heads of four numbers each."""
    return keras.layers.MultiHeadAttention(2, 4)(x, x)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda x: keras.layers.Dense(5)(x), 36 * 4 * 5),
        (lambda x: keras.layers.Conv2D(8, 3)(x), 16 * 8 * 9 * 4),
        # Keras hides a convolution in groups in a function of its own.
        (lambda x: keras.layers.Conv2D(8, 3, groups=2, padding="same")(x), None),
        (lambda x: keras.layers.Conv2D(8, 3, strides=2, padding="same")(x), 9 * 8 * 9 * 4),
        (lambda x: keras.layers.DepthwiseConv2D(3, padding="same")(x), 36 * 4 * 9),
        (lambda x: keras.layers.Conv2DTranspose(8, 2, strides=2)(x), 36 * 4 * 4 * 8),
        (lambda x: keras.layers.Reshape((36, 4))(x), 0),
        (
            lambda x: attention(keras.layers.Reshape((36, 4))(x)),
            # Query, key, value and the output; scores; weighted values.
            4 * 36 * 4 * 8 + 2 * 36 * 36 * 8,
        ),
        (lambda x: keras.layers.GRU(3)(keras.layers.Reshape((36, 4))(x)), None),
    ],
)
def test_operations_are_counted(build, expected):
    """Two for each term of a sum; None where a loop or a function hides some."""
    model = keras.Model(INPUT, build(INPUT))
    spec = tf.TensorSpec([None, 6, 6, 4], tf.float32)
    assert forward_flops(model, spec) == (None if expected is None else 2 * expected)
