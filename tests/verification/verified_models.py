"""Models and data for the tests of `verify`."""

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
    parts = [keras.Input((6,)), layers.Dense(5, name="first"), *middle, layers.Dense(1)]
    return compiled(keras.Sequential(parts), **options)


def right():
    return sequential(layers.Activation("tanh"))


def right_with_adam():
    return sequential(layers.Activation("tanh"), optimizer="adam")


# Keras 3.10 does not have it.
begun_at_weights = getattr(keras.optimizers, "ScheduleFreeAdamW", keras.optimizers.Adam)


def begins_at_its_weights():
    return sequential(layers.Activation("tanh"), optimizer=begun_at_weights(0.01))


def half_precision():
    policy = "mixed_bfloat16"
    parts = [layers.Dense(5, "tanh", dtype=policy), layers.Dense(1, dtype=policy)]
    return compiled(keras.Sequential([keras.Input((6,)), *parts]))


def unbuilt_with_dropout():
    parts = [layers.Dense(5), layers.Dropout(0.5), layers.GaussianNoise(0.3), layers.Dense(1)]
    return compiled(keras.Sequential(parts))


def recurrent():
    lstm = layers.LSTM(3, dropout=0.5)
    parts = [keras.Input((6,)), layers.Reshape((3, 2)), lstm, layers.Dense(1)]
    return compiled(keras.Sequential(parts))


def batch_norm():
    return sequential(layers.BatchNormalization(), layers.Activation("tanh"))


def batch_norm_with_adam():
    """Distributed already."""
    model = sequential(layers.BatchNormalization(), layers.Activation("tanh"), optimizer="adam")
    return kmg.distribute(model)


class EverythingAtOnce(keras.Model):
    """Draws unseeded, mixes examples, adds a sum to the loss, divides by the number of rows."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(5, "tanh")
        self.last = layers.Dense(1)

    def call(self, x):
        hidden = self.first(x)
        self.add_loss(0.1 * ops.sum(ops.square(hidden)))
        return self.last(hidden - ops.mean(hidden, axis=0))

    def train_step(self, data):
        x, y = data
        x = tf.random.shuffle(x) + keras.random.normal(ops.shape(x))
        with tf.GradientTape() as tape:
            errors = ops.square(y - self(x, training=True))
            loss = ops.sum(errors) / ops.cast(ops.shape(x)[0], "float32") + ops.max(errors)
            loss += sum(self.losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"my_loss": loss}


def everything_at_once():
    return compiled(EverythingAtOnce())


def written_batch_size():
    """Reshapes to eight rows, of which a replica has fewer."""
    return sequential(layers.Lambda(lambda x: ops.reshape(x, (8, 5)), output_shape=(5,)))


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
