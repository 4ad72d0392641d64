"""`NaNGuard` names what is not finite and keeps it out; expected values are written by hand."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.callbacks import NaNGuard
from keras_multigpu.training.model_state import ModelState

pytestmark = pytest.mark.usefixtures("unoptimized_graphs")


def replicas_of(count):
    """A strategy of so many CPU devices."""
    if count == 1:
        return kmg.strategy("one_device", devices=["CPU:0"])
    return kmg.strategy("mirrored", devices=[f"CPU:{index}" for index in range(count)])


def network(replicas=2, optimizer=None, **compiled):
    """Two layers and batch statistics."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(1, name="last"),
    ]
    model = kmg.distribute(keras.Sequential(layers, name="net"), replicas_of(replicas))
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **compiled
    )
    return model


def line(replicas=2, rate=0.25, loss="mse", **compiled):
    """A model `y = w x` with `w = 1`, to be fitted to zero."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="line")(inputs)
    model = kmg.distribute(keras.Model(inputs, outputs), replicas_of(replicas))
    model.compile(keras.optimizers.SGD(rate), loss, **compiled)
    return model


def data(bad=None, value=np.nan, examples=24):
    """Inputs and targets; the input of one example is not finite."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 3)).astype("float32")
    y = random.normal(size=(examples, 1)).astype("float32")
    if bad is not None:
        x[bad, 1] = value
    return x, y


def fit(model, x, y, guard, batch_size=8, **arguments):
    """Train on the examples in their order."""
    arguments = {"shuffle": False, "verbose": 0, **arguments}
    callbacks = [guard, *arguments.pop("callbacks", [])]
    return model.fit(x, y, batch_size=batch_size, callbacks=callbacks, **arguments)


def assert_same(one, other):
    """Two models have the same weights and optimizers, bit for bit."""
    one, other = ModelState.of(one).values, ModelState.of(other).values
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not name.startswith("seed"):
            np.testing.assert_array_equal(value, other[name], name)


HOW = [{}, {"steps_per_execution": 3}, {"run_eagerly": True}, {"micro_batches": 2}]


@pytest.mark.parametrize(("replicas", "value"), [(1, np.nan), (2, np.inf), (4, np.nan)])
def test_a_bad_input_is_named_and_training_stops_before_it(replicas, value, caplog):
    """Example 13 stands in step 1, place 5: on two replicas on the second, on four the third."""
    x, y = data(13, value)
    model, guard = network(replicas), NaNGuard()
    history = fit(model, x, y, guard, epochs=3)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert (finding.array, finding.position) == ("x", 5)
    assert finding.replicas == ({1: 0, 2: 1, 4: 2}[replicas],)
    assert finding.devices == (f"CPU:{finding.replicas[0]}",)
    assert finding.cause == "An input is not finite: the data are at fault."
    assert model.stop_training
    assert str(finding) in caplog.text
    assert len(history.epoch) == 1
    good = network(replicas)
    good_history = good.fit(x[:8], y[:8], batch_size=8, shuffle=False, verbose=0)
    assert_same(model, good)
    assert history.history == good_history.history


@pytest.mark.parametrize("compiled", HOW)
def test_a_skipped_step_leaves_the_training_of_the_others(compiled):
    """As if the batch had never been there, also in the middle of three steps in one graph."""
    x, y = data(13)
    model, guard = network(**compiled), NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"step 2: the loss is.*replica 1 \(CPU:1\).*example 5 of"):
        history = fit(model, x, y, guard, epochs=2)
    kept = [*range(8), *range(16, 24)]
    good = network(**compiled)
    good_history = good.fit(
        x[kept], y[kept], batch_size=8, epochs=2, shuffle=False, verbose=0
    ).history
    assert_same(model, good)
    assert history.history.pop("skipped_steps") == [1, 1]
    assert history.history == good_history
    assert guard.skipped_steps == 2
    assert [(f.epoch, f.step, f.position) for f in guard.findings] == [(0, 1, 5), (1, 1, 5)]


