"""Functions with custom gradients that read weights, and tapes in a user's loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.one_device import assert_as_one_device

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(22, 6)).astype("float32"), RANDOM.normal(size=(22, 1)).astype("float32")


@keras.saving.register_keras_serializable("test")
class Block(keras.layers.Layer):
    """Two layers whose outputs are recomputed in the backward pass."""

    def __init__(self, around):
        super().__init__()
        self.around = around
        self.parts = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(6, use_bias=False)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def call(self, x):
        def all_parts(x):
            for part in self.parts:
                x = part(x)
            return x

        return self.around(all_parts)(x)


def doubled(function):
    """A function with a doubled gradient, for inputs and weights."""

    @tf.custom_gradient
    def call(x):
        def gradient(arriving, variables=()):
            with tf.GradientTape() as tape:
                tape.watch([x, *variables])
                result = function(x)
            found = tape.gradient(result, [x, *variables], arriving)
            return 2 * found[0], [2 * each for each in found[1:]]

        return function(x), gradient

    return call


def training(ways, cls=keras.Model):
    """The losses and weights after two epochs."""

    def numbers(place, **options):
        inputs = hidden = keras.Input((6,))
        for around in ways:
            hidden = Block(around)(hidden)
        model = place(cls(inputs, keras.layers.Dense(1)(hidden)))
        model.compile("sgd", "mse", **options)
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights()

    return numbers


WAYS = keras.remat, tf.recompute_grad, doubled


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
@pytest.mark.slow
def test_weights_read_inside_get_their_gradients(options):
    """TensorFlow looks for the variables that a function reads."""
    assert_as_one_device(training(WAYS), **options)


class Flat(keras.Model):
    """Its loss grows with the gradient of the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        found = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * sum(keras.ops.sum(keras.ops.square(each)) for each in found)


@pytest.mark.slow
def test_a_tape_in_the_loss_watches_the_weights():
    """A gradient of a gradient, by a tape in `compute_loss`."""
    assert_as_one_device(training((), Flat))
