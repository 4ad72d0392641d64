"""`LearningRateWarmup`: the rate of each step, against rates computed here."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import covering, on_replicas
from helpers.own_step import OwnStep
from slope_models import EVEN, ONES, ZEROS, Rates, slope, trained

from keras_multigpu.callbacks import LearningRateWarmup

pytestmark = [
    # Keras 3.15.1 reads rates through an `__array__` that NumPy 2 finds outdated.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]


@pytest.mark.parametrize("replicas", [None, 2])
def test_the_rate_rises_with_each_step(replicas):
    """By the weight, which falls by the rate, and by the log."""
    model, rates = slope(replicas, keras.optimizers.SGD(0.8)), Rates()
    history = trained(model, LearningRateWarmup(steps=7), rates).history
    np.testing.assert_allclose(rates.used, EVEN, rtol=1e-5)
    np.testing.assert_allclose(history["learning_rate"], [0.5, 0.8], rtol=1e-6)
    assert np.isclose(float(model.optimizer.learning_rate), 0.8)


@pytest.mark.slow
def test_the_rate_rises_from_the_initial_rate_to_the_target():
    """In four steps, also where several run in one graph."""
    warmup = LearningRateWarmup(steps=4, initial_rate=0.1)
    model = slope(2, keras.optimizers.SGD(0.8), steps_per_execution=3)
    trained(model, warmup)
    expected = [0.1 + 0.7 * min(step / 4, 1) for step in range(10)]
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(expected), rtol=1e-5)


@pytest.mark.parametrize(("replicas", "scaled"), covering([None, 2], [False, True]))
def test_a_schedule_is_multiplied_and_restored(replicas, scaled):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    outer = keras.optimizers.LossScaleOptimizer(optimizer, 2.0) if scaled else optimizer
    warmup = LearningRateWarmup(epochs=0.6)
    model = slope(replicas, outer)
    history = trained(model, warmup).history
    parts = np.array([0.25, 0.5, 0.75] + [1.0] * 7)
    expected = parts * 0.8 * 0.5 ** np.arange(10)
    np.testing.assert_allclose(history["learning_rate"], expected[[4, 9]], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected.sum(), rtol=1e-5)
    assert optimizer._learning_rate is schedule


@pytest.mark.parametrize(("replicas", "nesterov"), covering([None, 2], [False, True]))
def test_the_velocity_follows_the_rate(replicas, nesterov):
    """As in an SGD with the rate outside the velocity: `w -= rate * v`."""
    optimizer = keras.optimizers.SGD(0.8, momentum=0.9, nesterov=nesterov)
    model = slope(replicas, optimizer)
    trained(model, LearningRateWarmup(steps=7))
    weight, velocity = 0.0, 0.0
    for rate in EVEN:
        velocity = 0.9 * velocity + 1.0
        weight -= rate * (0.9 * velocity + 1.0 if nesterov else velocity)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)


def test_empty_replicas_and_micro_batches():
    """A last batch of one example on two replicas, in pieces."""
    model = slope(2, keras.optimizers.SGD(0.8), micro_batches=2)
    warmup = LearningRateWarmup(steps=2)
    model.fit(ONES[:17], ZEROS[:17], 16, epochs=2, verbose=0, callbacks=[warmup])
    np.testing.assert_allclose(model.get_weights()[0].item(), -3.2 + 0.8, rtol=1e-5)


def test_a_custom_train_step_warms_up():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = on_replicas(OwnStep(layer), 2)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 100, 1.0)
    model.compile(keras.optimizers.SGD(schedule), lambda y, y_pred: y_pred - y)
    trained(model, LearningRateWarmup(steps=7))
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(EVEN), rtol=1e-5)


def test_the_step_is_traced_once():
    """Warm-up, its end, and a second `fit` run the same graph."""
    traces = []

    def loss(y, y_pred):
        traces.append(1)
        return y_pred - y

    model = slope(1, keras.optimizers.SGD(0.8), loss)
    warmup = LearningRateWarmup(steps=7)
    trained(model, warmup, epochs=1)
    once = len(traces)
    trained(model, warmup, epochs=2)
    assert len(traces) == once
