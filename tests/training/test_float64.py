"""Models that compute in float64 keep their precision."""

import keras
import numpy as np
import pytest
from helpers.one_device import assert_as_one_device

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


def trained(place, **options):
    """All numbers of two epochs and an evaluation."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")(inputs)
    hidden = Adds()(keras.layers.BatchNormalization()(hidden))
    model = place(keras.Model(inputs, keras.layers.Dense(1)(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    given = {"sample_weight": WEIGHTS, "batch_size": 8, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **given).history
    return history, model.get_weights(), model.evaluate(X, Y, **given)


@pytest.mark.slow
def test_replicas_are_as_exact_as_one_device():
    """Loss and gradients are float64, too."""
    assert_as_one_device(trained, rtol=1e-12, atol=1e-14)
