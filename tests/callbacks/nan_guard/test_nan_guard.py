"""`NaNGuard` names what is not finite and why; expected values are written by hand."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from nan_guard_models import assert_same, data, fit, line, state_of

from keras_multigpu.callbacks import NaNGuard


@pytest.mark.parametrize(("replicas", "value"), [(2, np.nan), (4, np.inf), (1, np.nan)])
@pytest.mark.in_test_all("one value on two replicas shows it", after=1)
@pytest.mark.slow
def test_a_bad_input_is_named_and_training_stops_before_it(guarded, replicas, value, caplog):
    """Example 13 is the sixth of step 1: on the second of two replicas, or the third of four."""
    x, y = data(13, value)
    guard = NaNGuard()
    model = guarded(guard, replicas)
    history = fit(model, x, y, guard, epochs=3)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert (finding.array, finding.position) == ("x", 5)
    assert finding.replicas == ({1: 0, 2: 1, 4: 2}[replicas],)
    assert finding.devices == (f"CPU:{finding.replicas[0]}",)
    assert finding.cause == "An input is not finite: check the data."
    assert model.stop_training
    assert str(finding) in caplog.text
    assert len(history.epoch) == 1
    found, other = state_of(model), NaNGuard()
    good = guarded(other, replicas)
    good_history = fit(good, x[:8], y[:8], other)
    assert_same(found, state_of(good))
    assert history.history == good_history.history


@pytest.mark.slow
def test_a_bad_target_or_weight_is_named(guarded):
    guard = NaNGuard()
    # A model of its own: the probe of the others knows no weights.
    model = guarded(guard, 4)
    for array in ("y", "sample_weight"):
        x, y = data()
        weight = np.ones(24, "float32")
        {"y": y, "sample_weight": weight}[array][21] = np.inf
        fit(model, x, y, guard, sample_weight=weight)
        (found,) = guard.findings
        assert (found.step, found.array, found.position, found.replicas) == (2, array, 5, (2,))


@pytest.mark.parametrize(("replicas", "activation"), [(1, "tanh"), (2, "sigmoid")])
@pytest.mark.in_test_all("one activation shows it", after=1)
@pytest.mark.slow
def test_an_infinite_input_behind_a_saturating_activation_is_named(replicas, activation):
    """Prediction and loss are finite, but the gradient is infinity times zero."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, activation=activation, kernel_initializer="ones")(inputs)
    model = on_replicas(keras.Model(inputs, outputs), replicas)
    model.compile("sgd", "mse")
    guard = NaNGuard()
    fit(model, np.array([[1.0], [0.5], [np.inf]]), np.zeros((3, 1)), guard, 3)
    (finding,) = guard.findings
    assert (finding.what, finding.array, finding.position) == ("gradient", "x", 2)
    assert finding.replicas == (replicas - 1,)
    assert finding.cause == "An input is not finite: check the data."


@pytest.mark.in_test_all("targets have names, too")
def test_inputs_are_named_by_their_keys():
    """One bad leaf of a dict, in a small last batch that leaves a replica without examples."""
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
    outputs = keras.layers.Dense(1)(keras.layers.Add()(list(inputs.values())))
    model = on_replicas(keras.Model(inputs, outputs), 4)
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


@pytest.mark.in_test_all("test_probes.py sees each gradient")
def test_an_infinite_gradient_of_a_finite_loss():
    """The last of four examples is zero, so the last replica has it."""
    model, guard = line(2, loss=RootLoss()), NaNGuard()
    fit(model, np.array([[1.0], [1.0], [1.0], [0.0]]), np.zeros((4, 1)), guard, 4)
    (finding,) = guard.findings
    assert (finding.what, finding.layers, finding.variables) == (
        "gradient",
        ("line",),
        ("line/kernel",),
    )
    assert finding.replicas == (1,)
    assert finding.position is None
    assert finding.cause.startswith("The loss is finite, but its gradient is not")
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


