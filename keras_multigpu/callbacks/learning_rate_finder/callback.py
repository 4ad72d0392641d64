"""`LearningRateFinder`: a range test that suggests a learning rate."""

import itertools
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.fit_run import batches_going_round, run_to_try, same_draws
from keras_multigpu.callbacks.learning_rate_finder.curve import (
    RateCurve,
    Suggestion,
    drawn,
    explodes,
    smoothed,
    suggestion,
)
from keras_multigpu.callbacks.rates.rates import Rate
from keras_multigpu.checks import (
    require_choice,
    require_number,
    require_positive_integer,
    value_error,
)
from keras_multigpu.pictures import picture_file, write_png
from keras_multigpu.training.logs import pythonic
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.writing import say

PATIENCE = 5.0
"""Every how many seconds a search says how far it is."""

# With fewer steps there is no curve.
FEWEST = 10

FOUND = ("suggested_rate", "lowest_rate", "exploded_rate")
"""What a search finds, and a run that goes on keeps."""


class LearningRateFinder(keras.callbacks.Callback):
    """Suggests a learning rate by a range test, before the first epoch.

    It trains for some steps with a rate that grows from `low` to `high`, one batch each, until the
    loss explodes (Smith 2017). The rate where the smoothed loss falls fastest is suggested.
    Afterwards the model, its optimizer, metrics and random numbers are what they were, bit for
    bit, and the data begin where they would have.

    To know the rate and not train, call `fit(..., epochs=0)`.

    Args:
        low: Float, the first rate, small enough that nothing happens.
        high: Float, the last rate, large enough that the loss explodes.
        steps: Integer, how many rates are tried. The data go round if they have fewer batches.
        smoothing_steps: Float of at least 1, over how many steps to each side the loss is
            averaged, as the standard deviation of a Gaussian. Larger for small batches, whose
            losses differ more, together with more steps.
        stop_at: Float above 1. The loss has exploded once its mean is this many times the lowest
            so far. For losses near or below zero: once it has risen from there by this number
            less one, times what it had fallen since the first step.
        apply: What becomes of the rate in this `fit`. `"learning_rate"` trains with it; a schedule
            is scaled so that it begins with it. None changes nothing.
        picture: Where to draw the curve, a `.png`. By default nowhere.
        verbose: 1 prints what was found, and the progress of a long search; 0 prints nothing.

    Attributes:
        suggested_rate: The rate where the loss falls fastest. None without a suggestion.
        lowest_rate: The rate where the smoothed loss is lowest, which is too large to train with.
        exploded_rate: The rate where the search ended early; None if it did not.
        curve: `rates`, `losses` and `smoothed`, as arrays.
    """

    def __init__(
        self,
        low: float = 1e-6,
        *,
        high: float = 10.0,
        steps: int = 100,
        smoothing_steps: float = 5.0,
        stop_at: float = 4.0,
        apply: str | None = None,
        picture: str | Path | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        require_range(low, high)
        require_choice("apply", apply, ["learning_rate", None])
        require_positive_integer("steps", steps)
        if steps < FEWEST:
            raise value_error(
                "There are too few steps for a curve.",
                f"Expected at least {FEWEST}.",
                "Pass 100, or for a coarse look 30.",
                steps=steps,
            )
        fix = "Leave it out for a value that suits most trainings."
        require_number(
            "smoothing_steps", smoothing_steps, lambda n: 1 <= n <= steps, "from 1 to `steps`", fix
        )
        require_number("stop_at", stop_at, lambda n: 1 < n < np.inf, "above 1", fix)
        self.suggested_rate: float | None = None
        self.lowest_rate: float | None = None
        self.exploded_rate: float | None = None
        self.curve: RateCurve | None = None
        self._rates = np.geomspace(low, high, steps)
        self.smoothing_steps = smoothing_steps
        self.stop_at = stop_at
        self.apply = apply
        self.picture = picture_file(picture)
        self.verbose = verbose
        self._rate: Rate | None = None
        self._factor: float | None = None
        self._resumed = False

    @property
    def state(self) -> dict[str, Any]:
        """What was found, for a run that goes on and need not search again."""
        factor = self._factor
        if factor is not None and self._rate is not None:
            # With what others have multiplied since, because this is what is set again.
            factor = self._rate.state
        return {**{name: getattr(self, name) for name in FOUND}, "factor": factor}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        for name in FOUND:
            setattr(self, name, state[name])
        self._factor, self._resumed = state["factor"], True
        if self.apply and self._rate is not None and self._factor is not None:
            self._scale(self._rate, self._factor)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = run_to_try(self)
        self._rate, self._factor, self._resumed = Rate(self.model), None, False
        if self.apply and not self._rate.is_plain and not self._rate.next:
            raise value_error(
                "`apply` cannot scale a schedule whose next rate is zero.",
                "Expected a schedule that can be scaled to begin with the suggested rate.",
                "Leave out `apply`, and compile a schedule with the rate that is suggested.",
                apply="learning_rate",
            )
        run.after_begin(lambda: self._begin(run))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._rate = None

    def _begin(self, run: TrainingRun) -> None:
        if self._resumed:
            return
        first, rates, losses = self._search(run)
        finite = np.isfinite(losses)
        kept = np.array(losses)[finite]
        self.curve = RateCurve(np.array(rates)[finite], kept, smoothed(kept, self.smoothing_steps))
        exploded = explodes(losses, first, self.smoothing_steps, self.stop_at)
        self.exploded_rate = float(rates[-1]) if exploded else None
        found = suggestion(self.curve)
        self.suggested_rate, self.lowest_rate = found or (None, None)
        self._tell(found)
        if self.picture is not None and len(kept):
            write_png(drawn(self.curve, found, self.exploded_rate), self.picture)
        if self.apply and found is not None:
            self._use(found.steepest)

    def _search(self, run: TrainingRun) -> tuple[float, list[float], list[float]]:
        """Train with growing rates: the first loss, and for each rate the loss that it led to."""
        assert self._rate is not None
        with same_draws():
            batches = batches_going_round(run)
            batch = next(batches)
        rates: list[float] = []
        losses: list[float] = []
        told = time.perf_counter()
        with run.trial(batch), self._rate.tried(), same_draws():
            first = self._loss(run, batch, float(self._rates[0]))
            if not np.isfinite(first):
                raise value_error(
                    "The loss is not finite before any learning rate was tried.",
                    "Expected a finite loss of the first batch.",
                    "Check the data for NaN and the model for a wrong loss or activation.",
                    loss=first,
                )
            for rate, following in itertools.zip_longest(
                self._rates, self._rates[1:], fillvalue=self._rates[-1]
            ):
                # A step's loss is taken before its update, so it is what the rate before led to.
                losses.append(self._loss(run, next(batches), float(following)))
                rates.append(float(rate))
                if explodes(losses, first, self.smoothing_steps, self.stop_at):
                    break
                if time.perf_counter() - told > PATIENCE:
                    told = time.perf_counter()
                    done = f"step {len(rates)} of {len(self._rates)}"
                    self._say(f"{done}, rate {rate:.2g}, loss {losses[-1]:.4g}")
        return first, rates, losses

    def _loss(self, run: TrainingRun, batch: Any, rate: float) -> float:
        """Train one step with a rate; the loss of the batch, before it."""
        assert self._rate is not None
        self._rate.set(rate)
        # The loss of this batch, and not the mean of all so far.
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

    def _use(self, rate: float) -> None:
        assert self._rate is not None
        if self._rate.is_plain:
            self._rate.set(rate)
        else:
            self._scale(self._rate, rate / self._rate.next)

    def _scale(self, rate: Rate, factor: float) -> None:
        """Let a schedule yield so many times its rate, until `fit` ends."""
        self._factor = factor
        rate.adjust().lever.assign(factor)
        self.model.training_run.after_end(rate.restore)

    def _tell(self, found: Suggestion | None) -> None:
        assert self.curve is not None
        end = "it did not explode"
        if self.exploded_rate is not None:
            end = f"it explodes at {self.exploded_rate:.2g}"
        if found is None:
            last = float(self._rates[-1])
            self._say(
                "no rate is suggested: the loss does not fall with any rate from "
                f"{self._rates[0]:.2g} to {self.exploded_rate or last:.2g}; {end}."
            )
            return
        used = ", and is used from now on" if self.apply else ""
        self._say(
            f"a rate of {found.steepest:.2g} is suggested{used}. There the loss falls fastest; it "
            f"is lowest at {found.lowest:.2g} (a tenth of that is another usual choice), and {end}."
        )

    def _say(self, text: str) -> None:
        if self.verbose:
            say(f"LearningRateFinder: {text}")


def require_range(low: Any, high: Any) -> None:
    numbers = all(isinstance(rate, (int, float)) for rate in (low, high))
    if not numbers or not 0 < low < high < np.inf:
        raise value_error(
            "`low` and `high` are not a range of learning rates.",
            "Expected numbers with 0 < low < high.",
            "Pass for example low=1e-6 and high=10.0.",
            low=low,
            high=high,
        )
