"""Models and data for the tests of `verify`: right ones, and wrong ones with their mistake."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_multigpu as kmg


def data():
    """Batches of 8, 8 and 4 examples."""
    return arrays().batch(8)


def full_batches():
    """Batches of 8 examples each."""
    return arrays().batch(8, drop_remainder=True)


def arrays():
    random = np.random.default_rng(0)
    x = random.normal(size=(20, 6)).astype("float32")
    y = random.normal(size=(20, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y))


def compiled(model, optimizer=None, loss="mse"):
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def sequential(*middle, **options):
    """A small network with some layers in the middle."""
    parts = [keras.Input((6,)), layers.Dense(5, name="first"), *middle, layers.Dense(1)]
    return compiled(keras.Sequential(parts), **options)


# Right ones.


def right():
    return sequential(layers.Activation("tanh"))


def right_with_adam():
    return sequential(layers.Activation("tanh"), optimizer="adam")


def half_precision():
    policy = "mixed_bfloat16"
    parts = [layers.Dense(5, "tanh", dtype=policy), layers.Dense(1, dtype=policy)]
    return compiled(keras.Sequential([keras.Input((6,)), *parts]))


def unbuilt_with_dropout():
    parts = [layers.Dense(5), layers.Dropout(0.5, name="dropped"), layers.Dense(1)]
    return compiled(keras.Sequential(parts))


def recurrent():
    lstm = layers.LSTM(3, dropout=0.5, name="lstm")
    parts = [keras.Input((6,)), layers.Reshape((3, 2)), lstm, layers.Dense(1)]
    return compiled(keras.Sequential(parts))


def synchronised_batch_norm_with_adam():
    model = sequential(layers.BatchNormalization(), layers.Activation("tanh"), optimizer="adam")
    return kmg.distribute(model)


def scalar_loss():
    """The loss of the batch as a whole, which replicas gather."""
    return sequential(loss=lambda y, y_pred: ops.mean(ops.square(y - y_pred)) * ops.max(y_pred))


class AddsLoss(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(ops.square(x)))
        return x


def added_mean():
    return sequential(AddsLoss(ops.mean))


class OwnStep(keras.Model):
    """A model with a `train_step` of its own, which takes its loss from `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(5, "tanh", name="first")
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x, y, y_pred)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x)
            loss = self.loss_of(x, y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"my_loss": loss}


def own_step():
    return compiled(OwnStep())


# Wrong ones.


class DividesByLocalBatch(OwnStep):
    def loss_of(self, x, y, y_pred):
        return ops.sum(ops.square(y - y_pred)) / ops.cast(ops.shape(y)[0], "float32")


def divides_by_local_batch():
    return compiled(DividesByLocalBatch())


def divides_by_local_batch_with_adam():
    """Adam hides a wrong factor in the gradient from the weights, not from its moments."""
    return compiled(DividesByLocalBatch(), "adam")


class CouplesExamples(OwnStep):
    def loss_of(self, x, y, y_pred):
        return ops.mean(ops.square(y - y_pred)) * ops.max(y_pred)


def couples_examples():
    return compiled(CouplesExamples())


class DrawsInStep(OwnStep):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def train_step(self, data):
        x, y = data
        return super().train_step((x + keras.random.normal(ops.shape(x), seed=self.seeds), y))


def draws_in_step():
    return compiled(DrawsInStep())


def batch_norm():
    return sequential(layers.BatchNormalization(name="norm"), layers.Activation("tanh"))


class CentresOverBatch(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


def layer_mixes_examples():
    return sequential(CentresOverBatch(name="centre"))


def operation_mixes_examples():
    inputs = keras.Input((6,))
    hidden = layers.Dense(5)(inputs)
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden - ops.mean(hidden, axis=0))))


class MixesInCall(keras.Model):
    def __init__(self):
        super().__init__(name="mixer")
        self.first, self.last = layers.Dense(5), layers.Dense(1)

    def call(self, x):
        hidden = self.first(x)
        return self.last(hidden - ops.mean(hidden, axis=0))


def call_mixes_examples():
    return compiled(MixesInCall())


def coupled_loss():
    def loss(y, y_pred):
        # Only large errors count for others, so that trying it on a few rows finds nothing.
        errors = ops.abs(y - y_pred)
        return errors[:, 0] * ops.maximum(ops.max(errors), 1.0)

    return sequential(loss=loss)


def added_sum():
    return sequential(AddsLoss(ops.sum))


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator()

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seeds)


def always_draws():
    return sequential(Sampling(name="sampling"))


class HardCodedReshape(layers.Layer):
    def call(self, x):
        return ops.reshape(x, (8, 5))


def hard_coded_batch_size():
    return sequential(HardCodedReshape(name="reshaper"))


def not_compiled():
    return keras.Sequential([keras.Input((6,)), layers.Dense(1)])
