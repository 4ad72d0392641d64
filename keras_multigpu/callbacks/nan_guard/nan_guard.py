"""`NaNGuard`: keeps NaN and infinity out of a model, and reports where they came from."""

import logging
from typing import Any

import numpy as np

from keras_multigpu.callbacks.nan_guard.findings import Facts, Finding, describe
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
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_positive_integer,
    warn,
)
from keras_multigpu.writing import writes_here

logger = logging.getLogger("keras_multigpu")


class NaNGuard(RunCallback):
    """Keeps NaN and infinity out of a model, and names the replica, layer and example.

    Every step is checked before it changes anything: the loss, the gradients, the new weights, and
    the state of layers and the optimizer. A step with a number that is not finite is not applied:
    weights, optimizer, moving statistics, metrics and logs stay as they were.

    Args:
        action: What happens then. `"stop"` ends training, `"skip"` continues with the next batch.
        every_steps: How often findings are read, in steps. Until then `"stop"` applies no further
            steps.
        patience: For `"skip"`: after this many skipped steps in a row, training ends with a
            `FloatingPointError`.

    Attributes:
        findings: What was found in this `fit`; each has `epoch`, `step`, `what`, `cause`,
            `replicas`, `devices`, `layers`, `variables`, `array`, `position` and `example`, and
            prints as a readable line.
        skipped_steps: How many steps were not applied, as of the last read.
    """

    def __init__(
        self,
        action: str = "stop",
        *,
        every_steps: int = 10,
        patience: int = 10,
    ) -> None:
        super().__init__()
        require_choice("action", action, ("stop", "skip"))
        require_positive_integer("every_steps", every_steps)
        require_positive_integer("patience", patience)
        self.action = action
        if action == "skip":
            self.writes = ("skipped_steps",)
        self.every_steps = every_steps
        self.patience = patience
        self._probe: FiniteProbe
        self._epoch = self._step = self._checked_at = 0
        self._start_over()

    def _start_over(self) -> None:
        self.findings: list[Finding] = []
        self.skipped_steps = 0
        self._before = np.zeros(COUNTERS, np.int64)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._start_over()
        self._probe = self.run.watch(FiniteProbe(self.model, skips=self.action == "skip"))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._step, self._checked_at = epoch, self.run.step, 0
        # Not earlier: the trial steps of other callbacks do not count.
        self._probe.set({ACTIVE: 1})
        # In a resumed epoch `ResumableCheckpoint` restores it after this hook.
        self._before = self._probe.read()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self.every(self.every_steps, batch):
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs if logs is not None else {}
        if self._step > self._checked_at:
            self._check()
        passed = self._probe.read() - self._before
        if self.action == "skip":
            logs["skipped_steps"] = int(passed[SKIPPED])
        if passed[SKIPPED] == passed[STEPS]:
            # No step was applied, so the metrics are zero, which would look like a perfect model.
            means = logs.keys() & self.run.logs.keys()
            logs.update(dict.fromkeys(means, float("nan")))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._probe.set({ACTIVE: 0})

    def _check(self) -> None:
        self._checked_at = self._step
        finding = self._read(self._probe)
        if finding is not None:
            self.findings.append(finding)
            (self._stop if self.action == "stop" else self._skip)(finding)
        if self.action == "skip":
            longest = int(self._probe.read()[LONGEST])
            if longest >= self.patience:
                raise error_of(
                    FloatingPointError,
                    f"{self.findings[-1]} {longest} steps in a row were skipped.",
                    "Expected later steps to be finite.",
                    "Lower the rate, clip gradients (`clipnorm` of the optimizer), or repair the "
                    "example.",
                    patience=self.patience,
                )

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
        if writes_here():
            logger.error("%s Training stops with the weights before that step.", finding)

    def _skip(self, finding: Finding) -> None:
        if len(self.findings) == 1 and writes_here():
            warn(
                f"{finding} The step is skipped, and further ones will be without a warning. "
                "`skipped_steps` in the logs counts them.",
                stacklevel=2,
            )

    @property
    def state(self) -> dict[str, Any]:
        return {"before": self._before, "probe": self._probe.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._before = state["before"]
        self._probe.state = state["probe"]
        self.skipped_steps = int(self._probe.read()[SKIPPED])
