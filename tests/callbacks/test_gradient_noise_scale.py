"""`GradientNoiseScale` against estimates by hand, and on a problem with a known noise scale."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import covering, on_replicas

from keras_multigpu.callbacks import GradientNoiseScale
from keras_multigpu.callbacks.gradient_noise_scale import NoiseProbe, suggested_batch_size
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps.probes import Probe


def half_square(y_true, y_pred):
    """Half the squared distance of each example: its gradient is `w - y`."""
    return tf.reduce_sum(tf.square(y_pred - y_true), axis=-1) / 2


def point(replicas, size=3, rate=0.0, loss=half_square, **compiled):
    """A model that predicts the same point `w`, at first `(1, 1, ...)`, for every input of 0."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(size, bias_initializer="ones")(inputs)
    model = on_replicas(keras.Model(inputs, outputs), replicas)
    model.compile(keras.optimizers.SGD(rate), loss, **compiled)
    return model


def fit(model, targets, callback, batch_size, **arguments):
    """The history of an epoch over these targets, in order."""
    given = {"shuffle": False, "verbose": 0, "callbacks": [callback], **arguments}
    zeros = np.zeros((len(targets), 1), "float32")
    return model.fit(zeros, targets, batch_size, **given).history


def by_hand(gradients, groups):
    """The estimates of variance and squared norm from groups of examples.

    By the definition of the variance between groups, unlike the formulas of the code.
    """
    gradients = np.asarray(gradients, float)
    parts = [part for part in np.split(gradients, np.cumsum(groups)[:-1]) if len(part)]
    mean = gradients.mean(axis=0)
    between = sum(len(part) * np.sum((part.mean(axis=0) - mean) ** 2) for part in parts)
    trace = between / (len(parts) - 1)
    return trace, np.sum(mean**2) - trace / len(gradients)


TARGETS = np.random.default_rng(5).normal([3, 0, -1], [1, 2, 0.5], (26, 3)).astype("float32")


@pytest.fixture(scope="module")
def measured():
    """A function that returns `point(2, size)` for a callback, compiled as for a second `fit`."""
    kept = {}

    def measured(callback, size=3):
        assert callback.smoothing == 0.99
        if size not in kept:
            model = point(2, size)
            kept[size] = model, model.get_weights(), NoiseProbe(0.99)
        model, weights, callback._probe = kept[size]
        model.set_weights(weights)
        return model

    return measured


SHARES = [
    # Replicas, micro-batches, the size of the batch, and the examples of each group in each step.
    (3, 1, 12, [[4, 4, 4], [4, 4, 4], [1, 1, 0]]),
    (1, 2, 11, [[6, 5], [6, 5], [2, 2]]),
    (2, 2, 12, [[3, 3, 3, 3], [3, 3, 3, 3], [1, 0, 1, 0]]),
    # The last batch has one example: nothing to compare.
    (2, 1, 25, [[13, 12], None]),
]


@pytest.mark.parametrize(
    ("shares", "compiled"),
    covering(SHARES, [{}, {"steps_per_execution": 2}]),
)
@pytest.mark.in_test_all("test_probes.py has the other kinds of steps", after=1)
@pytest.mark.slow
def test_estimates_are_those_by_hand(shares, compiled):
    """The estimates of each step and their exponential means, with empty shares, too."""
    replicas, micro_batches, batch_size, groups = shares
    model = point(replicas, micro_batches=micro_batches, **compiled)
    callback = GradientNoiseScale(smoothing=0.5)
    history = fit(model, TARGETS, callback, batch_size)

    weight = trace = square = 0.0
    for step, of_step in enumerate(groups):
        if of_step is not None:
            batch = 1 - TARGETS[step * batch_size : (step + 1) * batch_size]
            one, other = by_hand(batch, of_step)
            weight, trace, square = (
                0.5 * mean + 0.5 * new for mean, new in [(weight, 1), (trace, one), (square, other)]
            )
    state = callback.state["noise"]
    np.testing.assert_allclose(
        state, [len(groups), weight, trace / weight, square / weight], rtol=1e-5
    )
    np.testing.assert_allclose(history["noise_scale"], [trace / square], rtol=1e-5)
    assert callback.noise_scale == history["noise_scale"][0]


