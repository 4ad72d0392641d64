"""Models that compute in float64 keep their precision."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(11, 6)), RANDOM.normal(size=(11, 1))
WEIGHTS = RANDOM.uniform(size=11)


@pytest.fixture(autouse=True)
def float64():
    """Switched on as users do."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


class Adds(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Taped(keras.Model):
    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - y)[:, 0] * weights
            loss = keras.ops.mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


def trained(replicas, cls):
    """All numbers of two epochs and an evaluation; plain Keras's without replicas."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")(inputs)
    hidden = Adds()(keras.layers.BatchNormalization()(hidden))
    model = cls(inputs, keras.layers.Dense(1)(hidden))
    if replicas:
        model = on_replicas(model, replicas)
    # Keras has no result of a metric that no step updates.
    metrics = None if cls is Taped else ["mae"]
    # Without replicas a graph takes longer to make than all the steps.
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics, run_eagerly=not replicas)
    given = {"sample_weight": WEIGHTS, "batch_size": 8, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **given).history
    logs = [history[name] for name in sorted(history)]
    return [*logs, *model.get_weights(), model.evaluate(X, Y, **given)]


@pytest.mark.parametrize("cls", [keras.Model, Taped])
@pytest.mark.in_test_all("one number of replicas shows it", after=1)
@pytest.mark.slow
def test_replicas_are_as_exact_as_one_device(cls):
    """Loss and gradients are float64, too."""
    found = trained(2, cls)
    for one, other in zip(found, trained(None, cls), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.in_test_all("pieces are shares of the batch")
def test_micro_batches_are_as_exact():
    def losses(replicas, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        if replicas:
            model = on_replicas(model, replicas)
        model.compile("sgd", "mse", **options)
        return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    alone = losses(None, run_eagerly=True)
    np.testing.assert_allclose(losses(2, micro_batches=2), alone, rtol=1e-12)
