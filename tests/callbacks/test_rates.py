"""`Rate`: a plain number, a schedule or a function, bare or inside a loss scale."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import covering
from slope_models import slope

from keras_multigpu.callbacks.rates import Rate
from keras_multigpu.training.replication import replication_of

X, Y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")


def decay():
    """0.8, 0.4, 0.2, ..."""
    return keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)


class Halves(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.8 * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self):
        return {}


def constant():
    """A function instead of a schedule."""
    return 0.25


def with_rate(replicas, rate, scaled=False, **compiled):
    """A model with this rate, perhaps inside a loss scale."""
    optimizer = keras.optimizers.SGD(rate)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
    return slope(replicas, optimizer, **compiled)


def steps(model, count=1):
    """The rates of a number of steps."""
    found = []
    for _ in range(count):
        before = model.get_weights()[0].item()
        model.fit(X, Y, 4, verbose=0)
        found.append(before - model.get_weights()[0].item())
    return found


@pytest.mark.parametrize(("replicas", "scaled"), covering([1, 2], [False, True]))
def test_a_plain_rate_is_scaled_and_set(replicas, scaled):
    """On all replicas, in steps that are already compiled."""
    model = with_rate(replicas, 0.5, scaled)
    rate = Rate(model).adjust()
    assert rate.is_plain
    assert steps(model) == [0.5]
    rate.scale(0.5)
    assert rate.next == 0.25
    assert steps(model) == [0.25]
    rate.set(2.0)
    assert steps(model) == [2.0]
    rate.restore()
    assert float(model.optimizer.learning_rate) == 2.0


@pytest.mark.parametrize(
    ("replicas", "scaled", "compiled"),
    [(1, False, {}), (2, True, {"run_eagerly": True})],
)
@pytest.mark.slow
def test_a_schedule_is_scaled_set_and_restored(replicas, scaled, compiled):
    """Compiled steps see the change, until `restore`."""
    schedule = decay()
    model = with_rate(replicas, schedule, scaled, **compiled)
    assert np.allclose(steps(model), [0.8])
    rate = Rate(model).adjust()
    assert np.allclose(rate.next, 0.4)
    rate.scale(3.0)
    assert np.allclose(rate.next, 1.2)
    assert np.allclose(float(rate.in_step()), 1.2)
    assert np.allclose(steps(model, 2), [1.2, 0.6], atol=1e-6)
    rate.set(2.0)
    assert np.allclose(steps(model, 2), [2.0, 2.0])
    rate.restore()
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert inner._learning_rate is schedule
    assert np.allclose(steps(model), [0.8 / 32], atol=1e-6)
    again = Rate(model).adjust()
    assert np.allclose(again.next, 0.8 / 64)


def test_an_adjusted_schedule_is_traced_once():
    """A second `adjust` finds the steps of the first."""
    model = with_rate(1, decay())
    for _ in range(3):
        rate = Rate(model).adjust()
        steps(model)
        rate.restore()
        steps(model)
    assert len(replication_of(model)._functions) == 2


def test_a_rate_may_be_a_function():
    model = with_rate(1, constant)
    rate = Rate(model).adjust()
    rate.scale(2.0)
    assert steps(model) == [0.5]
    rate.restore()
    assert model.optimizer._learning_rate is constant


@pytest.mark.parametrize(("schedule", "replicas"), covering([decay(), Halves()], [1, 2]))
def test_a_saved_model_has_the_users_schedule(schedule, replicas, tmp_path):
    """Even if it is saved while the schedule is adjusted. It loads in plain Keras."""
    model = slope(replicas, keras.optimizers.SGD(schedule, momentum=0.5), "mae")
    rate = Rate(model).adjust()
    rate.scale(2.0)
    steps(model, 2)
    model.save(tmp_path / "model.keras")
    classes = {"Halves": Halves} if isinstance(schedule, Halves) else {}
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=classes)
    assert type(loaded.optimizer._learning_rate) is type(schedule)
    assert np.allclose(float(loaded.optimizer.learning_rate), 0.2)
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_missing_optimizer_is_named():
    model = with_rate(1, 0.5)
    model.compile(None, "mse")
    with pytest.raises(ValueError, match="no single learning rate.*Received: optimizer=None"):
        Rate(model)
