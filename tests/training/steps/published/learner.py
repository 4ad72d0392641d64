"""What published steps share: small data, small networks, and a model with a loss of them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROWS, BATCH = 12, 5


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def numbers(width=6, outputs=1):
    return lambda: (draws(ROWS, width), draws(ROWS, outputs, seed=1), None)


ROWS_OF_SIX = numbers()


def classes(width=6, count=3):
    return lambda: (
        draws(ROWS, width),
        np.random.default_rng(1).integers(0, count, ROWS).astype("int32"),
        None,
    )


def net(width, *units):
    parts = [layers.Dense(size, activation="tanh") for size in units[:-1]]
    return keras.Sequential([keras.Input((width,)), *parts, layers.Dense(units[-1])])


class Learner(keras.Model):
    """A model with networks of its own, and a loss of them.

    Args:
        **networks: What becomes an attribute.
    """

    def __init__(self, **networks):
        super().__init__()
        for name, network in networks.items():
            setattr(self, name, network)

    def objective(self, x, y):
        """The loss of a batch."""
        raise NotImplementedError

    def learn(self, function, weights=None, optimizer=None, change=lambda gradients: gradients):
        weights = self.trainable_weights if weights is None else weights
        with tf.GradientTape() as tape:
            loss = function()
        gradients = change(tape.gradient(loss, weights))
        (optimizer or self.optimizer).apply(gradients, weights)
        return loss

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.learn(lambda: self.objective(x, y))
        return {"objective": loss, **self.after(x, y)}

    def after(self, x, y):
        """What happens after a step; more logs."""
        return {}


def cross_entropy(labels, logits):
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(loss)


def unit(rows):
    return tf.math.l2_normalize(rows, axis=-1)
