"""`LearningRateFinder`: a range test that suggests a learning rate."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.callbacks.rates import Rate
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.trials import repeat_batches
from keras_multigpu.checks import (
    require_number,
    require_positive_integer,
    value_error,
)
from keras_multigpu.seeded_layers import preserve_random_state
from keras_multigpu.training.run import TrainingRun, pythonic

# Fewer steps do not make a curve.
FEWEST = 10

# A loss that falls by a smaller fraction says nothing about rates.
FLAT = 0.01


# Over how many steps on each side the loss is averaged: the standard deviation of a Gaussian.
SMOOTHING = 5.0
# The loss has exploded once its mean is this many times the lowest so far, or, near or below zero,
# has risen by `STOP_AT - 1` times its fall since the first step.
STOP_AT = 4.0


class RateCurve(NamedTuple):
    """The loss of the next batch after each rate, as measured and smoothed."""

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray


class Suggestion(NamedTuple):
    """The rates where the smoothed loss falls fastest, and where it is lowest."""

    steepest: float
    lowest: float


class LearningRateFinder(RunCallback):
    """Suggests a learning rate by a range test, before the first epoch.

    It trains one batch with each rate from `low` to `high`, until the loss explodes, and suggests
    the rate where the smoothed loss falls fastest. Afterwards everything is restored bit for bit:
    model, optimizer, metrics, random numbers, and the position in the data.

    `fit(..., epochs=0)` only searches.

    Args:
        low: The first rate, small enough to have no effect.
        high: The last rate, large enough to make the loss explode.
        steps: How many rates to try. The data are repeated if they have fewer batches.
        verbose: 1 prints the result, 0 nothing.

    Attributes:
        suggested_rate: The rate where the loss falls fastest. None without a suggestion.
        lowest_rate: The rate where the smoothed loss is lowest.
        exploded_rate: The rate where the search ended early; None if it did not.
        curve: `rates`, `losses` and `smoothed`, as arrays.
    """

    saved = ("suggested_rate", "lowest_rate", "exploded_rate", "_searched")

    def __init__(
        self,
        low: float = 1e-6,
        *,
        high: float = 10.0,
        steps: int = 100,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose=verbose)
        fix = "Pass for example low=1e-6 and high=10.0."
        require_number("low", low, lambda n: 0 < n < np.inf, "above zero", fix)
        require_number("high", high, lambda n: low < n < np.inf, "above `low`", fix)
        require_positive_integer("steps", steps)
        fix = "Pass 100, or 30 for a rough estimate."
        require_number("steps", steps, lambda n: n >= FEWEST, f"of at least {FEWEST}", fix)
        self.suggested_rate: float | None = None
        self.lowest_rate: float | None = None
        self.exploded_rate: float | None = None
        self.curve: RateCurve | None = None
        self._rates = np.geomspace(low, high, steps)
        self._rate: Rate
        self._searched = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        self._rate, self._searched = Rate(self.model), False
        run.after_begin(lambda: self._begin(run))

    def _begin(self, run: TrainingRun) -> None:
        if self._searched:
            # Restored: a resumed run does not search again.
            return
        self._searched = True
        first, rates, losses = self._search(run)
        finite = np.isfinite(losses)
        kept = np.array(losses)[finite]
        self.curve = RateCurve(np.array(rates)[finite], kept, smooth(kept, SMOOTHING))
        self.exploded_rate = rates[-1] if explodes(losses, first) else None
        found = suggest(self.curve)
        self.suggested_rate, self.lowest_rate = found or (None, None)
        self._report(found)

    def _search(self, run: TrainingRun) -> tuple[float, list[float], list[float]]:
        """Train with growing rates and return the first loss, the rates and their losses."""
        with preserve_random_state():
            batches = repeat_batches(run)
            batch = next(batches)
        rates: list[float] = []
        losses: list[float] = []
        with run.trial(batch), self._rate.trying(), preserve_random_state():
            first = self._loss(run, batch, float(self._rates[0]))
            if not np.isfinite(first):
                raise value_error(
                    "The loss is not finite before any learning rate is tried.",
                    "Expected a finite loss of the first batch.",
                    "Check the data for NaN, and the loss and activations of the model.",
                    loss=first,
                )
            for rate, following in itertools.zip_longest(
                self._rates, self._rates[1:], fillvalue=self._rates[-1]
            ):
                # A step's loss is computed before its update, so the previous rate led to it.
                losses.append(self._loss(run, next(batches), float(following)))
                rates.append(float(rate))
                if explodes(losses, first):
                    break
        return first, rates, losses

    def _loss(self, run: TrainingRun, batch: Any, rate: float) -> float:
        """Train one step with a rate and return the batch's loss before the update."""
        self._rate.set(rate)
        # Otherwise the logs have the mean loss of all batches so far.
        self.model.reset_metrics()
        logs = pythonic(run.train_on(batch))
        if "loss" not in logs:
            raise value_error(
                "The model's `train_step` returns no loss.",
                'Expected the loss in its logs, as "loss".',
                'Add it to the dict that `train_step` returns: `{"loss": loss, ...}`.',
                logs=sorted(logs),
            )
        return float(logs["loss"])

    def _report(self, found: Suggestion | None) -> None:
        end = "it did not explode"
        if self.exploded_rate is not None:
            end = f"it explodes at {self.exploded_rate:.2g}"
        if found is None:
            self.say(
                "no rate is suggested: the loss does not fall with any rate from "
                f"{self._rates[0]:.2g} to {self.exploded_rate or self._rates[-1]:.2g}; {end}."
            )
            return
        self.say(
            f"a rate of {found.steepest:.2g} is suggested. There the loss falls fastest; it "
            f"is lowest at {found.lowest:.2g} (a tenth of that is another common choice), and "
            f"{end}."
        )


def moving_mean(losses: list[float], kept: float) -> np.ndarray:
    """The exponential moving mean, without bias toward zero at the start."""
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total, weight = kept * total + loss, kept * weight + 1.0
        means.append(total / weight)
    return np.array(means)


def smooth(losses: np.ndarray, smoothing: float) -> np.ndarray:
    """The losses smoothed by a Gaussian."""
    # A moving mean would lag behind the loss, and carry the noise of single batches into the slope.
    steps = np.arange(len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / smoothing) ** 2)
    return np.asarray(weights @ losses / weights.sum(axis=1))


def explodes(losses: list[float], first: float) -> bool:
    """Whether the mean over about `SMOOTHING` losses shows that the rate is too large."""
    if not np.isfinite(losses[-1]):
        return True
    means = moving_mean([first, *losses], 1 - 1 / SMOOTHING)
    best = means.min()
    # Also correct for losses that are negative or close to zero.
    return bool(means[-1] > best + (STOP_AT - 1) * max(abs(best), first - best))


def suggest(curve: RateCurve) -> Suggestion | None:
    """The rate where the loss falls fastest; None if it does not fall. All losses are finite."""
    if len(curve.rates) < 3:
        return None
    lowest = int(np.argmin(curve.smoothed))
    noise = float(np.std((curve.losses - curve.smoothed)[: lowest + 1]))
    fall = float(curve.smoothed[0] - curve.smoothed[lowest])
    if fall <= max(noise, FLAT * abs(float(curve.smoothed[0]))):
        return None
    slopes = np.gradient(curve.smoothed, np.log(curve.rates))
    steepest = int(np.argmin(slopes[: lowest + 1]))
    return Suggestion(float(curve.rates[steepest]), float(curve.rates[lowest]))
