"""`LearningRateWarmup`: the rate of each step, against rates computed here."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import covering, on_replicas
from helpers.own_step import OwnStep
from slope_models import EVEN, Do, Rates, eager_slope, slope, trained

from keras_multigpu.callbacks import LearningRateWarmup


def test_a_custom_train_step_warms_up():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = on_replicas(OwnStep(layer), 2)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 100, 1.0)
    model.compile(keras.optimizers.SGD(schedule), lambda y, y_pred: y_pred - y)
    trained(model, LearningRateWarmup(steps=7))
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(EVEN), rtol=1e-5)


@pytest.mark.parametrize("rate", [0.8, keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)])
def test_the_step_is_traced_once(rate):
    """Warm-up, its end, and a second `fit` run the same graph."""
    traces = []

    def loss(y, y_pred):
        traces.append(1)
        return y_pred - y

    model = slope(1, keras.optimizers.SGD(rate), loss)
    warmup = LearningRateWarmup(steps=7)
    trained(model, warmup, epochs=1)
    once = len(traces)
    trained(model, warmup, epochs=2)
    assert len(traces) == once


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end"])
def test_the_rate_is_restored_when_training_fails(hook):
    def fail(model, *_):
        raise KeyboardInterrupt

    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    for rate in (0.8, schedule):
        model = eager_slope(1, keras.optimizers.SGD(rate))
        with pytest.raises(KeyboardInterrupt):
            trained(model, LearningRateWarmup(steps=7), Do(hook, fail))
        if rate is schedule:
            assert model.optimizer._learning_rate is schedule
        else:
            assert np.isclose(float(model.optimizer.learning_rate), 0.8)


def test_an_assigned_rate_wins():
    """A lower rate is used at once; a higher one becomes the target."""

    def assign(value):
        return Do(
            "on_epoch_end", lambda model, *_: setattr(model.optimizer, "learning_rate", value)
        )

    warmup = LearningRateWarmup(steps=7)
    model = eager_slope(1, keras.optimizers.SGD(0.8))
    trained(model, warmup, assign(0.25), rates := Rates())
    np.testing.assert_allclose(rates.used, EVEN[:5] + [0.25] * 5, rtol=1e-5)
    assert float(model.optimizer.learning_rate) == 0.25
    trained(model, warmup, rates)
    np.testing.assert_allclose(rates.used, [0.25] * 10, rtol=1e-5)

    # Also after the last step of a `fit`.
    warmup = LearningRateWarmup(steps=20)
    model = eager_slope(1, keras.optimizers.SGD(0.8))
    trained(model, warmup, assign(0.1), epochs=1)
    trained(model, warmup, rates, epochs=1)
    np.testing.assert_allclose(rates.used, [0.1] * 5, rtol=1e-5)

    warmup = LearningRateWarmup(steps=7)
    model = eager_slope(1, keras.optimizers.SGD(0.8))
    trained(model, warmup, assign(1.6), rates)
    np.testing.assert_allclose(rates.used, EVEN[:5] + [1.2, 1.4] + [1.6] * 3, rtol=1e-5)


@pytest.mark.parametrize(("first", "length"), covering(["plateau", "warmup"], [(7, 0.5), (3, 0.8)]))
def test_reduce_lr_on_plateau_halves_the_rate(first, length):
    """During the warm-up the reduced rate is used at once; afterwards the target is halved."""
    steps, expected = length
    plateau = keras.callbacks.ReduceLROnPlateau("constant", factor=0.5, patience=1, mode="min")
    warmup = LearningRateWarmup(steps=steps)
    constant = Do("on_epoch_end", lambda _, epoch, logs: logs.update(constant=1.0))
    model = eager_slope(1, keras.optimizers.SGD(0.8))
    pair = [plateau, warmup] if first == "plateau" else [warmup, plateau]
    history = trained(model, constant, *pair, rates := Rates(), epochs=4).history
    used = rates.used
    np.testing.assert_allclose(used[4], expected, rtol=1e-5)
    # The first epoch sets the mark; the second and third are no better.
    np.testing.assert_allclose(history["learning_rate"], used[4::5], rtol=1e-5)
    np.testing.assert_allclose(used[[10, 15]], [0.4, 0.2], rtol=1e-5)


def test_a_learning_rate_scheduler_sets_the_target():
    """The same rate in the next epoch changes nothing."""
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.8)
    for pair in (lambda w: [scheduler, w], lambda w: [w, scheduler]):
        warmup = LearningRateWarmup(steps=7)
        trained(eager_slope(1, keras.optimizers.SGD(0.8)), *pair(warmup), rates := Rates())
        np.testing.assert_allclose(rates.used, EVEN, rtol=1e-5)


def test_a_model_saved_during_the_warmup_loads_in_plain_keras(tmp_path):
    """With the user's schedule, and no variables but the optimizer's."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 5, 0.5)
    model = slope(2, keras.optimizers.Adam(schedule), "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    trained(model, LearningRateWarmup(steps=7), checkpoint)
    loaded = keras.saving.load_model(tmp_path / "1.keras")
    assert type(loaded.optimizer._learning_rate) is type(schedule)
    assert int(loaded.optimizer.iterations) == 5
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
