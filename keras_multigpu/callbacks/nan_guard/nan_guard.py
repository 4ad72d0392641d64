"""`NaNGuard`: says what is not finite, where, and keeps it out of the model."""

import logging
from typing import Any, NamedTuple, NoReturn, Self

import keras

from keras_multigpu.callbacks.base import RunCallback
from keras_multigpu.callbacks.nan_guard.findings import (
    Facts,
    Finding,
    finding_between_steps,
    finding_of,
)
from keras_multigpu.callbacks.nan_guard.probe import (
    ACTIVE,
    FOUND_AT,
    LONGEST,
    NOTHING_FOUND,
    SKIPPED,
    STEPS,
    TOOK,
    FiniteProbe,
)
from keras_multigpu.callbacks.rates import Rate
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_number,
    require_positive_integer,
    warn,
)
from keras_multigpu.training.variables.model_state import ModelState
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.writing import writes_here

logger = logging.getLogger("keras_multigpu")


class NaNGuard(RunCallback):
    """Keeps NaN and infinity out of a model, and names replica, layer and example.

    Every step is checked before it changes anything: the loss, the gradients, the new weights, and
    what layers and the optimizer remember. A step with a number that is not finite is not taken:
    weights, optimizer, moving statistics, metrics and logs stay as they were.

    Args:
        action: What follows. `"stop"`: training ends, with the weights before that step.
            `"skip"`: training goes on with the next batch. `"rollback"`: the model goes back to an
            earlier state, with a lower rate, and training goes on with the next batch.
        every_steps: After how many steps Python asks whether something was found. Until then
            `"stop"` and `"rollback"` take no further steps. To ask waits for the devices.
        patience: For `"skip"`: after so many steps in a row that were skipped, training ends with
            a `FloatingPointError`.
        snapshot_every_steps: For `"rollback"`: after how many steps the state to go back to is
            taken anew; None for the beginning of each epoch. It is a copy in the host's memory, as
            large as weights and optimizer.
        rate_factor: For `"rollback"`: what the rate is multiplied by, each time.
        max_rollbacks: For `"rollback"`: after so many, the next finding ends training with a
            `FloatingPointError`.

    Attributes:
        findings: What was found in this `fit`; each has `epoch`, `step`, `what`, `cause`,
            `replicas`, `devices`, `layers`, `variables`, `array`, `position` and `example`.
        skipped_steps: How many steps were not taken, as of the last check.
        rollbacks: How often the model went back.

    Example:

    ```python
    guard = kmg.callbacks.NaNGuard(action="skip")
    model.fit(train, epochs=10, callbacks=[guard])
    print(guard.skipped_steps, guard.findings)
    ```
    """

    def __init__(
        self,
        action: str = "stop",
        *,
        every_steps: int = 10,
        patience: int = 10,
        snapshot_every_steps: int | None = None,
        rate_factor: float = 0.5,
        max_rollbacks: int = 5,
    ) -> None:
        super().__init__()
        require_choice("action", action, ("stop", "skip", "rollback"))
        require_positive_integer("every_steps", every_steps)
        require_positive_integer("patience", patience)
        require_positive_integer("max_rollbacks", max_rollbacks)
        if snapshot_every_steps is not None:
            require_positive_integer("snapshot_every_steps", snapshot_every_steps)
        fix = "Pass 0.5 to halve the rate each time."
        require_number(
            "rate_factor", rate_factor, lambda one: 0 < one <= 1, "above 0 and not above 1", fix
        )
        self.action = action
        if action == "skip":
            self.needs, self.writes = "inside", ("skipped_steps",)
            self._instead = "pass `action='rollback'`"
        self.every_steps = every_steps
        self.patience = patience
        self.snapshot_every_steps = snapshot_every_steps
        self.rate_factor = rate_factor
        self.max_rollbacks = max_rollbacks
        self.findings: list[Finding] = []
        self.skipped_steps = 0
        self.rollbacks = 0
        self._probe: FiniteProbe | None = None
        # The same, while it watches the steps of a `fit`.
        self._watching: FiniteProbe | None = None
        self._good: GoodState | None = None
        self._rate: Rate | None = None
        self._at_epoch_begin = {"skipped": 0, "took": 0}
        self._epoch = self._step = 0
        self._unchecked = self._untaken = 0

    # Hooks.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.findings, self.skipped_steps, self.rollbacks = [], 0, 0
        self._good = None
        self._at_epoch_begin = {"skipped": 0, "took": 0}
        self._unchecked = self._untaken = 0
        self._rate = Rate(self.model).adjust() if self.action == "rollback" else None
        run = getattr(self.model, "training_run", None)
        if run is not None and self._rate is not None:
            # Also where `fit` fails.
            run.after_end(self._rate.restore)
        self._watching = None
        # One that does not call `compute_loss` cannot be looked into; its logs can.
        if run is None or (run.has_own_train_step and self.action != "skip"):
            return
        # The same one for the same model: its steps are compiled with the probe's variables.
        if self._probe is None or self._probe.model is not self.model:
            self._probe = FiniteProbe(self.model, goes_on=self.action == "skip")
        self._watching = self._probe
        run.watch(self._probe)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Be on duty from here on: steps that other callbacks try out before do not count."""
        run = getattr(self.model, "training_run", None)
        self._epoch, self._step = epoch, 0 if run is None else run.step
        resumed = self._step > 0
        if self._watching is not None:
            self._watching.set({ACTIVE: 1})
            counters = self._watching.read()
            if not resumed:
                skipped, took = int(counters[SKIPPED]), int(counters[TOOK])
                self._at_epoch_begin = {"skipped": skipped, "took": took}
        # After an interruption the checkpoint has brought a good state along.
        every_epoch = self.snapshot_every_steps is None and not resumed
        if self.action == "rollback" and (every_epoch or self._good is None):
            self._good = GoodState.of(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._unchecked += batch + 1 - self._step
        self._untaken += batch + 1 - self._step
        self._step = batch + 1
        due = self.snapshot_every_steps is not None and self._untaken >= self.snapshot_every_steps
        if due or self._unchecked >= self.every_steps:
            self._check(logs or {})
        if self.action == "rollback" and (due or self._good is None):
            self._untaken = 0
            self._good = GoodState.of(self.model, self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs if logs is not None else {}
        self._check(logs)
        if self._watching is None:
            return
        counters = self._watching.read()
        if self.action == "skip":
            logs["skipped_steps"] = int(counters[SKIPPED]) - self._at_epoch_begin["skipped"]
        if counters[TOOK] == self._at_epoch_begin["took"]:
            # No step counts, so the metrics are at zero, which would look like a perfect model.
            means = logs.keys() & self.model.training_run.logs.keys()
            logs.update(dict.fromkeys(means, float("nan")))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._good = None
        if self._rate is not None:
            self._rate.restore()
        if self._watching is not None:
            self._watching.set({ACTIVE: 0})

    # What was found, and what follows.

    def _check(self, logs: dict[str, Any]) -> None:
        if not self._unchecked:
            return
        self._unchecked = 0
        if self._watching is None:
            finding = finding_between_steps(self.model, logs, self._epoch, self._step - 1)
        else:
            finding = self._found_by(self._watching)
        if finding is not None:
            self.findings.append(finding)
            getattr(self, f"_{self.action}")(finding)
        if self._watching is not None and self.action == "skip":
            longest = int(self._watching.read()[LONGEST])
            if longest >= self.patience:
                why = f"{longest} steps in a row were skipped."
                give_up(self.findings[-1], why, patience=self.patience)

    def _found_by(self, probe: FiniteProbe) -> Finding | None:
        counters = probe.read()
        self.skipped_steps = int(counters[SKIPPED])
        if counters[FOUND_AT] == NOTHING_FOUND:
            return None
        # The probe's steps are counted from `fit`'s first one, and not from the epoch's.
        step = self._step - int(counters[STEPS] - counters[FOUND_AT])
        facts = Facts(probe.table(), probe.columns)
        finding = finding_of(facts, self._epoch, step, self.model.training_run, self.model)
        probe.set({FOUND_AT: NOTHING_FOUND})
        return finding

    def _stop(self, finding: Finding) -> None:
        self.model.stop_training = True
        kept = (
            "Training stops; the weights are those before that step."
            if self._watching is not None
            else "Training stops, too late for the weights; `action='rollback'` keeps good ones."
        )
        if writes_here():
            logger.error("%s %s", finding, kept)

    def _skip(self, finding: Finding) -> None:
        if len(self.findings) == 1 and writes_here():
            warn(
                f"{finding} The step is skipped; so are others like it, without a word. "
                "`skipped_steps` in the logs counts them.",
                stacklevel=2,
            )

    def _rollback(self, finding: Finding) -> None:
        if self.rollbacks == self.max_rollbacks:
            why = f"The model went back {self.rollbacks} times and it did not help."
            give_up(finding, why, max_rollbacks=self.max_rollbacks)
        self.rollbacks += 1
        assert self._rate is not None
        lever = self._rate.lever.numpy()
        if self._good is not None:
            self._good.restore(self.model, self._epoch)
        # Not from the rate of the good state: it may be the state of an earlier return.
        self._rate.lever.assign(lever)
        self._rate.scale(self.rate_factor)
        if writes_here():
            logger.warning(
                "%s The model goes back to an earlier state, with %g of the rate.",
                finding,
                self.rate_factor,
            )

    # To go on after an interruption.

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""
        state: dict[str, Any] = {
            "rollbacks": self.rollbacks,
            "at_epoch_begin": dict(self._at_epoch_begin),
            "unchecked": self._unchecked,
            "untaken": self._untaken,
            "good": None if self._good is None else self._good._asdict(),
            "rate": None if self._rate is None else self._rate.state,
        }
        if self._watching is not None:
            state["probe"] = self._watching.state
        return state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.rollbacks = state["rollbacks"]
        self._at_epoch_begin = dict(state["at_epoch_begin"])
        self._unchecked, self._untaken = state["unchecked"], state["untaken"]
        self._good = None if state["good"] is None else GoodState(**state["good"])
        if self._rate is not None:
            self._rate.state = state["rate"]
        if self._watching is not None and "probe" in state:
            self._watching.state = state["probe"]
            self.skipped_steps = int(self._watching.read()[SKIPPED])


def give_up(finding: Finding, why: str, **received: Any) -> NoReturn:
    raise error_of(
        FloatingPointError,
        f"{finding} {why}",
        "Expected training to become finite again.",
        "Lower the rate, clip gradients (`clipnorm` of the optimizer), or mend the example.",
        **received,
    )


class GoodState(NamedTuple):
    """A model's weights, optimizer, seeds and, for the rest of the epoch, metrics at some step."""

    epoch: int
    values: dict[str, Any]

    @classmethod
    def of(cls, model: keras.Model, epoch: int) -> Self | None:
        """The present state; None while the optimizer has no variables yet."""
        if not all(optimizer.built for optimizer in optimizers_of(model)):
            return None
        return cls(epoch, ModelState.of(model).values)

    def restore(self, model: keras.Model, epoch: int) -> None:
        """Give the values back. Metrics that were not there, or of another epoch, begin anew."""
        present = ModelState.of(model).values
        known = epoch == self.epoch and present.keys() == self.values.keys()
        ModelState({**present, **self.values}).restore(model)
        if not known:
            model.reset_metrics()