def test_two_examples_by_hand(measured):
    """Gradients 1 and 3: variance 2, mean 2, so |g|^2 is 4 - 2/2 = 3, and the scale 2/3."""
    callback = GradientNoiseScale()
    history = fit(measured(callback, 1), np.array([[0.0], [-2.0]], "float32"), callback, 2)
    np.testing.assert_allclose(history["noise_scale"], [2 / 3], rtol=1e-6)
    assert history["suggested_batch_size"] == [2]


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 4), (2, 2)])
@pytest.mark.in_test_all("estimates are computed by hand, too", after=1)
@pytest.mark.slow
def test_the_noise_scale_of_gaussian_targets(replicas, micro_batches):
    """It is tr(C) / |w - mean|^2; every estimate lies within five standard deviations.

    Of T independent steps with k groups of b of B examples, the mean estimate of the trace has
    variance 2 tr(C^2) / (k - 1) / T, and that of the square norm nearly 4 g'Cg / B / T plus
    2 tr(C^2) / B^2 (1 + 1 / (k - 1)) / T.
    """
    random, steps, batch_size = np.random.default_rng(8), 150, 16
    mean, deviations = np.array([3.0, -1.0, 1.5, 1.0]), np.array([1.0, 2.0, 0.5, 3.0])
    targets = random.normal(mean, deviations, (steps * batch_size, 4)).astype("float32")
    callback = GradientNoiseScale(smoothing=1 - 1e-6)
    model = point(replicas, 4, micro_batches=micro_batches, steps_per_execution=10)
    fit(model, targets, callback, batch_size)

    gradient, variances = 1 - mean, deviations**2
    between = replicas * micro_batches - 1
    twice = 2 * np.sum(variances**2)
    of_trace = twice / between / steps
    of_square = (
        4 * np.sum(gradient**2 * variances) / batch_size + twice / batch_size**2 * (1 + 1 / between)
    ) / steps
    _, _, trace, square = callback.state["noise"]
    assert abs(trace - variances.sum()) < 5 * np.sqrt(of_trace)
    assert abs(square - np.sum(gradient**2)) < 5 * np.sqrt(of_square)
    truth = variances.sum() / np.sum(gradient**2)
    relative = np.sqrt(of_trace / variances.sum() ** 2 + of_square / np.sum(gradient**2) ** 2)
    assert abs(callback.noise_scale - truth) < 5 * relative * truth
    assert relative < 0.15, "The test would see a wrong factor."


class Forbid(Probe):
    def on_replica(self, seen):
        return [seen.total_loss]

    def allows(self, measured):
        return measured[0][0] < 0.0


