"""`LearningRateWarmup`: each step's rate, against rates that are computed here."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling
from keras_multigpu.callbacks import LearningRateWarmup
from keras_multigpu.training.model_state import ModelState

pytestmark = [
    pytest.mark.usefixtures("unoptimized_graphs"),
    # Keras 3.15.1 reads rates through an `__array__` that NumPy 2 finds outdated.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]

ONES, ZEROS = np.ones((20, 1), "float32"), np.zeros((20, 1), "float32")


class Weights(keras.callbacks.Callback):
    """Keeps the weight after each call of a step."""

    def on_train_begin(self, logs=None):
        self.values = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(self.model.get_weights()[0].item())


class Do(keras.callbacks.Callback):
    """Does something in one of Keras's hooks."""

    def __init__(self, hook, act):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: act(self.model, *args))


def slope(replicas, optimizer, **compiled):
    """A model whose loss is its weight, so that its gradient is one."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, layer(inputs))
    if replicas is not None:
        model = kmg.distribute(model, replicas_of(replicas))
    model.compile(optimizer, lambda y, y_pred: y_pred - y, **compiled)
    return model


def trained(model, *callbacks, epochs=2, **arguments):
    """What `fit` returns after two epochs of five steps."""
    arguments = {"batch_size": 4, "verbose": 0, **arguments}
    return model.fit(ONES, ZEROS, epochs=epochs, callbacks=list(callbacks), **arguments)


EVEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
"""Seven steps of warm-up to 0.8, from an eighth of it on."""


@pytest.mark.parametrize("replicas", [None, 1, 2, 4])
def test_each_step_has_its_rate(replicas):
    """The weight falls by the rate, as the log and the record say."""
    model, warmup, weights = slope(replicas, keras.optimizers.SGD(0.8)), None, Weights()
    warmup = LearningRateWarmup(steps=7)
    history = trained(model, warmup, weights).history
    np.testing.assert_allclose(-np.diff(weights.values), EVEN, rtol=1e-5)
    np.testing.assert_allclose(warmup.learning_rates, EVEN, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], [0.5, 0.8], rtol=1e-6)
    assert np.isclose(float(model.optimizer.learning_rate), 0.8)


CURVES = {
    "linear": lambda p: 0.1 + 0.7 * p,
    "exponential": lambda p: 0.1 * 8**p,
    "cosine": lambda p: 0.1 + 0.7 * (1 - np.cos(np.pi * p)) / 2,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    "compiled", [{"steps_per_execution": 3}, {"run_eagerly": True}, {"jit_compile": True}]
)
def test_the_curves(curve, compiled):
    """From the initial rate to the target in four steps; several steps in a graph, too."""
    warmup = LearningRateWarmup(steps=4, initial_rate=0.1, curve=curve)
    model = slope(2, keras.optimizers.SGD(0.8), **compiled)
    trained(model, warmup)
    expected = [CURVES[curve](min(step / 4, 1)) for step in range(10)]
    np.testing.assert_allclose(warmup.learning_rates, expected, rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(expected), rtol=1e-5)


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_schedule_is_multiplied(replicas, scaled):
    """Each step's part times what the schedule says; afterwards the schedule is the user's."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    outer = keras.optimizers.LossScaleOptimizer(optimizer, 2.0) if scaled else optimizer
    warmup = LearningRateWarmup(epochs=0.6)
    model = slope(replicas, outer)
    history = trained(model, warmup).history
    parts = np.array([0.25, 0.5, 0.75] + [1.0] * 7)
    expected = parts * 0.8 * 0.5 ** np.arange(10)
    np.testing.assert_allclose(warmup.learning_rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history["learning_rate"], expected[[4, 9]], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected.sum(), rtol=1e-5)
    assert optimizer._learning_rate is schedule