def test_keras_stops_when_the_weights_are_gone():
    """`TerminateOnNaN` sees the loss of a step that has already changed the weights."""
    x, y = data(13)
    model = network()
    model.fit(x, y, 8, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert np.isnan(model.get_weights()[0]).all()
    guarded = network()
    fit(guarded, x, y, NaNGuard(), callbacks=[keras.callbacks.TerminateOnNaN()])
    assert all(np.isfinite(weight).all() for weight in guarded.get_weights())


@pytest.mark.parametrize("array", ["y", "sample_weight"])
def test_a_bad_target_or_weight_is_named(array):
    """The prediction is finite; the loss is not."""
    x, y = data()
    weight = np.ones(24, "float32")
    {"y": y, "sample_weight": weight}[array][21] = np.inf
    guard = NaNGuard()
    fit(network(4), x, y, guard, sample_weight=weight)
    (finding,) = guard.findings
    assert (finding.step, finding.array, finding.position, finding.replicas) == (2, array, 5, (2,))


def test_inputs_are_named_by_their_keys():
    """Of a dict of inputs, one bad leaf; a ragged last batch and a replica without examples."""
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
    outputs = keras.layers.Dense(1)(keras.layers.Add()(list(inputs.values())))
    model = kmg.distribute(keras.Model(inputs, outputs), replicas_of(4))
    model.compile("sgd", "mse")
    x = {name: np.ones((10, 2), "float32") for name in "ab"}
    x["b"][9] = np.nan
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match="example 1 of the batch"):
        fit(model, x, np.ones((10, 1)), guard)
    (finding,) = guard.findings
    assert (finding.step, finding.position, finding.replicas) == (1, 1, (1,))


class RootLoss(keras.losses.Loss):
    """The square root of the prediction: at zero its gradient is infinite."""

    def call(self, y_true, y_pred):
        return keras.ops.sqrt(y_pred[:, 0])


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_infinite_gradient_of_a_finite_loss(replicas):
    """The last of four examples is zero, so on several replicas the last one has it."""
    model, guard = line(replicas, loss=RootLoss()), NaNGuard()
    fit(model, np.array([[1.0], [1.0], [1.0], [0.0]]), np.zeros((4, 1)), guard, 4)
    (finding,) = guard.findings
    assert (finding.what, finding.layers, finding.variables) == (
        "gradient",
        ("line",),
        ("line/kernel",),
    )
    assert finding.replicas == (replicas - 1,)
    assert finding.position is None
    assert finding.cause.startswith("The loss is finite and its gradient is not")
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_rate_that_overflows_a_weight(replicas):
    """The gradient of (w x)^2 is 2 w x^2 = 2; 2 times 3e38 is more than float32 holds."""
    model, guard = line(replicas, rate=3e38), NaNGuard()
    fit(model, np.ones((4, 1)), np.zeros((4, 1)), guard, 4)
    (finding,) = guard.findings
    assert (finding.what, finding.variables) == ("weight", ("line/kernel",))
    assert finding.replicas == tuple(range(replicas))
    assert "the rate is too high" in finding.cause
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


def test_a_sum_of_gradients_that_overflows():
    """Each replica's summand is 3e38; as the gradient of a global loss either is too large."""

    class Steep(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 3e38 * (y_pred[:, 0] - keras.ops.stop_gradient(y_pred[:, 0]))

    model, guard = line(2, loss=Steep(reduction="sum")), NaNGuard()
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2)
    (finding,) = guard.findings
    assert (finding.what, finding.replicas) == ("gradient", (0, 1))


def test_what_the_optimizer_remembers_may_overflow():
    """Adam squares a gradient of 1e20, and from then on a weight would never move again."""

    class Steep(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 1e20 * y_pred[:, 0]

    model, guard = line(2, loss=Steep()), NaNGuard("skip")
    model.compile("adam", Steep())
    with pytest.warns(UserWarning, match="the optimizer's state is not finite"):
        fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2)
    assert guard.findings[0].what == "optimizer"
    assert guard.skipped_steps == 1


def test_large_gradients_that_are_finite_do_not_count():
    """Squares overflow at 2e19 already; the guard's own arithmetic must not be what it finds."""

    class Steep(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 1e25 * y_pred[:, 0]

    model, guard = line(2, rate=1e-25, loss=Steep()), NaNGuard()
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2)
    assert guard.findings == []
    np.testing.assert_allclose(model.get_weights()[0], [[0.0]], atol=1e-6)


