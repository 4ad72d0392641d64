"""`NaNGuard` names what is not finite and why; expected values are written by hand."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from nan_guard_models import assert_same, data, fit, guarded, line, state_of

from keras_multigpu.callbacks import NaNGuard


@pytest.mark.slow
def test_a_bad_input_is_named_and_training_stops_before_it(caplog):
    """Example 13 is the sixth of step 1: on the second of two replicas."""
    x, y = data(13)
    guard = NaNGuard()
    model = guarded(guard)
    history = fit(model, x, y, guard, epochs=3)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert (finding.array, finding.position) == ("x", 5)
    assert (finding.replicas, finding.devices) == ((1,), ("CPU:1",))
    assert finding.cause == "An input is not finite: check the data."
    assert model.stop_training
    assert str(finding) in caplog.text
    assert len(history.epoch) == 1
    found, other = state_of(model), NaNGuard()
    good = guarded(other)
    good_history = fit(good, x[:8], y[:8], other)
    assert_same(found, state_of(good))
    assert history.history == good_history.history


@pytest.mark.slow
def test_a_bad_target_or_weight_is_named():
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


def test_an_infinite_input_behind_a_saturating_activation_is_named():
    """Prediction and loss are finite, but the gradient is infinity times zero."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")(inputs)
    model = on_replicas(keras.Model(inputs, outputs), 2)
    model.compile("sgd", "mse")
    guard = NaNGuard()
    fit(model, np.array([[1.0], [0.5], [np.inf]]), np.zeros((3, 1)), guard, 3)
    (finding,) = guard.findings
    assert (finding.what, finding.array, finding.position) == ("gradient", "x", 2)
    assert finding.replicas == (1,)
    assert finding.cause == "An input is not finite: check the data."


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
def test_weights_that_were_not_finite_before_are_named_instead_of_the_data():
    guard = NaNGuard()
    model = guarded(guard)
    weights = model.get_weights()
    weights[0][1, 2] = np.nan
    model.set_weights(weights)
    fit(model, *data(), guard)
    (finding,) = guard.findings
    assert finding.variables == ("net/first/kernel",)
    assert finding.cause == "net/first/kernel had values that are not finite before this step."


class Overflow(keras.losses.Loss):
    """A gradient of 3e34 for each example, which is finite until the loss is scaled."""

    def call(self, y_true, y_pred):
        return 3e34 * (y_pred[:, 0] - keras.ops.stop_gradient(y_pred[:, 0]))


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
