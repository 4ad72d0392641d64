"""What users do with a model besides one `fit`: each row ends as on one device.

A row is a function that trains: it puts models where they belong, compiles them with options, and
returns numbers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from helpers.one_device import assert_as_one_device
from keras import layers, ops

import keras_multigpu as kmg

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(11, 4)).astype("float32")
Y = DRAW.normal(size=(11, 1)).astype("float32")
DRAWN_WEIGHTS = DRAW.uniform(size=11)
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


def in_float64(place, **options):
    """Switched on as users do; loss and gradients are float64, too."""
    x, y, weights = X.astype("float64"), Y.astype("float64"), DRAWN_WEIGHTS
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        penalized = layers.Dense(4, kernel_regularizer="l2")
        model = place(dense(penalized, layers.BatchNormalization(), made.OutputPenalty()))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
        history = model.fit(x, y, sample_weight=weights, **FIT).history
        scores = model.evaluate(x, y, sample_weight=weights, verbose=0)
        return history, model.get_weights(), scores
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


class OneHead(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y_pred[0] - y) ** 2)


def a_head_without_a_loss(place, **options):
    """Its weights have no gradient, and do not decay."""
    x = keras.Input((4,))
    model = place(OneHead(x, [layers.Dense(1)(x), layers.Dense(1)(x)]))
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), **options)
    model.fit(X, Y, **FIT)
    return model.get_weights()


class Halving(keras.optimizers.SGD):
    """Halves each gradient in `apply_gradients`."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


class Lookahead(keras.optimizers.Optimizer):
    """Has an optimizer for kernels and one for biases, and goes half way back every second step."""

    def __init__(self):
        super().__init__(learning_rate=0.1)
        self.parts = {"kernels": keras.optimizers.Adam(0.1), "biases": [keras.optimizers.SGD(0.1)]}

    def build(self, variables):
        super().build(variables)
        self.parts["kernels"].build(variables[::2])
        self.parts["biases"][0].build(variables[1::2])
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.parts["kernels"].apply(grads[::2], trainable_variables[::2])
        self.parts["biases"][0].apply(grads[1::2], trainable_variables[1::2])
        self.iterations.assign_add(1)
        back = 0.5 * ops.cast(self.iterations % 2 == 0, "float32")
        for slow, weight in zip(self.slow, trainable_variables, strict=True):
            weight.assign(weight + back * (slow - weight))
            slow.assign(weight)


def with_own_optimizers(place, **options):
    """An overridden `apply_gradients`, and optimizers around others."""
    found = []
    for make in (Halving, Lookahead):
        model = place(dense())
        model.compile(make(), "mse", **options)
        model.fit(X, Y, epochs=2, **FIT)
        found.append(model.get_weights())
    return found


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """Two layers inside a function that TensorFlow asks for its variables."""

    def __init__(self, around):
        super().__init__()
        self.around = around
        self.parts = [layers.Dense(8, "tanh"), layers.Dense(4, use_bias=False)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def call(self, x):
        return self.around(lambda x: self.parts[1](self.parts[0](x)))(x)


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


def with_own_gradients(place, **options):
    """Weights that are read inside functions with gradients of their own."""
    model = place(dense(*[Block(each) for each in (keras.remat, tf.recompute_grad, doubled)]))
    model.compile("sgd", "mse", **options)
    return model.fit(X, Y, **FIT).history, model.get_weights()


class Flat(keras.Sequential):
    """Its loss grows with the gradient of the loss, by a tape in `compute_loss`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        found = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * sum(ops.sum(ops.square(each)) for each in found)


def with_gradients_in_the_loss(place, **options):
    model = place(Flat([keras.Input((4,)), layers.Dense(1)]))
    model.compile("sgd", "mse", **options)
    return model.fit(X, Y, **FIT).history, model.get_weights()


ROWS = [
    (frozen_after_compile, {"in_graph": True}),
    (quantized, {}),
    (quantized_when_placed, {}),
    (placed_again, {}),
    (in_parts, {"micro_batches": 2}),
    (distilled, {}),
    (distilled, {"micro_batches": 2}),
    (compiled_by_xla, {"in_graph": True}),
    (in_float64, {"rtol": 1e-12, "atol": 1e-14}),
    (a_head_without_a_loss, {}),
    (with_own_optimizers, {}),
    (with_own_gradients, {}),
    (with_own_gradients, {"micro_batches": 2}),
    (with_gradients_in_the_loss, {}),
]
"""Each with options for `assert_as_one_device`."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize(("numbers", "options"), ROWS)
def test_a_training_is_that_of_one_device(numbers, options):
    assert_as_one_device(numbers, **options)


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