def test_a_loss_that_is_not_finite_for_finite_predictions():
    """The logarithm of zero."""

    class Log(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.log(y_pred[:, 0])

    guard = NaNGuard()
    fit(line(2, loss=Log()), np.array([[1.0], [0.0]]), np.zeros((2, 1)), guard, 2)
    (finding,) = guard.findings
    assert (finding.what, finding.replicas) == ("loss", (1,))
    assert (
        finding.cause == "Predictions and targets are finite: the loss function is not, for them."
    )


def test_weights_that_were_not_finite_before():
    """They are named, and not the data."""
    model, guard = network(), NaNGuard()
    weights = model.get_weights()
    weights[0][1, 2] = np.nan
    model.set_weights(weights)
    fit(model, *data(), guard)
    (finding,) = guard.findings
    assert finding.variables == ("net/first/kernel",)
    assert finding.cause == "net/first/kernel had values that are not finite before this step."


@pytest.mark.parametrize(
    ("action", "check_every"),
    [("stop", 2), ("stop", 100), ("skip", 2), ("rollback", 2), ("rollback", 100)],
)
def test_a_later_check_finds_the_same(action, check_every):
    """Epoch and step are those of the bad batch, whenever Python asks."""
    x, y = data(24 + 13, examples=64)
    guard, model = NaNGuard(action, check_every=check_every), network()
    with pytest.warns(UserWarning) if action == "skip" else contextlib.nullcontext():
        fit(model, x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.position) == (0, 4, 5)
    steps = {"stop": 4, "skip": 7, "rollback": {2: 2, 100: 0}[check_every]}[action]
    assert int(model.optimizer.iterations.numpy()) == steps


@pytest.mark.parametrize(
    ("snapshot_every", "compiled"), [(None, {}), (2, {}), (3, {}), (3, {"steps_per_execution": 2})]
)
def test_the_model_goes_back_and_the_rate_down(snapshot_every, compiled, caplog):
    """Six steps, the last one is bad: back to the state after so many steps."""
    x, y = data(45, examples=48)
    guard = NaNGuard("rollback", check_every=1, snapshot_every=snapshot_every, rate_factor=0.25)
    model = network(**compiled)
    history = fit(model, x, y, guard)
    steps = {None: 0, 2: 4, 3: 4 if compiled else 3}[snapshot_every]
    good = network()
    if steps:
        good.fit(x[: 8 * steps], y[: 8 * steps], 8, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), good.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations.numpy()) == steps
    np.testing.assert_allclose(float(model.optimizer.learning_rate.numpy()), 0.025)
    assert guard.rollbacks == 1
    assert "goes back to an earlier state, with 0.25 of the rate" in caplog.text
    assert history.history.keys() == {"loss", "mae"}
    assert np.isfinite(history.history["loss"]).all()


def test_a_schedule_is_lowered_too():
    """Its rate at a step is halved, and the schedule is the user's again afterwards."""
    x, y = data(13, examples=32)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])
    model = network(optimizer=keras.optimizers.SGD(schedule))
    guard = NaNGuard("rollback", check_every=1, snapshot_every=1)
    used = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            used.append(float(self.model.optimizer.learning_rate))

    fit(model, x, y, guard, callbacks=[Note()])
    np.testing.assert_allclose(used, [0.1, 0.05, 0.05, 0.005], rtol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 3


def test_the_rate_falls_each_time_until_it_is_enough():
    """At a rate of 3e38 the weight overflows; a hundredth of it does not, once."""
    model = line(2, rate=3e38)
    guard = NaNGuard("rollback", check_every=1, rate_factor=1e-19, max_rollbacks=3)
    fit(model, np.ones((6, 1)), np.zeros((6, 1)), guard, 2)
    # 3e38 and 3e19 are too much: (3e19)^2 is the loss of the step after.
    assert guard.rollbacks >= 2
    assert np.isfinite(model.get_weights()[0]).all()


def test_going_back_too_often_ends_training():
    """Every batch is bad."""
    x, y = data()
    x[::4] = np.nan
    with pytest.raises(FloatingPointError, match="went back 2 times.*Received: max_rollbacks=2"):
        fit(network(), x, y, NaNGuard("rollback", check_every=1, max_rollbacks=2))


@pytest.mark.parametrize("check_every", [1, 10])
def test_skipping_too_often_ends_training(check_every):
    """Two bad batches in a row are two; with a good one between them they are not."""
    x, y = data(13, examples=64)
    x[29] = np.nan
    guard = NaNGuard("skip", patience=2, check_every=check_every)
    with pytest.warns(UserWarning):
        fit(network(), x, y, guard)
    assert guard.skipped_steps == 2
    x[17] = np.nan
    with (
        pytest.warns(UserWarning),
        pytest.raises(FloatingPointError, match="3 steps in a row were.*Received: patience=2")
        if check_every == 10
        else pytest.raises(FloatingPointError, match="2 steps in a row were.*Received: patience=2"),
    ):
        fit(network(), x, y, NaNGuard("skip", patience=2, check_every=check_every))


def test_an_epoch_without_a_step_has_no_loss():
    """Metrics at zero would look like a perfect model, to `ModelCheckpoint` for example."""
    x, y = data()
    x[::4] = np.nan
    with pytest.warns(UserWarning):
        history = fit(network(), x, y, NaNGuard("skip"), validation_data=data())
    assert np.isnan(history.history["loss"]) and np.isnan(history.history["mae"])
    assert np.isfinite(history.history["val_loss"])
    assert history.history["skipped_steps"] == [3]


def test_embeddings_are_watched():
    """A sparse gradient that is infinite: the root of an embedding at zero."""
    inputs = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(5, 1, embeddings_initializer="ones", name="table")
    model = kmg.distribute(
        keras.Model(inputs, keras.layers.Flatten()(table(inputs))), replicas_of(2)
    )
    model.compile(keras.optimizers.SGD(0.25), RootLoss())
    model.predict(np.zeros((2, 1)), verbose=0)
    model.set_weights([np.array([[1.0], [1.0], [1.0], [1.0], [0.0]])])
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match="a gradient is not finite on replica 1 .*, in table"):
        fit(model, np.array([[0], [1], [2], [4]]), np.zeros((4, 1)), guard, 2)
    assert guard.findings[0].step == 1
    # d sqrt(e) = 1/2, halved by the mean over two examples, times the rate: 1/16.
    np.testing.assert_allclose(model.get_weights()[0].ravel(), [0.9375, 0.9375, 1, 1, 0])