class Let(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.training_run.watch(Forbid())


@pytest.mark.parametrize("case", ["forbidden", "one", "overflow"])
def test_without_an_estimate_nothing_is_logged(measured, case, caplog):
    """Another callback forbids the steps, there is one group, or gradients are not finite."""
    targets = np.full((4, 3), np.inf, "float32") if case == "overflow" else TARGETS[:4]
    callbacks = [GradientNoiseScale(), *([Let()] if case == "forbidden" else [])]
    size = 1 if case == "one" else 4
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        history = fit(measured(callbacks[0]), targets, None, size, callbacks=callbacks, epochs=2)
    assert "noise_scale" not in history
    (record,) = caplog.records
    assert "no step had finite gradients of two replicas or micro-batches" in record.message
    assert callbacks[0].noise_scale is None


def test_a_gradient_that_is_all_noise_is_logged(measured, caplog):
    """Gradients 1 and -1: the estimate of |g|^2 is 0 - 1, below zero."""
    callback = GradientNoiseScale()
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        history = fit(measured(callback, 1), np.array([[0.0], [2.0]], "float32"), callback, 2)
    assert set(history) == {"loss"}
    assert "cannot be told apart from noise yet" in caplog.text
    np.testing.assert_allclose(callback.state["noise"], [1, 0.01, 2, -1], rtol=1e-5)


def test_equal_examples_have_no_noise(measured):
    """The smallest batch is suggested."""
    callback = GradientNoiseScale()
    history = fit(measured(callback), np.full((8, 3), 0.1, "float32"), callback, 8)
    assert 0 <= history["noise_scale"][0] < 1e-5
    assert history["suggested_batch_size"] == [2]


@pytest.mark.parametrize(
    ("noise_scale", "replicas", "expected"),
    [(0.0, 1, 1), (0.2, 4, 4), (100.0, 1, 100), (101.4, 8, 104), (99.6, 8, 96), (1e12, 2, 10**12)],
)
def test_the_suggestion_is_a_multiple_of_the_number_of_replicas(noise_scale, replicas, expected):
    """The nearest one, and at least one example for each."""
    assert suggested_batch_size(noise_scale, replicas) == expected


@pytest.mark.slow
def test_the_curve_has_a_point_every_few_steps():
    """After each fourth of six steps, and at the end of an epoch. A second `fit` starts over."""
    callback, model = GradientNoiseScale(every_steps=4), point(2)
    for _ in range(2):
        fit(model, TARGETS[:24], callback, 4, epochs=2)
        assert [one.step for one in callback.curve] == [4, 6, 10, 12]
        assert {one.batch_size for one in callback.curve} == {4}
    assert len(replication_of(model)._functions) == 1, "Nothing is compiled twice."
    fit(point(1, micro_batches=2), TARGETS[:24], callback, 8)
    assert [one.step for one in callback.curve] == [3], "Another strategy, other variables."


@pytest.mark.slow
def test_training_resumes_with_its_state(measured):
    """One epoch and another with its state are two epochs of one `fit`."""
    whole, first, second = (GradientNoiseScale(every_steps=2) for _ in range(3))
    assert second.state == {"noise": [0, 0.0, 0.0, 0.0], "curve": []}
    fit(measured(whole), TARGETS, whole, 8, epochs=2)
    expected = whole.state
    fit(measured(first), TARGETS, first, 8)
    state = first.state

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.after_begin(lambda: setattr(second, "state", state))

    fit(measured(second), TARGETS, None, 8, callbacks=[Restore(), second])
    np.testing.assert_allclose(second.state["noise"], expected["noise"], rtol=1e-12)
    np.testing.assert_allclose(second.curve, whole.curve, rtol=1e-12)


def test_the_picture_is_drawn(measured, tmp_path):
    path = tmp_path / "new" / "noise.png"
    callback = GradientNoiseScale(every_steps=1, picture=path)
    model = measured(callback)
    for size in (8, 1):
        fit(model, TARGETS, callback, size)
        assert path.read_bytes()[:4] == b"\x89PNG"
        path.unlink()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"smoothing": 1}, "`smoothing` is not a number in its range.*Received: smoothing=1"),
        ({"smoothing": "much"}, "`smoothing` is not.*Received: smoothing='much'"),
        ({"every_steps": 0}, "`every_steps` is not a positive integer.*Received: every_steps=0"),
        ({"picture": "noise.jpg"}, "The picture's file is not a PNG"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        GradientNoiseScale(**arguments)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: point(1), "nothing to compare it with.*Pass `micro_batches=2` to `compile`"),
        (
            lambda: point(2, loss=lambda y, p: tf.reduce_max(half_square(y, p))),
            "loss, which is computed from the whole batch.*Return per-example values",
        ),
    ],
)
def test_models_it_cannot_measure_are_refused(model, text):
    with pytest.raises(ValueError, match=text):
        fit(model(), TARGETS[:4], GradientNoiseScale(), 4)


@pytest.mark.parametrize("name", ["csv", "monitor"])
def test_callbacks_that_read_the_logs_must_come_later(measured, tmp_path, name):
    file = tmp_path / "log.csv"
    reader = (
        keras.callbacks.CSVLogger(file)
        if name == "csv"
        else keras.callbacks.EarlyStopping("noise_scale", mode="max")
    )
    with pytest.raises(ValueError, match="comes before GradientNoiseScale.*to the front"):
        fit(point(2), TARGETS, None, 8, callbacks=[reader, GradientNoiseScale()])
    callback = GradientNoiseScale()
    history = fit(measured(callback), TARGETS, None, 8, callbacks=[callback, reader])
    if name == "csv":
        header, line = file.read_text().split()
        read = dict(zip(header.split(","), line.split(","), strict=True))
        assert float(read["noise_scale"]) == history["noise_scale"][0]
