"""`NaNGuard`: keeps NaN and infinity out of a model, and reports where they came from."""

import logging
from typing import Any, NamedTuple, NoReturn, Self

import keras
import numpy as np

from keras_multigpu.callbacks.nan_guard.findings import (
    Facts,
    Finding,
    describe,
    describe_from_outside,
)
from keras_multigpu.callbacks.nan_guard.probe import (
    ACTIVE,
    COUNTERS,
    FOUND_AT,
    LONGEST,
    NOTHING_FOUND,
    SKIPPED,
    STEPS,
    FiniteProbe,
)
from keras_multigpu.callbacks.rates import Rate
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_positive_integer,
    warn,
)
from keras_multigpu.training.variables.model_state import ModelState
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.writing import writes_here

logger = logging.getLogger("keras_multigpu")

RATE_FACTOR, MAX_ROLLBACKS = 0.5, 5
"""What a rollback multiplies the rate by, and how many there may be."""


class NaNGuard(RunCallback):
    """Keeps NaN and infinity out of a model, and names the replica, layer and example.

    Every step is checked before it changes anything: the loss, the gradients, the new weights, and
    the state of layers and the optimizer. A step with a number that is not finite is not applied:
    weights, optimizer, moving statistics, metrics and logs stay as they were.

    Args:
        action: What happens then. `"stop"` ends training, `"skip"` continues with the next batch,
            and `"rollback"` returns to the state at the beginning of the epoch, which takes as much
            host memory as weights and optimizer, halves the rate, and continues; the sixth time it
            ends training with a `FloatingPointError`.
        every_steps: How often findings are read, in steps. Until then `"stop"` and `"rollback"`
            apply no further steps.
        patience: For `"skip"`: after this many skipped steps in a row, training ends with a
            `FloatingPointError`.

    Attributes:
        findings: What was found in this `fit`; each has `epoch`, `step`, `what`, `cause`,
            `replicas`, `devices`, `layers`, `variables`, `array`, `position` and `example`, and
            prints as a readable line.
        skipped_steps: How many steps were not applied, as of the last read.
        rollbacks: How often the model returned to an earlier state.
    """

    _instead = "pass `action='rollback'`"

    def __init__(
        self,
        action: str = "stop",
        *,
        every_steps: int = 10,
        patience: int = 10,
    ) -> None:
        super().__init__()
        require_choice("action", action, ("stop", "skip", "rollback"))
        require_positive_integer("every_steps", every_steps)
        require_positive_integer("patience", patience)
        self.action = action
        if action == "skip":
            self.needs, self.writes = "inside", ("skipped_steps",)
        self.every_steps = every_steps
        self.patience = patience
        self._probe: FiniteProbe | None = None
        self._rate: Rate | None = None
        self._epoch = self._step = self._checked_at = 0
        self._start_over()

    def _start_over(self) -> None:
        self.findings: list[Finding] = []
        self.skipped_steps = self.rollbacks = 0
        self._good: GoodState | None = None
        self._before = np.zeros(COUNTERS, np.int64)

    @property
    def _watching(self) -> FiniteProbe | None:
        """The probe; None if it cannot inspect the steps, so that logs and weights are checked."""
        probe = self._probe
        return probe if self.run_or_none is not None and probe is not None and probe.sees else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._start_over()
        self._rate = Rate(self.model).adjust() if self.action == "rollback" else None
        run = self.run_or_none
        if run is None:
            return
        if self._rate is not None:
            # Also if `fit` fails.
            run.after_end(self._rate.restore)
        self._probe = run.watch(FiniteProbe(self.model, skips=self.action == "skip"))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        run = self.run_or_none
        self._epoch, self._step = epoch, 0 if run is None else run.step
        self._checked_at = 0
        resumed = self._step > 0
        if self._watching is not None:
            # Not earlier: the trial steps of other callbacks do not count.
            self._watching.set({ACTIVE: 1})
            if not resumed:
                self._before = self._watching.read()
        # After an interruption the checkpoint has restored a good state.
        if self.action == "rollback" and (not resumed or self._good is None):
            self._good = GoodState.of(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self.every(self.every_steps, batch):
            self._check(logs or {})
        if self.action == "rollback" and self._good is None:
            # The first step has built the optimizer.
            self._good = GoodState.of(self.model, self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs if logs is not None else {}
        if self._step > self._checked_at:
            self._check(logs)
        if self._watching is None:
            return
        passed = self._watching.read() - self._before
        if self.action == "skip":
            logs["skipped_steps"] = int(passed[SKIPPED])
        if passed[SKIPPED] == passed[STEPS]:
            # No step was applied, so the metrics are zero, which would look like a perfect model.
            means = logs.keys() & self.run.logs.keys()
            logs.update(dict.fromkeys(means, float("nan")))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._good = None
        if self._rate is not None:
            self._rate.restore()
        if self._watching is not None:
            self._watching.set({ACTIVE: 0})

    def _check(self, logs: dict[str, Any]) -> None:
        self._checked_at = self._step
        probe = self._watching
        if probe is None:
            finding = describe_from_outside(self.model, logs, self._epoch, self._step - 1)
        else:
            finding = self._read(probe)
        if finding is not None:
            self.findings.append(finding)
            act = {"stop": self._stop, "skip": self._skip, "rollback": self._rollback}
            act[self.action](finding)
        if probe is not None and self.action == "skip":
            longest = int(probe.read()[LONGEST])
            if longest >= self.patience:
                why = f"{longest} steps in a row were skipped."
                give_up(self.findings[-1], why, patience=self.patience)

    def _read(self, probe: FiniteProbe) -> Finding | None:
        counters = probe.read()
        self.skipped_steps = int(counters[SKIPPED])
        if counters[FOUND_AT] == NOTHING_FOUND:
            return None
        # The probe counts steps from the start of `fit`, not of the epoch.
        step = self._step - int(counters[STEPS] - counters[FOUND_AT])
        facts = Facts(probe.facts.numpy(), probe.columns)
        finding = describe(facts, self._epoch, step, self.run, self.model)
        probe.set({FOUND_AT: NOTHING_FOUND})
        return finding

    def _stop(self, finding: Finding) -> None:
        self.model.stop_training = True
        kept = "Training stops with the weights before that step."
        if self._watching is None:
            kept = (
                "Training stops, but the weights have already changed; `action='rollback'` keeps "
                "good ones."
            )
        if writes_here():
            logger.error("%s %s", finding, kept)

    def _skip(self, finding: Finding) -> None:
        if len(self.findings) == 1 and writes_here():
            warn(
                f"{finding} The step is skipped, and further ones will be without a warning. "
                "`skipped_steps` in the logs counts them.",
                stacklevel=2,
            )

    def _rollback(self, finding: Finding) -> None:
        if self.rollbacks == MAX_ROLLBACKS:
            why = f"Returning to an earlier state {self.rollbacks} times did not help."
            give_up(finding, why, rollbacks=self.rollbacks)
        self.rollbacks += 1
        assert self._rate is not None
        lever = self._rate.lever.numpy()
        if self._good is not None:
            self._good.restore(self.model, self._epoch)
        # The restored rate may be from before an earlier rollback.
        self._rate.lever.assign(lever)
        self._rate.scale(RATE_FACTOR)
        if writes_here():
            logger.warning(
                "%s The model returns to an earlier state, with the rate multiplied by %g.",
                finding,
                RATE_FACTOR,
            )

    @property
    def state(self) -> dict[str, Any]:
        return {
            "rollbacks": self.rollbacks,
            "before": self._before,
            "good": None if self._good is None else self._good._asdict(),
            "rate": None if self._rate is None else self._rate.state,
            "probe": None if self._watching is None else self._watching.state,
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.rollbacks = state["rollbacks"]
        self._before = state["before"]
        self._good = None if state["good"] is None else GoodState(**state["good"])
        if self._rate is not None:
            self._rate.state = state["rate"]
        if self._watching is not None and state["probe"] is not None:
            self._watching.state = state["probe"]
            self.skipped_steps = int(self._watching.read()[SKIPPED])


def give_up(finding: Finding, why: str, **received: Any) -> NoReturn:
    raise error_of(
        FloatingPointError,
        f"{finding} {why}",
        "Expected later steps to be finite.",
        "Lower the rate, clip gradients (`clipnorm` of the optimizer), or repair the example.",
        **received,
    )


class GoodState(NamedTuple):
    """A model's weights, optimizer, seeds and, within the same epoch, metrics."""

    epoch: int
    values: dict[str, Any]

    @classmethod
    def of(cls, model: keras.Model, epoch: int) -> Self | None:
        """The present state; None until the optimizer has variables."""
        if not all(optimizer.built for optimizer in optimizers_of(model)):
            return None
        return cls(epoch, ModelState.of(model).values)

    def restore(self, model: keras.Model, epoch: int) -> None:
        """Restore the values, and reset metrics that are new or of another epoch."""
        present = ModelState.of(model).values
        known = epoch == self.epoch and present.keys() == self.values.keys()
        ModelState({**present, **self.values}).restore(model)
        if not known:
            model.reset_metrics()