class Overflow(keras.losses.Loss):
    """A gradient of 3e34 for each example, which is finite until the loss is scaled."""

    def call(self, y_true, y_pred):
        return 3e34 * (y_pred[:, 0] - keras.ops.stop_gradient(y_pred[:, 0]))


def test_gradients_that_loss_scaling_overflows_do_not_count():
    """A scale of 2**15 makes them infinite; the optimizer halves it, twice, and goes on."""
    model = line(2, loss=Overflow())
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-35))
    model.compile(optimizer, Overflow())
    guard = NaNGuard("skip")
    history = fit(model, np.ones((8, 1)), np.zeros((8, 1)), guard, 2)
    assert guard.findings == []
    assert history.history["skipped_steps"] == [0]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**13
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 2 * 0.3]], rtol=1e-5)


def test_loss_scaling_does_not_hide_bad_data_or_gradients_that_are_always_infinite():
    """A loss counts at once; a gradient once the scale is down at one."""
    for x, steps in ((np.nan, 0), (0.0, 3)):
        model = line(2, loss=RootLoss())
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        )
        model.compile(optimizer, RootLoss())
        guard = NaNGuard(check_every=1)
        fit(model, np.full((12, 1), x), np.zeros((12, 1)), guard, 2)
        (finding,) = guard.findings
        assert (finding.what, finding.step) == (("gradient", 3) if steps else ("loss", 0))
        np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


class OwnStep(keras.Model):
    """A model with a training step of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, name="dense")

    def call(self, x):
        """The layer."""
        return self.dense(x)

    def train_step(self, data):
        """Keras's own, which nobody can know."""
        return super().train_step(data)


@pytest.mark.parametrize("distributed", [True, False])
def test_between_steps_where_there_is_no_seeing_inside(distributed, caplog):
    """In a `train_step` of one's own and in stock `fit`, the logs and weights tell."""

    def made():
        keras.utils.set_random_seed(1)
        model = OwnStep() if distributed else keras.Sequential([keras.layers.Dense(1)])
        if distributed:
            model = kmg.distribute(model, replicas_of(2))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = data(13)
    guard = NaNGuard(check_every=1)
    fit(made(), x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert finding.replicas == ((0, 1) if distributed else (0,))
    assert len(finding.variables) == 2
    assert "too late for the weights" in caplog.text

    model = made()
    history = fit(model, x, y, NaNGuard("rollback", check_every=1, snapshot_every=1))
    assert int(model.optimizer.iterations.numpy()) == 2
    np.testing.assert_allclose(float(model.optimizer.learning_rate.numpy()), 0.05)
    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())

    where = "of a `train_step` of your own" if distributed else "in stock Keras"
    with pytest.raises(ValueError, match=f"cannot skip steps {where}.*Received: action='skip'"):
        fit(made(), x, y, NaNGuard("skip"))


def test_one_copy_of_a_weight_that_is_wrong():
    """With a step of one's own each replica's copy is looked at."""
    model = kmg.distribute(OwnStep(), replicas_of(2))
    model.compile(keras.optimizers.SGD(0.0), "mse")

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.dense.bias.value.values[1].assign([np.nan])

    guard = NaNGuard(check_every=1)
    x, y = data()
    model.fit(x, y, 8, verbose=0, callbacks=[Break(), guard])
    (finding,) = guard.findings
    assert (finding.step, finding.replicas, finding.devices) == (1, (1,), ("CPU:1",))
    assert finding.variables[0].endswith("bias")


