"""Models that run out of memory when they get too many rows, for the tests of `BatchSizeFinder`."""

import keras
import numpy as np
from helpers.cpu_replicas import on_replicas
from helpers.reused_models import reused
from helpers.rows_in_python import zeros_after

import keras_multigpu as kmg


def fed(x, fails):
    """The same tensor; raises a `MemoryError` if a replica's rows `fail`."""

    def check(rows):
        if fails(rows):
            raise MemoryError("not enough")

    return x + zeros_after(check, x)


class Hungry(keras.layers.Layer):
    """Runs out of memory with more rows than `fitting`, which is read in each step."""

    def __init__(self, fitting, **options):
        super().__init__(**options)
        self.fitting = fitting

    def call(self, x):
        return fed(x, lambda rows: len(rows) > self.fitting)


def network(fitting, replicas=1, **compiled):
    """A small model on devices where `fitting` rows fit; None for any number."""
    model = hungry(replicas, fitting is not None, **compiled)
    if fitting is not None:
        model.get_layer("hungry").fitting = fitting
    return model


@reused
def hungry(replicas, limited, stateful=False, **compiled):
    """The model; with all kinds of state if `stateful`."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), *([Hungry(0, name="hungry")] if limited else [])]
    if stateful:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = on_replicas(keras.Sequential([*layers, keras.layers.Dense(2)]), replicas)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], **compiled)
    return model


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 90)


def batches(**settings):
    """The examples in batches of six, shuffled."""
    return kmg.data.from_arrays(X, Y, **{"global_batch_size": 6, "seed": 7, **settings})


def search(model, finder, data=None, **arguments):
    data = batches() if data is None else data
    model.fit(data, epochs=0, callbacks=[finder], **{"verbose": 0, **arguments})
    return finder


def sizes(finder):
    return [(one.replica_batch_size, one.fits) for one in finder.tries]
