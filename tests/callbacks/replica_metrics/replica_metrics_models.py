"""A model with known numbers and its data, for the tests of `ReplicaMetrics`."""

import keras
import numpy as np
from helpers.cpu_replicas import on_replicas
from helpers.reused_models import reused

# Two batches of four and a ragged one of two.
X = np.arange(1.0, 11.0, dtype="float32")[:, None]
Y = np.zeros((10, 1), "float32")


@reused
def line(replicas, measures=0, **compiled):
    """A model `y = w x` with `w = 1` that stays as it is, to be fitted to zero.

    Callbacks with another number of `measures` have a model of their own, because a step is kept
    for one part only.
    """
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    model = on_replicas(keras.Model(inputs, outputs), replicas)
    model.compile(keras.optimizers.SGD(0.0), "mse", **compiled)
    return model


def measured(callback, replicas=2):
    """A model whose step is already compiled with the callback's probe, as in a second `fit`."""
    assert callback.metrics in ([], ["mae"])
    return line(replicas, measures=len(callback.metrics))


def fit(model, *callbacks, x=X, y=Y, batch_size=4, epochs=1):
    """The history of training in the order of the examples."""
    given = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, **given).history