def test_steps_that_are_tried_out_do_not_count():
    """Before the first epoch others may train on anything, such as at a rate that is too high."""

    class Try(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            run = self.model.training_run
            run.after_begin(lambda: run.train_on((bad, tf.zeros((2, 1)), None)))

    bad = tf.constant([[1.0], [np.nan]])
    guard, model = NaNGuard(), line(2)
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2, callbacks=[Try()])
    assert np.isnan(model.get_weights()[0]).all()
    assert guard.findings[0].cause == "line/kernel had values that are not finite before this step."


def test_the_same_guard_in_two_fits():
    """It begins anew, and the step stays compiled."""
    x, y = data(13)
    model, guard = network(), NaNGuard("skip")
    for _ in range(2):
        with pytest.warns(UserWarning):
            history = fit(model, x, y, guard)
        assert history.history["skipped_steps"] == [1]
        assert len(guard.findings) == 1
    assert len(model.replication._functions) == 1
    with pytest.warns(UserWarning):
        fit(network(4), x, y, guard)
    assert guard.findings[0].replicas == (2,)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_example_of_batches_is_named(shuffle):
    """`Batches` know which example stands where; here each example holds its own number."""
    x = np.arange(24, dtype="float32")[:, None]
    y = np.zeros((24, 1), "float32")
    y[17] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=5, shuffle=shuffle, seed=3)
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"example \d of the batch \(example 17 of .*\)"):
        line(2, rate=0.0).fit(batches, epochs=2, verbose=0, callbacks=[guard])
    assert len(guard.findings) == 2
    for finding in guard.findings:
        batch = list(batches.epoch(finding.epoch))[finding.step]
        assert batch[0].numpy()[finding.position] == 17
        assert finding.example.startswith("example 17 of ")


def test_training_goes_on_with_its_state(tmp_path):
    """Stopped after any step and gone on with, skips and rollbacks end bit for bit the same."""
    x, y = data(13, examples=48)
    x[37] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=8, shuffle=False)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at:
                raise KeyboardInterrupt

    for action in ("skip", "rollback"):

        def guard(action=action):
            return NaNGuard(action, check_every=3, snapshot_every=3)

        whole, wholes_guard = network(), guard()
        with pytest.warns(UserWarning) if action == "skip" else contextlib.nullcontext():
            expected = whole.fit(batches, epochs=2, verbose=0, callbacks=[wholes_guard]).history
        for at in (4,) if action == "skip" else (1,):
            folder = tmp_path / f"{action}{at}"
            stop = Stop()
            stop.at = at
            for extra in ([stop], []):
                model, one = network(), guard()
                saves = kmg.callbacks.ResumableCheckpoint(folder, every_steps=1)
                with (
                    warnings.catch_warnings(),
                    pytest.raises(KeyboardInterrupt) if extra else contextlib.nullcontext(),
                ):
                    warnings.simplefilter("ignore")
                    history = model.fit(
                        batches, epochs=2, verbose=0, callbacks=[one, saves, *extra]
                    )
            assert history.history == expected
            assert (one.skipped_steps, one.rollbacks) == (
                wholes_guard.skipped_steps,
                wholes_guard.rollbacks,
            )
            for before, after in zip(whole.variables, model.variables, strict=True):
                np.testing.assert_array_equal(before.numpy(), after.numpy())


def test_who_writes_the_logs_comes_later(tmp_path):
    """A CSV file without `skipped_steps` would look as if none were skipped."""
    x, y = data()
    before = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(ValueError, match="CSVLogger stands before NaNGuard.*Received: callbacks="):
        network().fit(x, y, 8, verbose=0, callbacks=[before, NaNGuard("skip")])
    before.on_train_end()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"action": "ignore"}, "`action` has an unknown value.*'rollback'.*Received: action"),
        ({"check_every": 0}, "`check_every` is not a positive integer.*Received: check_every=0"),
        ({"patience": 1.5}, "`patience` is not a positive integer"),
        ({"max_rollbacks": 0}, "`max_rollbacks` is not a positive integer"),
        ({"snapshot_every": -1}, "`snapshot_every` is not a positive integer"),
        ({"rate_factor": 1.5}, "`rate_factor` does not lower a rate.*Received: rate_factor=1.5"),
        ({"rate_factor": "half"}, "`rate_factor` does not lower a rate"),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    """When the callback is made."""
    with pytest.raises(ValueError, match=error):
        NaNGuard(**arguments)
