"""The step of one device, split over replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.one_device import assert_as_one_device

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of

ROWS, BATCH = 15, 7


class Trained(keras.Sequential):
    """A model whose loss the test gives.

    Args:
        loss: A function of the outputs, the targets and the model.
        *args: As in `keras.Sequential`.
    """

    def __init__(self, loss, *args):
        super().__init__(*args)
        self.own_loss = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self(x, training=True), y, self)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def spread(outputs, targets, model):
    """A loss of which each part relates rows."""
    distances = outputs - tf.reduce_mean(outputs, axis=0)
    return tf.sqrt(tf.reduce_sum(distances**2)) / tf.cast(tf.shape(outputs)[0], tf.float32)


def contrast(outputs, targets, model):
    """SimCLR's loss: which row is this, of all rows?"""
    rows = tf.math.l2_normalize(outputs, axis=1)
    labels = tf.range(tf.shape(rows)[0])
    logits = tf.matmul(rows, rows, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def by_position(outputs, targets, model):
    """Later rows count more, and the first row is left out."""
    weights = tf.cast(tf.range(tf.shape(outputs)[0]), tf.float32) / 10.0
    return tf.reduce_sum(weights * tf.reduce_mean((outputs - targets) ** 2, axis=1))


def ranked(outputs, targets, model):
    losses = tf.reduce_mean((outputs - targets) ** 2, axis=1)
    return tf.reduce_mean(tf.sort(losses, direction="DESCENDING")[: tf.shape(losses)[0] // 2 + 1])


def in_python(outputs, targets, model):
    """A weight that NumPy computes from the whole batch."""
    weight = tf.numpy_function(lambda rows: np.float32(np.median(rows)), [outputs], tf.float32)
    return tf.reduce_mean((outputs - targets) ** 2) * (1.0 + tf.stop_gradient(weight) ** 2)


def layers():
    return [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(4),
    ]


def training(loss, models):
    """The weights of a model and what it predicts, after two epochs."""

    def numbers(place, **options):
        model = Trained(loss, layers())
        model.build((None, 5))
        models.append(model := place(model))
        draws = np.random.default_rng(0)
        x, y = (draws.normal(size=(ROWS, n)).astype("float32") for n in (5, 4))
        model.compile(keras.optimizers.SGD(0.05), "mse", **options)
        keras.utils.set_random_seed(4)
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), model.predict(x, batch_size=BATCH, verbose=0)

    return numbers


def reasons(model):
    """Why runners of the training step are unsplit."""
    runners = replication_of(model).step_functions(model, "train").runners
    return [runner.unsplit_because for runner in runners]


@pytest.mark.slow
def test_a_loss_that_relates_rows_is_that_of_one_device():
    """In a custom `train_step`, with dropout and BatchNorm."""

    def loss(*given):
        return sum(each(*given) for each in (spread, contrast, by_position, ranked, in_python))

    # XLA, which Keras would choose for one device, draws other numbers.
    assert_as_one_device(training(loss, models := []), replicas=3, jit_compile=False)
    assert set(reasons(models[0])) == {None}


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_same_seed_drops_the_same_units_on_any_number_of_replicas(replicas):
    class Noise(keras.Sequential):
        def predict_step(self, data):
            return self(data, training=True)

    def noise(place, compiled=True):
        keras.utils.set_random_seed(3)
        model = place(Noise([keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.1)]))
        if compiled:
            model.compile(jit_compile=False)
        return model.predict(np.ones((ROWS, 4), "float32"), batch_size=BATCH, verbose=0)

    strategy = kmg.strategy("mirrored", devices=replicas)
    found = noise(lambda model: kmg.distribute(model, strategy))
    np.testing.assert_array_equal(found, noise(lambda model: model))
    # A model that was never compiled predicts as well.
    again = noise(lambda model: kmg.distribute(model, strategy), compiled=False)
    np.testing.assert_array_equal(again, found)