@pytest.mark.parametrize("replicas", [None, 1, 2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_velocity_follows_the_rate(replicas, nesterov):
    """As SGD would do that keeps the rate out of the velocity: `w -= rate * v`."""
    optimizer = keras.optimizers.SGD(0.8, momentum=0.9, nesterov=nesterov)
    model = slope(replicas, optimizer)
    trained(model, LearningRateWarmup(steps=7))
    weight, velocity = 0.0, 0.0
    for rate in EVEN:
        velocity = 0.9 * velocity + 1.0
        weight -= rate * (0.9 * velocity + 1.0 if nesterov else velocity)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)


def test_the_velocity_is_left_alone_on_demand():
    """As Keras would do it with the same rates."""
    model = slope(2, keras.optimizers.SGD(0.8, momentum=0.9))
    trained(model, LearningRateWarmup(steps=7, momentum_correction=False))
    weight, velocity = 0.0, 0.0
    for rate in EVEN:
        velocity = 0.9 * velocity - rate
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", [False, True])
def test_two_fits_are_one(replicas, momentum, schedule):
    """The second `fit` goes on in the middle of the warm-up; between them the rate is whole."""
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


def test_training_fails_and_the_rate_is_whole_again():
    """However `fit` ends."""

    def fail(model, *_):
        raise KeyboardInterrupt

    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    for rate in (0.8, schedule):
        model = slope(2, keras.optimizers.SGD(rate))
        with pytest.raises(KeyboardInterrupt):
            trained(model, LearningRateWarmup(steps=7), Do("on_epoch_end", fail))
        if rate is schedule:
            assert model.optimizer._learning_rate is schedule
        else:
            assert np.isclose(float(model.optimizer.learning_rate), 0.8)


@pytest.mark.parametrize("replicas", [None, 2])
def test_who_assigns_a_rate_wins(replicas):
    """A lower rate is used as it is from then on; a higher one is where the warm-up leads."""

    def assign(value):
        return Do(
            "on_epoch_end", lambda model, *_: setattr(model.optimizer, "learning_rate", value)
        )

    warmup = LearningRateWarmup(steps=7)
    model = slope(replicas, keras.optimizers.SGD(0.8))
    trained(model, warmup, assign(0.25))
    np.testing.assert_allclose(warmup.learning_rates, EVEN[:5] + [0.25] * 5, rtol=1e-5)
    assert float(model.optimizer.learning_rate) == 0.25
    trained(model, warmup)
    np.testing.assert_allclose(warmup.learning_rates, [0.25] * 10, rtol=1e-5)

    warmup = LearningRateWarmup(steps=7)
    model = slope(replicas, keras.optimizers.SGD(0.8))
    trained(model, warmup, assign(1.6))
    np.testing.assert_allclose(warmup.learning_rates, EVEN[:5] + [1.2, 1.4] + [1.6] * 3, rtol=1e-5)


@pytest.mark.parametrize("first", ["plateau", "warmup"])
def test_reduce_lr_on_plateau(first):
    """During the warm-up its reduced rate is used as printed, afterwards it halves the target."""
    for length, expected in ((7, [0.5] + [0.25, 0.125]), (3, [0.8, 0.4, 0.2])):
        plateau = keras.callbacks.ReduceLROnPlateau("constant", factor=0.5, patience=1, mode="min")
        warmup = LearningRateWarmup(steps=length)
        constant = Do("on_epoch_end", lambda _, epoch, logs: logs.update(constant=1.0))
        model = slope(2, keras.optimizers.SGD(0.8))
        pair = [plateau, warmup] if first == "plateau" else [warmup, plateau]
        history = trained(model, constant, *pair, epochs=4).history
        used = warmup.learning_rates
        np.testing.assert_allclose(used[4::5][[0]], expected[:1], rtol=1e-5)
        # The first epoch sets the mark; the second and third are no better.
        np.testing.assert_allclose(history["learning_rate"], used[4::5], rtol=1e-5)
        np.testing.assert_allclose(used[[10, 15]], [0.4, 0.2], rtol=1e-5)


def test_a_learning_rate_scheduler_sets_the_target():
    """Its rate of each epoch, warmed up; the same rate again is no news."""
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.8)
    for pair in (lambda w: [scheduler, w], lambda w: [w, scheduler]):
        warmup = LearningRateWarmup(steps=7)
        trained(slope(2, keras.optimizers.SGD(0.8)), *pair(warmup))
        np.testing.assert_allclose(warmup.learning_rates, EVEN, rtol=1e-5)


def data():
    """Twenty-two examples in batches of four: the last one is ragged."""
    random = np.random.default_rng(0)
    x = random.normal(size=(22, 3)).astype("float32")
    return kmg.data.from_arrays(x, x.sum(axis=1) > 0, global_batch_size=4, seed=7)


