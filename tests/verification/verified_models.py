"""Models and data for the tests of `verify`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_multigpu as kmg


def data():
    """Batches of 8, 8 and 4 examples."""
    return arrays().batch(8)


def arrays():
    random = np.random.default_rng(0)
    x = random.normal(size=(20, 6)).astype("float32")
    y = random.normal(size=(20, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y))


def compiled(model, optimizer=None, loss="mse"):
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def sequential(*middle, **options):
    parts = [keras.Input((6,)), layers.Dense(5, name="first"), *middle, layers.Dense(1)]
    return compiled(keras.Sequential(parts), **options)


def right():
    return sequential(layers.Activation("tanh"))


# Keras 3.10 does not have it.
begun_at_weights = getattr(keras.optimizers, "ScheduleFreeAdamW", keras.optimizers.Adam)


def begins_at_its_weights():
    return sequential(layers.Activation("tanh"), optimizer=begun_at_weights(0.01))


def half_precision():
    policy = "mixed_bfloat16"
    parts = [layers.Dense(5, "tanh", dtype=policy), layers.Dense(1, dtype=policy)]
    return compiled(keras.Sequential([keras.Input((6,)), *parts]))


def batch_norm_with_adam():
    """Distributed already."""
    model = sequential(layers.BatchNormalization(), layers.Activation("tanh"), optimizer="adam")
    return kmg.distribute(model)


class AsksWhereItRuns(keras.Model):
    """A planted bug: the step is another one on replicas, and its graph does not show it."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1, name="last")

    def call(self, x):
        return self.last(x)

    def train_step(self, data):
        x, y = data
        return super().train_step((x, self.target(y, isinstance(self, kmg.DistributedModel))))


class LearnsElsewhere(AsksWhereItRuns):
    def target(self, y, distributed):
        return 0 * y + 100.0 if distributed else 0 * y + 50.0


def learns_elsewhere():
    return compiled(LearnsElsewhere())


class FailsElsewhere(AsksWhereItRuns):
    def target(self, y, distributed):
        if distributed:
            raise ValueError("It only works at home.")
        return y


def fails_elsewhere():
    return compiled(FailsElsewhere())


def unrepeatable():
    """Draws from a generator without a seed."""
    random = np.random.default_rng()

    def noisy(x):
        noise = tf.numpy_function(
            lambda a: random.normal(size=a.shape).astype("f4"), [x], "float32"
        )
        return x + tf.ensure_shape(noise, x.shape)

    return sequential(layers.Lambda(noisy, output_shape=(5,)))


def not_compiled():
    return keras.Sequential([keras.Input((6,)), layers.Dense(1)])
