"""What users do with a model besides one `fit`: each row ends as on one device.

A row is a function that trains: it puts models where they belong, compiles them with options, and
returns numbers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.one_device import assert_as_one_device
from keras import layers

import keras_multigpu as kmg

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(11, 4)).astype("float32")
Y = DRAW.normal(size=(11, 1)).astype("float32")
FIT = {"batch_size": 4, "shuffle": False, "verbose": 0}


def dense(*more):
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), *more, layers.Dense(1)])


def numbers_of(model, *others):
    states = [variable.numpy() for variable in model.optimizer.variables]
    return [*others, model.get_weights(), states, model.predict(X, verbose=0)]


def frozen_after_compile(place, **options):
    """In Keras a layer is frozen at once if no step was made, or else at the next `compile`."""
    model = place(dense())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    model.layers[1].trainable = False
    first = model.fit(X, Y, **FIT).history
    model.layers[1].trainable, model.layers[0].trainable = True, False
    second = model.fit(X, Y, **FIT).history
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return numbers_of(model, first, second, model.fit(X, Y, **FIT).history)


def quantized(place, **options):
    """LoRA's narrow kernels train beside a kernel in 8 bits."""
    model = dense()
    for layer in model.layers:
        layer.enable_lora(2)
    model.quantize("int8")
    model = place(model)
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return numbers_of(model, model.fit(X, Y, **FIT).history, model.evaluate(X, Y, verbose=0))


def quantized_when_placed(place, **options):
    model = place(dense())
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    history = model.fit(X, Y, **FIT).history
    model.quantize("int8")
    return history, model.predict(X, verbose=0)


def placed_again(place, **options):
    """Once more as it is, then on other devices, and with its optimizer in parts."""
    model = place(place(dense()))
    model.compile("adam", "mse", **options)
    found = [model.fit(X, Y, **FIT).history]
    for more in ({"devices": 3}, {"devices": 2, "shard": "optimizer"}):
        if isinstance(model, kmg.DistributedModel):
            model = kmg.distribute(model, **more)
        found.append(model.fit(X, Y, **FIT).history)
    return numbers_of(model, *found)


def in_parts(place, **options):
    """With a penalty of weights, of which each replica has its rows, once for all its pieces."""
    wide = [layers.Dense(300, "tanh"), layers.Dense(300, "tanh", kernel_regularizer="l2")]
    model = place(dense(*wide))
    if isinstance(model, kmg.DistributedModel):
        model = kmg.distribute(model, devices=2, shard="weights", self_check=False)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **options)
    return numbers_of(model, model.fit(X, Y, **FIT).history)


class Distiller(keras.Model):
    """A teacher inside, whose outputs the student learns beside the labels."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(), dense(layers.BatchNormalization())
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compile(self, distance, **options):
        super().compile(**options)
        self.distance = distance

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = self.distance(self.teacher(x, training=False) / 3.0, y_pred / 3.0)
        return 0.1 * super().compute_loss(x, y, y_pred, sample_weight) + 0.9 * taught


def distilled(place, **options):
    model = place(Distiller())
    distance = keras.losses.MeanAbsoluteError()
    model.compile(distance, optimizer="adam", loss="mse", metrics=["mae"], **options)
    history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
    return numbers_of(model, history)


def compiled_by_xla(place, **options):
    model = place(dense(layers.BatchNormalization()))
    options["jit_compile"] = True
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **options)
    return model.fit(X, Y, **FIT).history, model.get_weights()


ROWS = [
    (frozen_after_compile, {}, True),
    (quantized, {}, False),
    (quantized_when_placed, {}, False),
    (placed_again, {}, False),
    (in_parts, {"micro_batches": 2}, False),
    (distilled, {}, False),
    (distilled, {"micro_batches": 2}, False),
    (compiled_by_xla, {}, True),
]
"""Each with options for replicas, and whether plain Keras needs a graph for it."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
@pytest.mark.parametrize(("numbers", "options", "in_graph"), ROWS)
def test_a_training_is_that_of_one_device(numbers, options, in_graph):
    assert_as_one_device(numbers, replicas=2, in_graph=in_graph, **options)


STRUCTURES = {
    "list": (False, lambda a, b: [a, b]),
    "dict": (True, lambda a, b: {"a": a, "b": b}),
    "tuple": (True, lambda a, b: (a, b)),
}
"""Each with whether a dataset may have it."""


@pytest.mark.slow
@pytest.mark.parametrize("form", STRUCTURES)
def test_inputs_and_outputs_may_have_any_structure(form):
    """Losses, too, have that of the outputs."""
    in_dataset, structure = STRUCTURES[form]
    x, y = structure(X, X[:, :2]), structure(Y, (Y > 0).astype("float32"))

    def numbers(place, **options):
        a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
        both = layers.Concatenate()([a, b])
        ends = structure(layers.Dense(1)(both), layers.Dense(1, "sigmoid")(both))
        model = place(keras.Model(structure(a, b), ends))
        losses = structure("mse", "binary_crossentropy")
        model.compile(keras.optimizers.SGD(0.1), losses, **options)
        given = {"x": x, "y": y, "batch_size": 4}
        if in_dataset:
            given = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(4)}
        history = model.fit(**given, shuffle=False, verbose=0).history
        return history, model.get_weights(), model.predict(x, verbose=0)

    # Without a graph Keras weighs the batches of several losses by their sizes.
    assert_as_one_device(numbers, in_graph=True)
