"""`NaNGuard` names what is not finite and why; expected values are written by hand."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.interrupted_runs import assert_same_values, values_of

import keras_multigpu as kmg
from keras_multigpu.callbacks import NaNGuard
from keras_multigpu.callbacks.nan_guard.findings import Facts


def network(replicas=None, **compiled):
    """Two layers with batch statistics; of plain Keras for None."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        *([] if replicas is None else [keras.layers.BatchNormalization(name="norm")]),
        keras.layers.Dense(1, name="last"),
    ]
    model = keras.Sequential(layers, name="net")
    model = model if replicas is None else on_replicas(model, replicas)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def line(replicas=None, rate=0.25, loss="mse", optimizer=None, **layer):
    """A model `y = w x` with `w = 1`, to be fitted to zero; of plain Keras for None."""
    inputs = keras.Input((1,))
    given = {"use_bias": False, "kernel_initializer": "ones", "name": "line", **layer}
    model = keras.Model(inputs, keras.layers.Dense(1, **given)(inputs))
    model = model if replicas is None else on_replicas(model, replicas)
    model.compile(optimizer or keras.optimizers.SGD(rate), loss)
    return model


def data(bad=None, examples=24):
    """Inputs and targets; the input of one example is not a number."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 3)).astype("float32")
    y = random.normal(size=(examples, 1)).astype("float32")
    if bad is not None:
        x[bad, 1] = np.nan
    return x, y


def fit(model, x, y, *callbacks, batch_size=8, **arguments):
    """Train on two replicas, examples in order; a model of plain Keras in a fake run."""
    if isinstance(model, kmg.DistributedModel):
        given = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks), **arguments}
        return model.fit(x, y, batch_size=batch_size, **given)
    given = {"epochs": 1, "replicas": 2, "batch_size": batch_size, **arguments}
    return fake_fit(model, *callbacks, x=x, y=y, **given)


def test_a_bad_input_is_named_and_training_stops_before_it(caplog):
    """Example 13 is the sixth of step 1: on the second of two replicas."""
    x, y = data(13)
    guard, model = NaNGuard(), network()
    history = fit(model, x, y, guard, epochs=3)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert (finding.array, finding.position) == ("x", 5)
    assert (finding.replicas, finding.devices) == ((1,), ("CPU:1",))
    assert finding.cause == "An input is not finite: check the data."
    assert finding.example == "example 5 of step 1"
    assert model.stop_training
    assert str(finding) in caplog.text
    assert len(history.epoch) == 1
    good = network()
    assert fit(good, x[:8], y[:8], NaNGuard()).history == history.history
    assert_same_values(values_of(good), values_of(model))


@pytest.mark.parametrize("array", ["y", "sample_weight"])
def test_a_bad_target_or_weight_is_named(array):
    given = dict(zip("xy", data(), strict=True), sample_weight=np.ones(24, "float32"))
    given[array][21] = np.inf
    guard = NaNGuard()
    fit(network(), given.pop("x"), given.pop("y"), guard, replicas=4, **given)
    (found,) = guard.findings
    assert (found.step, found.array, found.position, found.replicas) == (2, array, 5, (2,))


class Of(keras.losses.Loss):
    """A function of the predictions."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, y_true, y_pred):
        return self.function(y_pred[:, 0])


def steep(factor):
    """A loss of zero whose gradient is `factor`."""
    return lambda y: factor * (y - keras.ops.stop_gradient(y))


OF_DATA = "An input is not finite: check the data."
FINDINGS = {
    # Prediction and loss are finite, but the gradient of an infinite input is infinity times 0.
    "an input": (
        lambda: line(activation="sigmoid"),
        [1.0, 0.5, np.inf],
        {"what": "gradient", "array": "x", "position": 2, "replicas": (1,), "cause": OF_DATA},
    ),
    # The input does no harm: its prediction is one.
    "a loss of an infinite input": (
        lambda: line(activation="sigmoid", loss=Of(lambda y: keras.ops.log(1 - y))),
        [1.0, np.inf],
        {"what": "loss", "array": None, "replicas": (1,)},
    ),
    # The gradient of (w x)^2 is 2 w x^2 = 2; 2 times 3e38 is more than float32 holds.
    "a new weight": (
        lambda: line(rate=3e38),
        [1.0] * 4,
        {"what": "weight", "variables": ("line/kernel",), "replicas": (0, 1)},
    ),
    # Each replica adds 3e38. As the gradient of a global loss either is too large.
    "a sum of gradients": (
        lambda: line(2, loss=Of(steep(3e38), reduction="sum")),
        [1.0] * 2,
        {"what": "gradient", "replicas": (0, 1)},
    ),
    # Adam squares a gradient of 1e20, and would never move the weight again.
    "the optimizer": (
        lambda: line(loss=Of(lambda y: 1e20 * y), optimizer="adam"),
        [1.0] * 2,
        {"what": "optimizer", "replicas": (0, 1)},
    ),
    "a loss": (
        lambda: line(loss=Of(keras.ops.log)),
        [1.0, 0.0],
        {
            "what": "loss",
            "replicas": (1,),
            "cause": "Predictions and targets are finite, but the loss function of them is not.",
        },
    ),
}


