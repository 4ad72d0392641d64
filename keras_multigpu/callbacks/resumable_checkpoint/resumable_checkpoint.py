"""`ResumableCheckpoint`: kill training anywhere, run the same command, get the same result."""

import logging
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.resumable_checkpoint import resumed_run
from keras_multigpu.callbacks.resumable_checkpoint.ending import Consensus, StopSignals
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.callbacks.resumable_checkpoint.states import (
    counters_of,
    report_changes,
    restore_states,
    states_of,
)
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import require_number, require_positive_integer, value_error
from keras_multigpu.data.addresses import is_address
from keras_multigpu.training.variables.model_state import (
    ModelState,
    are_open,
    identity_of_model,
    settle,
)

LAST_WAITS = (1, 5, 20)
"""Seconds between the attempts to save for the last time, if a bucket is out of reach."""

logger = logging.getLogger("keras_multigpu")


class ResumableCheckpoint(RunCallback):
    """Saves the complete state of training, and resumes when the command is run again.

    The state has the weights, optimizer, loss scale, seeds, metrics in progress, the position in
    the data, epoch and step, the history, and the state of the other callbacks: those of Keras,
    every `RunCallback`, and any other with a `state`, a dict that can be read and set. A run that
    was killed within an epoch resumes there, and ends as if it had not been interrupted. A run that
    has ended does not train further. After SIGTERM or Ctrl-C it saves and ends; a second one ends
    it immediately. When one of several workers fails, another one saves.

    It needs a model from `keras_multigpu.distribute`; one device is enough. Its place among the
    callbacks does not matter: it acts when all of them have handled a step or an epoch.

    Args:
        folder: The folder for the checkpoints, or an address of fsspec such as
            `gs://bucket/photos_run`. Each run, that is each `fit`, needs its own.
        every_steps: Save every `every_steps` steps, counted over all epochs.
        every_minutes: Save when this many minutes have passed since the last time.
        every_epochs: Save at the end of every `every_epochs` epochs; None for the last one only.
        keep: How many checkpoints to keep. With two or more, a damaged one can be replaced.

    Example:

    ```python
    model = kmg.distribute(model)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(train, epochs=90, callbacks=[ResumableCheckpoint("photos_run", every_minutes=10)])
    ```
    """

    single = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_epochs: int | None = 1,
        keep: int = 2,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None:
                require_positive_integer(name, value)
        require_positive_integer("keep", keep)
        if every_minutes is not None:
            require_number("every_minutes", every_minutes, lambda n: n > 0, "above zero")
        self.folder: Path | str = place_of(folder)
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.every_epochs = every_epochs
        self.keep = keep
        self.resumed_from: Path | str | None = None
        self._files = CheckpointFolder(self.folder, keep)
        self._signals = StopSignals(self._cut_validation)
        self._workers: Consensus
        # The checkpoint that this run resumes from, until that is done.
        self._found: Any = None
        # The identities of the data and of the model, and the rates that the user wrote.
        self._data: dict[str, Any] = {}
        self._made: dict[str, Any] | None = None
        self._rates: list[Any] = []
        self._validating = False
        # The steps since the last checkpoint, and the epoch's step that was counted last.
        self._steps = self._last_step = 0
        self._saved_at = 0.0
        # With several workers: the changes that had ended when all callbacks had handled the last
        # step, and the counters of Keras's callbacks then.
        self._ended = 0
        self._counters: dict[str, dict[str, Any]] = {}
        self._first_epoch = 0
        self._clock = resumed_run.Clock()

    # Begin and resume.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        resumed_run.refuse_backups(run.callbacks)
        self._workers = Consensus(run.group)
        if self._workers.is_chief:
            self._files.open()
        self._rates, self._validating = [], False
        run.after_failure(self._failed)
        run.after_end(self._close)
        self._data = resumed_run.identity_of_data(run)
        resumed_run.warn_of_unseeded_shuffle(self._data)
        self.resumed_from, self._found = self._workers.newest(self._files)
        if self.resumed_from is not None:
            resumed_run.require_run(self._found, self.resumed_from)
            with resumed_run.refusing(self.resumed_from):
                if self._workers.is_chief:
                    resumed_run.report_other_versions(self._found, self.resumed_from)
                resumed_run.refuse_other_data(self._data, self._found, self.resumed_from)
                resumed_run.require_position(run, self._found["run"], self.resumed_from)
        self._clock = resumed_run.clock_of(self._found, run.epochs)
        self._signals.listen()
        run.after_begin(self._begin)
        run.after_each("on_epoch_begin", self._epoch_begun)
        run.after_each("on_train_batch_end", self._step_done)
        run.after_each("on_test_end", self._validation_done)
        run.after_each("on_epoch_end", self._epoch_done)

    def _begin(self) -> None:
        self._rates = resumed_run.written_rates(self.model)
        # Before other callbacks can change the model.
        self._made = identity_of_model(self.model) if self.model.built else None
        if self.resumed_from is not None:
            found, path = self._found, self.resumed_from
            with resumed_run.refusing(path):
                resumed_run.resume(self.run, found, path)
                resumed_run.refuse_other_model(self.model, self._rates, found, path)
                if self._workers.is_chief:  # The others may lack some callbacks.
                    report_changes(self.run.callbacks, found["callbacks"])
            before = ModelState.of(self.model)
            try:
                with resumed_run.refusing(path):
                    self._restore()
            except BaseException:  # A callback may reject its state.
                before.restore(self.model)
                raise
        self._steps, self._last_step, self._saved_at = 0, self.run.step, time.monotonic()
        self._first_epoch = self.run.epoch

    def _restore(self) -> None:
        ModelState(self._found["model"]).restore(self.model)
        restore_states(self.run.callbacks, self._found["callbacks"])
        resumed_run.apply_rates(self.model, self._rates, self._found["rates"])
        random.setstate(self._found["random"]["python"])
        np.random.set_state(self._found["random"]["numpy"])

    def _epoch_begun(self) -> None:
        # After a checkpoint within an epoch, callbacks have now seen that epoch begin twice. This
        # undoes what they did the second time.
        if self._found is not None and self.run.step:
            self._restore()
        self._found = None
        self._record_progress()

    # Save.

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._validating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._validating = False

    def _cut_validation(self) -> None:
        """After a signal, end validation, because a resumed run repeats it."""
        # Unless other workers would continue, or swapping weights once more would round them.
        if self._validating and not self._swaps() and not self._workers.is_spread:
            self.model.stop_evaluating = True

    def _swaps(self) -> bool:
        """Whether validation uses other weights than training."""
        kind = keras.callbacks.SwapEMAWeights
        return any(isinstance(callback, kind) for callback in self.run.callbacks)

    def _validation_done(self) -> None:
        self._record_progress()
        if self._signals.pending is not None and self.model.stop_evaluating:
            self._save(self.run.state, is_last=True)
            self._end()

    def _step_done(self) -> None:
        self._record_progress()
        step = self.run.step
        self._steps += step - (self._last_step if step > self._last_step else 0)
        self._last_step = step
        is_due, signalled = self._poll()
        if is_due or signalled:
            self._save(self.run.state, is_last=signalled)
        if signalled:
            self._end()

    def _poll(self, now: bool = False) -> tuple[bool, bool]:
        """Whether to save, and whether a signal ends training: the same on all workers."""
        waited = time.monotonic() - self._saved_at
        late = self.every_minutes is not None and waited >= 60 * self.every_minutes
        signalled, late = self._workers.poll(self._signals.pending, late, now)
        if signalled is not None:  # It may have reached only another worker.
            self._signals.pending = signalled
        is_due = late or (self.every_steps is not None and self._steps >= self.every_steps)
        return is_due, signalled is not None

    def _epoch_done(self) -> None:
        """Save the state right before the next epoch."""
        self._record_progress()
        is_due, signalled = self._poll(now=True)
        done = self.run.epoch + 1
        over = self.model.stop_training or done >= self.run.epochs
        regular = self.every_epochs is not None and done % self.every_epochs == 0
        self._last_step = 0
        if over or regular or signalled or is_due:
            stopped = bool(self.model.stop_training)
            self._save(self._after_epoch(), stopped, is_last=over or signalled)
        if signalled:
            self._end()

    def _after_epoch(self) -> dict[str, Any]:
        return {**self.run.state, "epoch": self.run.epoch + 1, "step": 0, "logs": {}}

    def _save(self, run_state: dict[str, Any], stopped: bool = False, *, is_last: bool) -> None:
        self._steps, self._saved_at = 0, time.monotonic()
        # On all workers, because some callbacks exchange what they measured.
        states = states_of(self.run.callbacks)
        settle(self.model)
        if not self._workers.is_chief:
            return
        for wait in (*LAST_WAITS, None) if is_last else (0,):
            try:
                return self._write(run_state, stopped, states)
            except ConnectionError as error:
                # A bucket that is out of reach for a while need not end the training.
                if wait is None:
                    raise
                what = f"It is tried again in {wait} s." if is_last else "Training continues."
                logger.warning("%s %s", error, what)
                time.sleep(wait)

    def _write(self, run_state: dict[str, Any], stopped: bool, states: dict[str, Any]) -> None:
        if self._made is None:
            self._made = identity_of_model(self.model)
        tree = {
            "run": run_state,
            "stopped": stopped,
            "model": ModelState.of(self.model).values,
            "made": self._made,
            "made_with": resumed_run.list_versions(),
            "rates": self._rates,
            "callbacks": states,
            "random": {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)},
            "data": self._data,
            "replicas": self.run.replicas,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
            "clock": {**self._clock._asdict(), "saved": time.time()},
        }
        self._files.write(resumed_run.encode(tree))
        # Minutes count from the end of writing, or a slow disk would always be busy.
        self._saved_at = time.monotonic()

    # After a worker has failed.

    def _record_progress(self) -> None:
        """All callbacks have handled all steps so far."""
        if self._workers.is_spread:
            _, self._ended = self.run.group.changes
            self._counters = counters_of(self.run.callbacks)

    def _failed(self) -> None:
        """This or another worker has failed: one of the survivors saves its state."""
        if not self._workers.is_spread:
            return
        try:
            state = self._state_between_steps()
            if state is not None and self._workers.take_over(self._files):
                self._save_last(state)
        except Exception as error:  # Another error says why training failed.
            logger.warning("The last steps are not saved. %s", error)
        # The error ends this process, even if a launcher has asked it to end: the status of a
        # signal would mean that everything is saved.
        self._signals.pending = None

    def _state_between_steps(self) -> dict[str, Any] | None:
        """The progress of training; None within a step, for the model or for a callback."""
        run = self.run
        if run.last_hook == "on_epoch_end":
            return self._after_epoch()
        begun, ended = run.group.changes
        if self._validating:
            begun = ended = self._ended
        steps = ended - self._ended
        step, most = run.step + steps, run.steps_per_epoch
        is_whole = run.last_hook is not None and begun == ended and not are_open(self.model)
        if steps:
            # Some steps of one execution, which callbacks have not handled yet.
            is_whole &= steps < self.model.steps_per_execution and not run.feed.source.may_be_empty
            is_whole &= most is not None and step < most
        # Before the first step, callbacks would do twice what they do when an epoch begins.
        if not is_whole or not step or (self._validating and self._swaps()):
            return None
        return {**run.state, "step": step}

    def _save_last(self, state: dict[str, Any]) -> None:
        newest = self._files.newest()
        known = {} if newest is None else newest[1]["callbacks"]
        before = {"epoch": self._first_epoch, "step": 0} if newest is None else newest[1]["run"]
        if newest and (before["epoch"], before["step"]) >= (state["epoch"], state["step"]):
            return
        states = states_of(self.run.callbacks)
        if known.keys() - states.keys() and before["epoch"] != state["epoch"]:
            logger.warning(
                "The steps since the last checkpoint are not saved: only the chief had some "
                "callbacks, and their state after epoch %d is lost with it.",
                state["epoch"],
            )
            return
        is_over = self.run.last_hook == "on_epoch_end" and bool(self.model.stop_training)
        if self.run.last_hook != "on_epoch_end":
            # Callbacks count the beginning of this batch again when the run resumes.
            for name, counters in self._counters.items():
                states[name]["counters"] = counters
        # The last checkpoint has the state of callbacks that only the chief had.
        others = {} if self._workers.is_chief else known
        self._write(state, is_over, {**others, **states})
        logger.warning(
            "A worker has failed. Saved step %d of epoch %d in %s; run the same command again to "
            "resume.",
            state["step"],
            state["epoch"] + 1,
            self.folder,
        )

    # End.

    def _end(self) -> None:
        self._workers.wait()
        number = self._signals.pending
        assert number is not None
        logger.warning(
            "Ended by %s after step %d of epoch %d. Everything is saved in %s; run the same "
            "command again to resume.",
            signal.Signals(number).name,
            self.run.step,
            self.run.epoch + 1,
            self.folder,
        )
        self._signals.end()

    def _close(self) -> None:
        """`fit` is over, perhaps because of an error."""
        self._found = None
        self._files.close()
        if self._rates:
            resumed_run.remember_rates(self.model, self._rates)
        self._signals.close()


def place_of(folder: str | os.PathLike[str]) -> Path | str:
    """The path of a folder, or its address as text."""
    text = os.path.expanduser(folder).removeprefix("file://")
    if not isinstance(folder, str) and re.match("[a-z][a-z0-9]+:/", text):
        raise value_error(
            "`folder` is a path made from an address, which has lost a slash.",
            "Expected an address as text.",
            'Pass for example "gs://bucket/run".',
            folder=folder,
        )
    return text if is_address(text) else Path(text)
