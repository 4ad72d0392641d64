"""`LearningRateWarmup`: the rate of each step, against rates computed here."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import covering, on_replicas
from helpers.own_step import OwnStep
from slope_models import EVEN, ONES, ZEROS, Do, Rates, eager_slope, slope, trained

from keras_multigpu.callbacks import LearningRateWarmup


@pytest.mark.parametrize("replicas", [1, 2])
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


def constant():
    """A function instead of a schedule."""
    return 0.8


@pytest.mark.parametrize(
    ("replicas", "scaled", "falls"), covering([1, 2], [False, True], [True, False])
)
def test_a_schedule_is_multiplied_and_restored(replicas, scaled, falls):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5) if falls else constant
    optimizer = keras.optimizers.SGD(schedule)
    outer = keras.optimizers.LossScaleOptimizer(optimizer, 2.0) if scaled else optimizer
    warmup = LearningRateWarmup(epochs=0.6)
    model = slope(replicas, outer)
    history = trained(model, warmup).history
    parts = np.array([0.25, 0.5, 0.75] + [1.0] * 7)
    expected = parts * 0.8 * (0.5 if falls else 1.0) ** np.arange(10)
    np.testing.assert_allclose(history["learning_rate"], expected[[4, 9]], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected.sum(), rtol=1e-5)
    assert optimizer._learning_rate is schedule


@pytest.mark.parametrize(("replicas", "nesterov"), covering([1, 2], [False, True]))
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


@pytest.mark.parametrize(("replicas", "momentum", "schedule"), [(1, 0.0, False), (2, 0.9, True)])
@pytest.mark.slow
def test_two_fits_continue_one_warm_up(replicas, momentum, schedule):
    """The second `fit` continues the warm-up; in between the rate is the target."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.8, 5, 0.5) if schedule else 0.8
    weights = []
    for fits in ([2], [1, 1]):
        model = slope(replicas, keras.optimizers.SGD(rate, momentum=momentum))
        warmup = LearningRateWarmup(steps=7)
        for epochs in fits:
            trained(model, warmup, epochs=epochs)
            expected = 0.8 * 0.5 ** (int(model.optimizer.iterations) / 5) if schedule else 0.8
            np.testing.assert_allclose(float(model.optimizer.learning_rate), expected, rtol=1e-5)
        weights.append(model.get_weights()[0].item())
    np.testing.assert_allclose(*weights, rtol=1e-5)


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
