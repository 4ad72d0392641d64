"""`LearningRateFinder`, on a line whose curve is known; its search leaves no trace."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit

import keras_multigpu as kmg
from keras_multigpu.callbacks import LearningRateWarmup
from keras_multigpu.callbacks.learning_rate_finder import (
    LearningRateFinder,
    RateCurve,
    explodes,
    smooth,
    suggest,
)

X = np.linspace(0.5, 1.5, 30, dtype="float32")[:, None]
SIZE = 7


def decay():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)


def line(replicas=None, rate=0.1, **compiled):
    """A model `y = w x` with `w = 1`, to be fitted to zero; of plain Keras for None."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    model = keras.Model(inputs, outputs)
    model = model if replicas is None else on_replicas(model, replicas)
    model.compile(keras.optimizers.SGD(rate), "mse", **compiled)
    return model


def ordered():
    """The line's points in order; the last batch of an epoch has two of them."""
    return kmg.data.from_arrays(X, np.zeros(30, "float32"), global_batch_size=SIZE, shuffle=False)


def by_hand(rates):
    """`w -= rate * 2 w mean(x^2)` and the loss `w^2 mean(x^2)` of the next batch, in float64."""
    squares = [np.mean(X[start : start + SIZE].astype(float) ** 2) for start in range(0, 30, SIZE)]
    w, losses = 1.0, []
    for number, rate in enumerate(rates):
        w -= rate * 2 * w * squares[number % len(squares)]
        losses.append(w * w * squares[(number + 1) % len(squares)])
    return np.array(losses)


def trained(model, *callbacks, x=X, epochs=0):
    """The history of a fake run; without epochs, a search."""
    given = {"x": x, "y": np.zeros(30, "float32"), "batch_size": SIZE, "epochs": epochs}
    return fake_fit(model, *callbacks, **given).history


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_curve_is_the_one_computed_by_hand(capsys, real):
    """Each loss belongs to the rate that led to it; the last batch leaves replicas without rows."""
    finder = LearningRateFinder(1e-3, high=100.0, steps=50)
    if real:
        model = line(3, decay(), steps_per_execution=3)
        model.fit(ordered(), epochs=0, callbacks=[finder], verbose=0)
    else:
        trained(line(rate=decay()), finder)
    curve = finder.curve
    count = len(curve.rates)
    np.testing.assert_allclose(curve.rates, np.geomspace(1e-3, 100.0, 50)[:count])
    np.testing.assert_allclose(curve.losses, by_hand(curve.rates), rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(curve.smoothed, smooth(curve.losses, 5.0))
    # The mean of x^2 is 1.09, so steps above 2 / (2 * 1.09) = 0.92 make w grow.
    limit = 1 / np.mean(X**2)
    assert limit < finder.exploded_rate == curve.rates[-1] < 10 * limit
    # Without noise the loss is exp(-4 * 1.09 * 4.26 * rate), with 4.26 steps in each factor of
    # e, and falls fastest where the exponent is one: at 0.054. Here neighbouring batches differ
    # by a factor of four.
    assert 0.054 / 4 < finder.suggested_rate < 0.054 * 4
    assert finder.suggested_rate < finder.lowest_rate < limit
    assert f"a rate of {finder.suggested_rate:.2g} is suggested. There" in capsys.readouterr().out


def test_search_and_warm_up_do_not_affect_each_other():
    curves, weights = [], []
    for find, warm in ((True, False), (False, True), (True, True)):
        finder = LearningRateFinder(1e-3, high=100.0, steps=50, verbose=0)
        callbacks = [finder] * find + [LearningRateWarmup(3)] * warm
        trained(model := line(), *callbacks, epochs=1)
        if find:
            curves.append(finder.curve.losses)
        weights.append(model.get_weights()[0].item())
    np.testing.assert_array_equal(*curves)
    assert weights[0] != weights[1] == weights[2]


@pytest.mark.parametrize(("rate", "last"), [(0.1, 0.1), (decay(), 0.1 * 0.9**2)])
def test_a_flat_curve_suggests_nothing(capsys, rate, last):
    """The rates are too small to matter. Training then has those that it would have had."""
    finder, warmup = LearningRateFinder(1e-9, high=1e-8, steps=20), LearningRateWarmup(steps=1)
    history = trained(line(rate=rate), warmup, finder, epochs=1)
    assert (finder.suggested_rate, finder.lowest_rate, finder.exploded_rate) == (None, None, None)
    assert history["learning_rate"] == pytest.approx([last])
    assert capsys.readouterr().out == (
        "LearningRateFinder: no rate is suggested: the loss does not fall with any rate from "
        "1e-09 to 1e-08; it did not explode.\n"
    )


def test_a_loss_that_explodes_at_once_suggests_nothing(capsys):
    """Because `low` is too large."""
    trained(line(), finder := LearningRateFinder(1e10, high=1e20, steps=20))
    assert finder.suggested_rate is None
    assert "from 1e+10 to 1e+10; it explodes at 1e+10." in capsys.readouterr().out


def test_a_loss_that_is_not_finite_ends_the_search():
    trained(line(), finder := LearningRateFinder(1e-3, high=1e30, steps=12, verbose=0))
    assert np.isfinite(finder.curve.losses).all()
    assert finder.exploded_rate is not None


@pytest.mark.parametrize(
    ("losses", "first", "expected"),
    [
        ([1.0] * 9 + [np.nan], 1.0, True),
        ([np.inf], 1.0, True),
        ([3.9] * 90, 1.0, False),
        ([4.1] * 90, 1.0, True),
        ([0.0] * 90 + [2.9] * 90, 1.0, False),
        ([0.0] * 90 + [3.1] * 90, 1.0, True),
        ([-2.0] * 90 + [3.9] * 90, 0.0, False),
        ([-2.0] * 90 + [4.1] * 90, 0.0, True),
    ],
)
def test_a_loss_explodes_at_four_times_the_lowest(losses, first, expected):
    """Its mean over some steps; or at three times the gain, even below zero."""
    assert explodes(losses, first) is expected


def test_the_steepest_descent_is_suggested():
    """The curve falls fastest at the fourth rate, and is lowest at the fifth."""
    rates = np.geomspace(1e-4, 1.0, 7)
    losses = np.array([5.0, 4.9, 4.5, 2.0, 1.5, 3.0, 9.0])
    found = suggest(RateCurve(rates, losses, losses))
    # Central differences: at the fourth rate (4.5 - 1.5) / 2, at the third (4.9 - 2.0) / 2.
    assert found.steepest == rates[3]
    assert found.lowest == rates[4]
    assert suggest(RateCurve(rates, losses[::-1], losses[::-1] * 0 + 1)) is None
    noisy = losses * 0 + np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    assert suggest(RateCurve(rates, noisy, smooth(noisy, 5.0))) is None


def test_a_loss_that_is_not_finite_before_the_search_is_named():
    model = line(1)
    data = kmg.data.from_arrays(X * np.nan, X, global_batch_size=SIZE)
    with pytest.raises(ValueError, match="not finite before any.*Received: loss=nan"):
        model.fit(data, epochs=0, callbacks=[LearningRateFinder()], verbose=0)
    assert model.get_weights()[0].item() == 1.0
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)


def test_a_train_step_without_a_loss_is_named():
    model = line()
    model.train_step = lambda data: {"other": 1.0}
    with pytest.raises(ValueError, match=r"returns no loss.*Received: logs=\['other'\]"):
        trained(model, LearningRateFinder())
