"""Small models and data in which something is not finite, for the tests of `NaNGuard`."""

import keras
import numpy as np
from helpers.cpu_replicas import on_replicas
from helpers.reused_models import reused

from keras_multigpu.training.variables.model_state import ModelState


@reused
def network(replicas=2, optimizer=None, normalized=False, skips=False, **compiled):
    """Two layers; with batch statistics, which take long to trace, if `normalized`."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        *([keras.layers.BatchNormalization(name="norm")] if normalized else []),
        keras.layers.Dense(1, name="last"),
    ]
    model = on_replicas(keras.Sequential(layers, name="net"), replicas)
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **compiled
    )
    return model


def guarded(guard, replicas=2, **settings):
    """A network for a guard, compiled as for a second `fit` with it.

    Guards that skip and others have networks of their own: a step is kept for one part only.
    """
    return network(replicas, skips=guard.action == "skip", **settings)


def line(replicas=2, rate=0.25, loss="mse", **compiled):
    """A model `y = w x` with `w = 1`, to be fitted to zero."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="line")(inputs)
    model = on_replicas(keras.Model(inputs, outputs), replicas)
    model.compile(keras.optimizers.SGD(rate), loss, **compiled)
    return model


def data(bad=None, value=np.nan, examples=24):
    """Inputs and targets; the input of one example is not finite."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 3)).astype("float32")
    y = random.normal(size=(examples, 1)).astype("float32")
    if bad is not None:
        x[bad, 1] = value
    return x, y


def fit(model, x, y, guard, batch_size=8, **arguments):
    arguments = {"shuffle": False, "verbose": 0, **arguments}
    callbacks = [guard, *arguments.pop("callbacks", [])]
    return model.fit(x, y, batch_size=batch_size, callbacks=callbacks, **arguments)


def state_of(model):
    return ModelState.of(model).values


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not name.startswith("seed"):
            np.testing.assert_array_equal(value, other[name], name)