def test_a_rate_that_overflows_a_weight():
    """The gradient of (w x)^2 is 2 w x^2 = 2; 2 times 3e38 is more than float32 holds."""
    model, guard = line(2, rate=3e38), NaNGuard()
    fit(model, np.ones((4, 1)), np.zeros((4, 1)), guard, 4)
    (finding,) = guard.findings
    assert (finding.what, finding.variables) == ("weight", ("line/kernel",))
    assert finding.replicas == (0, 1)
    assert "the rate is too high" in finding.cause
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


def test_a_sum_of_gradients_that_overflows():
    """Each replica adds 3e38. As the gradient of a global loss either is too large."""

    class Steep(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 3e38 * (y_pred[:, 0] - keras.ops.stop_gradient(y_pred[:, 0]))

    model, guard = line(2, loss=Steep(reduction="sum")), NaNGuard()
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2)
    (finding,) = guard.findings
    assert (finding.what, finding.replicas) == ("gradient", (0, 1))


def test_an_overflow_in_the_state_of_an_optimizer_is_found():
    """Adam squares a gradient of 1e20, and would never move the weight again."""

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
    """Squares overflow from 2e19 on; the guard must not report its own arithmetic."""

    class Steep(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 1e25 * y_pred[:, 0]

    model, guard = line(2, rate=1e-25, loss=Steep()), NaNGuard()
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2)
    assert guard.findings == []
    np.testing.assert_allclose(model.get_weights()[0], [[0.0]], atol=1e-6)


def test_a_loss_that_is_not_finite_for_finite_predictions():
    class Log(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.log(y_pred[:, 0])

    guard = NaNGuard()
    fit(line(2, loss=Log()), np.array([[1.0], [0.0]]), np.zeros((2, 1)), guard, 2)
    (finding,) = guard.findings
    assert (finding.what, finding.replicas) == ("loss", (1,))
    assert (
        finding.cause == "Predictions and targets are finite, but the loss function of them is not."
    )


@pytest.mark.slow
def test_weights_that_were_not_finite_before_are_named_instead_of_the_data(guarded):
    guard = NaNGuard()
    model = guarded(guard)
    weights = model.get_weights()
    weights[0][1, 2] = np.nan
    model.set_weights(weights)
    fit(model, *data(), guard)
    (finding,) = guard.findings
    assert finding.variables == ("net/first/kernel",)
    assert finding.cause == "net/first/kernel had values that are not finite before this step."


@pytest.mark.in_test_all("other tests have sparse gradients")
def test_embeddings_are_watched():
    """A sparse gradient that is infinite: the root of an embedding at zero."""
    inputs = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(5, 1, embeddings_initializer="ones", name="table")
    model = on_replicas(keras.Model(inputs, keras.layers.Flatten()(table(inputs))), 2)
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


@pytest.mark.in_test_all("cases.py scales losses")
def test_gradients_that_loss_scaling_overflows_do_not_count():
    """A scale of 2**15 makes them infinite; the optimizer halves it twice and continues."""
    model = line(2, loss=Overflow())
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-35))
    model.compile(optimizer, Overflow())
    guard = NaNGuard("skip")
    history = fit(model, np.ones((8, 1)), np.zeros((8, 1)), guard, 2)
    assert guard.findings == []
    assert history.history["skipped_steps"] == [0]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**13
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 2 * 0.3]], rtol=1e-5)


@pytest.mark.in_test_all("gradients are checked after unscaling")
def test_loss_scaling_does_not_hide_bad_data_or_gradients_that_are_always_infinite():
    """A loss always counts; a gradient once the scale is down to one."""
    model, guard = line(2, loss=RootLoss()), NaNGuard(every_steps=1)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    model.compile(optimizer, RootLoss())
    for x, steps in ((np.nan, 0), (0.0, 3)):
        fit(model, np.full((12, 1), x), np.zeros((12, 1)), guard, 2)
        (finding,) = guard.findings
        assert (finding.what, finding.step) == (("gradient", 3) if steps else ("loss", 0))
        np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"action": "ignore"}, "`action` has an unknown value.*'rollback'.*Received: action"),
        ({"every_steps": 0}, "`every_steps` is not a positive integer.*Received: every_steps=0"),
        ({"patience": 1.5}, "`patience` is not a positive integer"),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    with pytest.raises(ValueError, match=error):
        NaNGuard(**arguments)