def network(replicas, rate):
    """A model with dropout and momentum."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(1, activation="sigmoid")]
    model = kmg.distribute(keras.Sequential(layers), replicas_of(replicas))
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "binary_crossentropy")
    return model


class Stop(Exception):
    """Ends a run in the middle."""


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("stop", [(0, 4), (1, 3), (2, 2)])
def test_a_resumed_run_ends_bit_for_bit_the_same(schedule, stop):
    """Stopped in the warm-up, behind the growth of the batch, and after all."""
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)

    def model_and_callbacks():
        scaling = BatchSizeScaling(4, schedule={1: 7})
        return network(2, decay if schedule else 0.1), [scaling, LearningRateWarmup(steps=8)]

    whole, callbacks = model_and_callbacks()
    history = whole.fit(data(), epochs=3, verbose=0, callbacks=callbacks).history

    taken = {}
    interrupted, first = model_and_callbacks()

    def take(model, *_):
        run = model.training_run
        if (run.epoch, run.step) == stop:
            taken.update(run=run.state, model=ModelState.of(model), own=[c.state for c in first])
            raise Stop

    with pytest.raises(Stop):
        interrupted.fit(
            data(), epochs=3, verbose=0, callbacks=[*first, Do("on_train_batch_end", take)]
        )

    model, second = model_and_callbacks()

    def go_on(model, *_):
        def restore():
            model.training_run.restore(taken["run"])
            taken["model"].restore(model)
            for callback, state in zip(second, taken["own"], strict=True):
                callback.state = state

        model.training_run.after_begin(restore)

    rest = model.fit(
        data(), epochs=3, verbose=0, callbacks=[*second, Do("on_train_begin", go_on)]
    ).history
    for one, other in zip(whole.variables, model.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    for name, values in history.items():
        assert rest[name] == values[stop[0] :], name


def test_empty_replicas_and_micro_batches():
    """A last batch of one example on four replicas, in pieces."""
    model = slope(4, keras.optimizers.SGD(0.8), micro_batches=2)
    warmup = LearningRateWarmup(steps=2)
    model.fit(ONES[:17], ZEROS[:17], 16, epochs=2, verbose=0, callbacks=[warmup])
    np.testing.assert_allclose(warmup.learning_rates, [0.8 / 3, 1.6 / 3, 0.8, 0.8], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0].item(), -3.2 + 0.8, rtol=1e-5)


def test_a_train_step_of_ones_own():
    """The rate is set before it."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return super().train_step(data)

    model = kmg.distribute(Own(), replicas_of(2))
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

    model = slope(2, keras.optimizers.SGD(0.8))
    model.compile(keras.optimizers.SGD(0.8), loss)
    warmup = LearningRateWarmup(steps=7)
    trained(model, warmup, epochs=1)
    once = len(traces)
    trained(model, warmup, epochs=2)
    assert len(traces) == once


def test_a_file_of_a_step_in_the_warmup_loads_with_keras_alone(tmp_path):
    """It names the user's schedule, and has the optimizer's variables and no others."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.8, 5, 0.5)
    model = slope(2, keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.Adam(schedule), "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    trained(model, LearningRateWarmup(steps=7), checkpoint)
    loaded = keras.saving.load_model(tmp_path / "1.keras")
    assert type(loaded.optimizer._learning_rate) is type(schedule)
    assert int(loaded.optimizer.iterations) == 5
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": 0}, "The length .* not clear.*Received: epochs=0, steps=None"),
        ({"epochs": float("nan")}, "not clear.*Received: epochs=nan"),
        ({"epochs": 1, "steps": 5}, "not both.*Received: epochs=1, steps=5"),
        ({"steps": -3}, "`steps` is not a positive integer.*Received: steps=-3"),
        ({"steps": 1.5}, "`steps` is not a positive integer.*Received: steps=1.5"),
        ({"initial_rate": -0.1}, "no rate to begin with.*Received: initial_rate=-0.1"),
        ({"initial_rate": float("nan")}, "no rate to begin with.*initial_rate=nan"),
        ({"initial_rate": 0.0, "curve": "exponential"}, "no rate to begin.*curve='exponential'"),
        ({"curve": "square"}, "`curve` has an unknown value.*Received: curve='square'"),
        ({"momentum_correction": "yes"}, "`momentum_correction` has an unknown value"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    """As soon as the callback is made."""
    with pytest.raises(ValueError, match=words):
        LearningRateWarmup(**arguments)


def test_what_does_not_fit_the_model_is_named():
    """A rate that would fall, an optimizer without velocity, data of unknown length."""
    model = slope(2, keras.optimizers.SGD(0.8))
    with pytest.raises(ValueError, match="begin above the rate.*Received: initial_rate=0.9"):
        trained(model, LearningRateWarmup(initial_rate=0.9))
    with pytest.raises(ValueError, match="free of the rate.*Received: optimizer='SGD'"):
        trained(model, LearningRateWarmup(momentum_correction=True))

    def generator():
        yield ONES[:4], ZEROS[:4]

    with pytest.raises(ValueError, match="how long an epoch is.*Received: epochs=None"):
        model.fit(generator(), verbose=0, callbacks=[LearningRateWarmup()])


def test_scaling_comes_first():
    """In the other order the warm-up would lead to the unscaled rate."""
    model = slope(2, keras.optimizers.SGD(0.8))
    pair = [LearningRateWarmup(steps=3), BatchSizeScaling(2)]
    with pytest.raises(ValueError, match="comes before BatchSizeScaling.*Exchange the two"):
        trained(model, *pair)
    with pytest.raises(ValueError, match="is there twice"):
        trained(model, LearningRateWarmup(steps=3), LearningRateWarmup(steps=3))


def test_a_stock_mirrored_model_warms_up():
    """The rate has a copy on each replica; all of them are set."""
    strategy = replicas_of(2)
    with strategy.scope():
        model = slope(None, keras.optimizers.SGD(0.8))
    warmup = LearningRateWarmup(steps=7)
    dataset = tf.data.Dataset.from_tensor_slices((ONES, ZEROS)).batch(4)
    model.fit(dataset, epochs=2, verbose=0, shuffle=False, callbacks=[warmup])
    np.testing.assert_allclose(model.get_weights()[0].item(), -sum(EVEN), rtol=1e-5)
