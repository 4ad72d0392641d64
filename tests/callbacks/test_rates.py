"""Warm-up and scaling: the rate of each step, alone and together, against rates computed here."""

import math

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.own_step import OwnStep

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup
from keras_multigpu.training.replication import replication_of

ONES, ZEROS = np.ones((22, 1), "float32"), np.zeros((22, 1), "float32")


class Do(keras.callbacks.Callback):
    """Does something in one of Keras's hooks."""

    def __init__(self, hook, act):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: act(self.model, *args))


class Rates(keras.callbacks.Callback):
    """The rate of each step, by which the weight falls."""

    def on_train_begin(self, logs=None):
        self._weights = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self._weights.append(self.model.get_weights()[0].item())

    @property
    def used(self):
        return -np.diff(self._weights)


def slope(optimizer, replicas=None, loss=None, kind=keras.Model, **compiled):
    """A model whose loss is its weight, so that its gradient is one; of plain Keras for None."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = kind(inputs, layer(inputs)) if kind is keras.Model else kind(layer)
    model = model if replicas is None else on_replicas(model, replicas)
    model.compile(optimizer, loss or (lambda y, y_pred: y_pred - y), **compiled)
    return model


def trained(model, *callbacks, examples=20, **arguments):
    """What a fake `fit` returns after two epochs of five steps."""
    return fake_fit(model, *callbacks, x=ONES[:examples], y=ZEROS[:examples], **arguments)


def trained_for_real(model, *callbacks, examples=20, **arguments):
    arguments = {"epochs": 2, "batch_size": 4, "verbose": 0, **arguments}
    return model.fit(ONES[:examples], ZEROS[:examples], callbacks=list(callbacks), **arguments)


def decay():
    return keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.9)


def constant():
    """A function instead of a schedule."""
    return 0.8


# Of each row the rate that is compiled and what differs from a fake run, batches of four, a plain
# SGD and two epochs. `sizes` are those of later epochs, `fits` the epochs of each `fit`.
ROWS = {
    "warm-up": {"warm": {"steps": 7}},
    "in epochs": {"warm": {"epochs": 0.6}},
    "several steps in a graph": {
        **{"warm": {"steps": 4, "initial_rate": 0.1}, "replicas": 1},
        "compiled": {"steps_per_execution": 3},
    },
    "empty replicas, in pieces": {
        **{"warm": {"steps": 2}, "size": 21, "replicas": 2},
        "compiled": {"micro_batches": 2},
    },
    "warm-up of a schedule": {"rate": decay(), "warm": {"steps": 7}},
    "of a function": {"rate": constant, "warm": {"steps": 3}},
    "inside a loss scale": {"rate": decay(), "warm": {"steps": 3}, "scaled": True, "replicas": 2},
    "with momentum": {"warm": {"steps": 7}, "momentum": 0.9},
    "with Nesterov's": {"warm": {"steps": 7}, "momentum": 0.9, "nesterov": True},
    "in two fits": {"warm": {"steps": 9}, "fits": [1, 1], "momentum": 0.9},
    "a schedule in two fits": {"warm": {"steps": 9}, "fits": [1, 1], "rate": decay()},
    "none": {"scale": (1, "none")},
    "sqrt": {"scale": (1, "sqrt")},
    "linear, in two fits": {"scale": (1, "linear"), "fits": [1, 1]},
    "growing": {"scale": (4, "linear"), "sizes": {1: 8}, "replicas": 2, "momentum": 0.9},
    "a growing schedule": {
        **{"rate": decay(), "scale": (1, "linear"), "sizes": {1: 8}, "scaled": True},
    },
    # The last batch has one example, so one of two replicas has none.
    "uneven": {"scale": (3, "linear"), "sizes": {1: 7}, "size": 3, "replicas": 2},
    # Goyal et al. 2017: from the base rate to the scaled one; then the batch grows again.
    "both": {"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 4}},
    "in the other order": {"scale": (1, "linear"), "warm": {"steps": 4}, "order": -1},
    "growing in the warm-up": {
        **{"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 8}, "momentum": 0.9},
    },
    "and of a schedule": {
        **{"scale": (1, "linear"), "sizes": {1: 8}, "warm": {"steps": 8}, "rate": decay()},
    },
}
POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def by_hand(row):
    """The rates of the steps of each epoch."""
    size, (base, rule) = row.get("size", 4), row.get("scale", (1, "none"))
    warm, first_factor = row.get("warm"), (size / base) ** POWERS[rule]
    step, epochs = 0, []
    for epochs_of_fit in row.get("fits", [2]):
        for epoch in range(epochs_of_fit):
            now = row.get("sizes", {}).get(epoch, size)
            steps = -(-22 // now)
            found = []
            for _ in range(steps):
                rate = row.get("rate", 0.8)
                rate = 0.8 * 0.9**step if hasattr(rate, "decay_rate") else 0.8
                rate *= (now / base) ** POWERS[rule]
                if warm:
                    length = warm.get("steps") or round(warm["epochs"] * steps)
                    first = warm.get("initial_rate", 0.0) / 0.8 or 1 / (length + 1)
                    first = 1 / first_factor if "scale" in row else first
                    rate *= first + (1 - first) * min(step / length, 1)
                found.append(rate)
                step += 1
            epochs.append(found)
    return epochs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "replicas" in row else name
        for name, row in ROWS.items()
    ],
)
def test_each_step_has_its_rate(name):
    """By the weight, which falls by the rate, by the log, and by what the optimizer has later."""
    row = ROWS[name]
    rate, momentum = row.get("rate", 0.8), row.get("momentum", 0.0)
    inner = keras.optimizers.SGD(rate, momentum, row.get("nesterov", False))
    outer = keras.optimizers.LossScaleOptimizer(inner, 2.0) if row.get("scaled") else inner
    model = slope(outer, row.get("replicas"), **row.get("compiled", {}))
    train = trained_for_real if "replicas" in row else trained
    callbacks = []
    if "scale" in row:
        base, rule = row["scale"]
        callbacks.append(BatchSizeScaling(base, rule=rule, schedule=row.get("sizes")))
    if "warm" in row:
        callbacks.append(LearningRateWarmup(**row["warm"]))
    logged = []
    for epochs in row.get("fits", [2]):
        given = {"examples": 22, "batch_size": row.get("size", 4), "epochs": epochs}
        logged += train(model, *callbacks[:: row.get("order", 1)], **given).history["learning_rate"]
        if callable(rate):
            assert inner._learning_rate is rate
        else:
            np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.8, rtol=1e-6)
    expected = by_hand(row)
    np.testing.assert_allclose(logged, [each[-1] for each in expected], rtol=1e-5)
    weight, velocity = 0.0, 0.0
    for each in np.concatenate(expected):
        velocity = momentum * velocity + 1.0
        weight -= each * (momentum * velocity + 1.0 if row.get("nesterov") else velocity)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)


# Scaling.


@pytest.mark.parametrize("source", ["arrays", "steps"])
def test_the_batch_grows_between_epochs(source):
    """Steps, progress bar, rate and logs follow; with a number of steps that is fixed, too."""
    steps = []
    scaling = BatchSizeScaling(4, schedule={1: 8, 2: 16})
    show = Do("on_epoch_end", lambda *_: steps.append(scaling.params["steps"]))
    if source == "steps":
        model = slope(keras.optimizers.SGD(0.5), 1, run_eagerly=True)
        data = kmg.data.from_arrays(ONES, ZEROS, global_batch_size=4, seed=1)
        given = {"steps_per_epoch": 6, "epochs": 3, "verbose": 0}
        history = model.fit(data, callbacks=[scaling, show], **given).history
    else:
        model = slope(keras.optimizers.SGD(0.5))
        history = trained(model, scaling, show, examples=22, epochs=3).history
    lengths = [6, 6, 6] if source == "steps" else [6, 3, 2]
    assert steps == lengths
    assert history["global_batch_size"] == [4, 8, 16]
    assert history["learning_rate"] == [0.5, 1.0, 2.0]
    expected = np.repeat([0.5, 1.0, 2.0], lengths)
    assert model.get_weights()[0].item() == -expected.sum()
    assert scaling.factor == 1.0


@pytest.mark.parametrize("initial_epoch", [0, 3])
def test_training_may_begin_in_the_middle_of_the_schedule(initial_epoch):
    scaling = BatchSizeScaling(4, schedule={0: 2, 2: 8})
    given = {"epochs": initial_epoch + 1, "initial_epoch": initial_epoch}
    history = trained(slope(keras.optimizers.SGD(0.5)), scaling, **given).history
    assert history["global_batch_size"] == [8 if initial_epoch else 2]
    assert history["learning_rate"] == [1.0 if initial_epoch else 0.25]


@pytest.mark.parametrize(("given", "largest"), [(2, 2), (None, 3)])
def test_the_share_of_a_replica_is_limited(given, largest):
    """From the first epoch on; without a limit of its own by that of `BatchSizeFinder`."""
    limits = []
    scaling = BatchSizeScaling(4, schedule={1: 8}, max_replica_batch_size=given)
    find = Do("on_train_begin", lambda model, *_: model.training_run.set_batch_size(4, 3))
    look = Do(
        "on_epoch_begin",
        lambda model, *_: limits.append(model.training_run.state["largest_share"]),
    )
    trained(slope(keras.optimizers.SGD(0.5)), find, scaling, look)
    assert limits == [largest] * 2


@pytest.mark.slow
def test_one_trace_for_each_number_of_micro_batches():
    """A new size alone needs no new graph. The weights are those of one device."""
    traces, pieces, seen = [], [], []

    def loss(y, y_pred):
        traces.append(1)
        return y_pred - y

    def look(model, *_):
        pieces.append(model.training_run.micro_batches)
        seen.append(len(traces))

    scaling = BatchSizeScaling(4, schedule={1: 8, 2: 16, 4: 22}, max_replica_batch_size=4)
    model = slope(keras.optimizers.SGD(0.5), 2, loss)
    trained_for_real(model, scaling, Do("on_epoch_end", look), examples=22, epochs=5)
    sizes = [4, 8, 16, 16, 22]
    assert pieces == [math.ceil(size / 2 / 4) for size in sizes]
    grown = np.diff([0, *seen]) > 0
    known = [number in pieces[:epoch] for epoch, number in enumerate(pieces)]
    assert grown.tolist() == [not one for one in known]
    expected = sum(-(-22 // size) * 0.5 * size / 4 for size in sizes)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected)
    assert replication_of(model).pieces == 1


FLAT = Do("on_epoch_end", lambda model, epoch, logs: logs.update(flat=1.0))


def plateau():
    """Halves the rate after each epoch but the first, which sets the mark."""
    return keras.callbacks.ReduceLROnPlateau("flat", factor=0.5, patience=1, mode="min")


def test_a_reduced_rate_stays_reduced():
    """`ReduceLROnPlateau` halves the scaled rate; later growth multiplies the halved one."""
    model = slope(keras.optimizers.SGD(0.5))
    scaling = BatchSizeScaling(4, schedule={2: 8})
    history = trained(model, FLAT, scaling, plateau(), epochs=3).history
    assert history["learning_rate"] == [0.5, 0.5, 0.5]
    assert float(model.optimizer.learning_rate) == 0.125


# Warm-up.

EVEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
"""Seven steps of warm-up to 0.8, from an eighth of it on."""


@pytest.mark.slow
def test_a_custom_train_step_warms_up():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 100, 1.0)
    model = slope(keras.optimizers.SGD(schedule), 2, kind=OwnStep)
    trained_for_real(model, LearningRateWarmup(steps=7))
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(EVEN), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.8, keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)])
def test_the_step_is_traced_once(rate):
    """Warm-up, its end, and a second `fit` run the same graph."""
    traces = []

    def loss(y, y_pred):
        traces.append(1)
        return y_pred - y

    model = slope(keras.optimizers.SGD(rate), 1, loss)
    warmup = LearningRateWarmup(steps=7)
    trained_for_real(model, warmup, epochs=1)
    once = len(traces)
    trained_for_real(model, warmup, epochs=2)
    assert len(traces) == once


@pytest.mark.parametrize("rate", [0.8, keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end"])
@pytest.mark.parametrize("make", [lambda: LearningRateWarmup(steps=7), lambda: BatchSizeScaling(1)])
def test_the_rate_is_restored_when_training_fails(make, hook, rate):
    """Or the next `fit` would scale it again."""

    def fail(model, *_):
        raise KeyboardInterrupt

    model = slope(keras.optimizers.SGD(rate))
    with pytest.raises(KeyboardInterrupt):
        trained(model, make(), Do(hook, fail))
    if callable(rate):
        assert model.optimizer._learning_rate is rate
    else:
        assert np.isclose(float(model.optimizer.learning_rate), 0.8)


@pytest.mark.parametrize(
    ("steps", "assigned", "used"),
    [
        # A lower rate is used at once, also after the last step of a `fit`.
        (7, 0.25, [*EVEN[:5], *[0.25] * 10]),
        (20, 0.1, [*(0.8 * np.arange(1, 6) / 21), *[0.1] * 10]),
        # A higher one becomes the target.
        (7, 1.6, [*EVEN[:5], 1.2, 1.4, *[1.6] * 8]),
    ],
)
def test_an_assigned_rate_wins(steps, assigned, used):
    def set_rate(model, *_):
        model.optimizer.learning_rate = assigned

    for fits in ([1, 2], [2, 1]):
        warmup, found = LearningRateWarmup(steps=steps), []
        model = slope(keras.optimizers.SGD(0.8))
        for epochs in fits:
            trained(
                model,
                warmup,
                rates := Rates(),
                *([] if found else [Do("on_epoch_end", set_rate)]),
                epochs=epochs,
            )
            found += rates.used.tolist()
        np.testing.assert_allclose(found, used, rtol=1e-5)
        assert np.isclose(float(model.optimizer.learning_rate), assigned)


@pytest.mark.parametrize(("steps", "fifth"), [(7, 0.5), (3, 0.8)])
@pytest.mark.parametrize("first", ["plateau", "warm-up"])
def test_reduce_lr_on_plateau_halves_the_rate(first, steps, fifth):
    """During the warm-up the reduced rate is used at once; afterwards the target is halved."""
    pair = [plateau(), LearningRateWarmup(steps=steps)][:: 1 if first == "plateau" else -1]
    model = slope(keras.optimizers.SGD(0.8))
    history = trained(model, FLAT, *pair, rates := Rates(), epochs=4).history
    np.testing.assert_allclose(rates.used[[4, 10, 15]], [fifth, 0.4, 0.2], rtol=1e-5)
    np.testing.assert_allclose(history["learning_rate"], rates.used[4::5], rtol=1e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_a_learning_rate_scheduler_sets_the_target(order):
    """The same rate in the next epoch changes nothing."""
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.8)
    pair = [scheduler, LearningRateWarmup(steps=7)][::order]
    trained(slope(keras.optimizers.SGD(0.8)), *pair, rates := Rates())
    np.testing.assert_allclose(rates.used, EVEN, rtol=1e-5)


@pytest.mark.slow
def test_a_model_saved_during_the_warmup_loads_in_plain_keras(tmp_path):
    """With the user's schedule, and no variables but the optimizer's."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 5, 0.5)
    model = slope(keras.optimizers.Adam(schedule), 2, "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    trained_for_real(model, LearningRateWarmup(steps=7), checkpoint)
    loaded = keras.saving.load_model(tmp_path / "1.keras")
    assert type(loaded.optimizer._learning_rate) is type(schedule)
    assert int(loaded.optimizer.iterations) == 5
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
