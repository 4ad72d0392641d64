"""A model whose weight falls by the learning rate in each step, for the tests of rates."""

import keras
import numpy as np
from helpers.cpu_replicas import on_replicas

ONES, ZEROS = np.ones((20, 1), "float32"), np.zeros((20, 1), "float32")


class Do(keras.callbacks.Callback):
    """Does something in one of Keras's hooks."""

    def __init__(self, hook, act):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: act(self.model, *args))


class Rates(keras.callbacks.Callback):
    """The rate of each step, by which the weight falls."""

    def on_train_begin(self, logs=None):
        self._weights = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self._weights.append(self.model.get_weights()[0].item())

    @property
    def used(self):
        return -np.diff(self._weights)


def slope(replicas, optimizer, loss=None, **compiled):
    """A model whose loss is its weight, so that its gradient is one; of stock Keras for None."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, layer(inputs))
    if replicas is not None:
        model = on_replicas(model, replicas)
    model.compile(optimizer, loss or (lambda y, y_pred: y_pred - y), **compiled)
    return model


def trained(model, *callbacks, epochs=2, **arguments):
    """What `fit` returns after two epochs of five steps."""
    arguments = {"batch_size": 4, "verbose": 0, **arguments}
    return model.fit(ONES, ZEROS, epochs=epochs, callbacks=list(callbacks), **arguments)


EVEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
"""Seven steps of warm-up to 0.8, from an eighth of it on."""


def eager_slope(replicas, optimizer):
    """A slope without a graph, for tests of what happens between steps: tracing takes longer."""
    return slope(replicas, optimizer, run_eagerly=True)