@pytest.mark.parametrize(("build", "x", "expected"), FINDINGS.values(), ids=FINDINGS)
def test_the_first_number_that_is_not_finite_is_found(build, x, expected):
    model, guard = build(), NaNGuard()
    before = model.get_weights()[0]
    fit(model, np.array(x)[:, None], np.zeros((len(x), 1)), guard, batch_size=len(x))
    (finding,) = guard.findings
    assert {name: getattr(finding, name) for name in expected} == expected
    assert "the rate is too high" in finding.cause or finding.what != "weight"
    np.testing.assert_array_equal(model.get_weights()[0], before)


def test_an_input_explains_a_gradient_only_where_both_are():
    """The first replica's gradient is not finite either, and its input is."""
    columns = [("loss", "total"), ("gradient", "a"), ("x", "0"), ("weight", "a")]
    found = [Facts(np.array([[0, 1, row, 0], [0, 1, 2, 0]]), columns) for row in (0, 1)]
    assert [facts.cause for facts in found] == ["gradient", "x"]


def test_large_gradients_that_are_finite_do_not_count():
    """Squares overflow from 2e19 on; the guard must not report its own arithmetic."""
    model, guard = line(rate=1e-25, loss=Of(lambda y: 1e25 * y)), NaNGuard()
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, batch_size=2)
    assert guard.findings == []
    np.testing.assert_allclose(model.get_weights()[0], [[0.0]], atol=1e-6)


def test_weights_that_were_not_finite_before_are_named_instead_of_the_data():
    guard, model = NaNGuard(), network()
    weights = model.get_weights()
    weights[0][1, 2] = np.nan
    model.set_weights(weights)
    fit(model, *data(), guard)
    (finding,) = guard.findings
    assert finding.variables == ("net/first/kernel",)
    assert finding.cause == "net/first/kernel had values that are not finite before this step."


@pytest.mark.slow
def test_gradients_that_loss_scaling_overflows_do_not_count():
    """A gradient of 3e34, times 2**15, is infinite; the optimizer halves it twice and continues."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-35))
    model, guard = line(2, loss=Of(steep(3e34)), optimizer=optimizer), NaNGuard("skip")
    history = fit(model, np.ones((8, 1)), np.zeros((8, 1)), guard, batch_size=2)
    assert guard.findings == []
    assert history.history["skipped_steps"] == [0]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**13
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 2 * 0.3]], rtol=1e-5)


@pytest.mark.slow
def test_training_with_a_skipped_step_is_training_without_its_batch():
    """Even in the middle of three steps in one graph."""
    x, y = data(13)
    guard, model = NaNGuard("skip"), network(2, steps_per_execution=3)
    said = r"step 2: the loss is.*replica 1 \(CPU:1\).*example 5 of"
    with pytest.warns(UserWarning, match=said):
        history = fit(model, x, y, guard, epochs=2).history
    kept = [*range(8), *range(16, 24)]
    good = network(2, steps_per_execution=3)
    good_history = fit(good, x[kept], y[kept], NaNGuard("skip"), epochs=2).history
    assert_same_values(values_of(model), values_of(good))
    assert good_history.pop("skipped_steps") == [0, 0]
    assert history.pop("skipped_steps") == [1, 1]
    assert history == good_history
    assert guard.skipped_steps == 2
    assert [(f.epoch, f.step, f.position) for f in guard.findings] == [(0, 1, 5), (1, 1, 5)]


def test_a_later_check_finds_the_same_epoch_and_step():
    x, y = data(24 + 13, examples=64)
    x[52] = np.nan
    guard, model = NaNGuard(every_steps=100), network()
    fit(model, x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.position) == (0, 4, 5)
    assert int(model.optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("every_steps", [1, 10])
def test_too_many_skipped_steps_in_a_row_end_training(every_steps):
    """A good batch in between starts the count again."""
    x, y = data(13, examples=64)
    x[29] = np.nan
    guard = NaNGuard("skip", patience=2, every_steps=every_steps)
    with pytest.warns(UserWarning):
        fit(network(), x, y, guard)
    assert guard.skipped_steps == 2
    x[17] = np.nan
    text = f"{3 if every_steps == 10 else 2} steps in a row were.*Received: patience=2"
    with pytest.warns(UserWarning), pytest.raises(FloatingPointError, match=text):
        fit(network(), x, y, guard)


def test_an_epoch_of_skipped_steps_has_no_loss():
    """Metrics of zero would look like a perfect model, to `ModelCheckpoint` for example."""
    x, y = data()
    x[::4] = np.nan
    other = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs.update(val_loss=1.0))
    with pytest.warns(UserWarning):
        history = fit(network(), x, y, other, NaNGuard("skip")).history
    assert np.isnan(history["loss"]) and np.isnan(history["mae"])
    assert history["val_loss"] == [1.0]
    assert history["skipped_steps"] == [3]


@pytest.mark.slow
def test_the_example_of_batches_is_named():
    """`Batches` know the position of each example; here each example holds its own number."""
    x = np.arange(24, dtype="float32")[:, None]
    y = np.zeros((24, 1), "float32")
    y[17] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=5, seed=3)
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"example \d of the batch \(example 17 of .*\)"):
        line(2, rate=0.0).fit(batches, epochs=2, verbose=0, callbacks=[guard])
    assert len(guard.findings) == 2
    for finding in guard.findings:
        batch = list(batches.epoch(finding.epoch))[finding.step]
        assert batch[0].numpy()[finding.position] == 17
        assert finding.example.startswith("example 17 of ")
