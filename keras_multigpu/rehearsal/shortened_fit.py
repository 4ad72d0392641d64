"""Each `fit` of the script in two steps, with a kill after the first if it can go on after one."""

import contextlib
import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint import resumable_checkpoint
from keras_multigpu.checks import in_one_line
from keras_multigpu.cluster.failures import WorkerFailure
from keras_multigpu.rehearsal.findings import Finding, to_install
from keras_multigpu.rehearsal.overlay import Overlay
from keras_multigpu.rehearsal.trials import RealRun, try_all
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.workers import single

HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def shorten_fits(overlay: Overlay, is_second: bool) -> None:
    """From now on let each `fit` train two steps; `is_second` after the kill."""
    fits: list[LastCallback] = []
    # Its buckets are reached by connections, and not by paths.
    place_of = resumable_checkpoint.place_of
    resumable_checkpoint.place_of = lambda folder: (
        place if isinstance(place := place_of(folder), Path) else Path(overlay.to_change(place))
    )
    kinds: list[Any] = [keras.Model, DistributedModel]
    for kind in kinds:
        kind.fit = shortened(kind.fit, overlay, is_second, fits)


def shortened(
    original: Callable[..., Any], overlay: Overlay, is_second: bool, fits: list["LastCallback"]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        if fits and fits[-1].runs:  # A callback's own.
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fits.append(LastCallback(overlay, is_second, f"fit {len(fits) + 1}", bound.arguments))
        with fits[-1].in_place():
            return original(*bound.args, **bound.kwargs)

    return fit


class LastCallback(keras.callbacks.Callback):
    """Stands behind the user's callbacks, and tries what two steps do not show.

    Args:
        given: The arguments of `fit`, which become those of a short one.

    Attributes:
        runs: Whether this `fit` runs.
    """

    def __init__(
        self, overlay: Overlay, is_second: bool, where: str, given: dict[str, Any]
    ) -> None:
        super().__init__()
        self.runs = False
        self._overlay, self._is_second, self._where = overlay, is_second, where
        self._others: dict[str, keras.callbacks.Callback] = {}
        for each in single(given["callbacks"]):
            same = sum(type(other) is type(each) for other in self._others.values())
            self._others[type(each).__name__ + (f" {same + 1}" if same else "")] = each
        self._real = RealRun(
            given["x"],
            given["y"],
            steps_of(given),
            given["epochs"] - given["initial_epoch"],
            given["steps_per_epoch"] is None,
            self._others,
            {name: getattr(each, "save_freq", None) for name, each in self._others.items()},
            overlay,
        )
        self._broken: set[str] = set()
        given["callbacks"] = [*self._others.values(), self]
        given["epochs"] = given["initial_epoch"] + min(self._real.epochs, 1)
        given["steps_per_epoch"] = min(2, self._real.steps or 2)
        given["validation_freq"] = 1
        if given["validation_data"] is not None or given["validation_split"]:
            given["validation_steps"] = 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let callbacks save at each step, and go on after an error of one of them."""
        self.runs = True
        with contextlib.ExitStack() as undo:
            for name, each in self._others.items():
                for hook in HOOKS:
                    own = getattr(each, hook)
                    if getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook):
                        undo.enter_context(with_attribute(each, hook, self._reporting(name, own)))
                every = "every_steps" if isinstance(each, ResumableCheckpoint) else "save_freq"
                if every == "every_steps" or type(getattr(each, every, None)) is int:
                    undo.enter_context(with_attribute(each, every, 1))
                if not self._is_second and (folder := folder_to_resume(each)):
                    # With the checkpoint of a real run nothing might be left to train.
                    self._overlay.hide(folder)
            try:
                yield
            finally:
                self.runs = False

    def _reporting(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self._broken:
                return None
            before, self._overlay.by = self._overlay.by, name
            try:
                return hook(*args, **kwargs)
            except WorkerFailure:
                raise
            except Exception as error:
                self._broken.add(name)
                where = getattr(hook, "__name__", "a hook")
                text = f"{name}.{where}: {in_one_line(error)}"
                self._report("callbacks", "fails", text, to_install(error))
            finally:
                self._overlay.by = before

        return call

    def _report(self, *finding: str) -> None:
        self._overlay.notes.add("found", *Finding(self._where, *finding))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        found = [each for each in self._others.values() if folder_to_resume(each)]
        run = getattr(self.model, "training_run", None)
        if not found:
            text = "nothing to resume from: a kill loses all of this training"
            do = "Add `kmg.callbacks.ResumableCheckpoint(folder)`."
            self._report("kill and resume", "note", text, do)
        elif not self._is_second:
            # It saves when all callbacks have handled the step.
            if isinstance(found[0], ResumableCheckpoint) and run is not None:
                run.after_each("on_train_batch_end", self._kill)
        elif [self._where] in self._overlay.notes.read("killed"):
            if getattr(found[0], "resumed_from", self) is None:
                self._report("kill and resume", "fails", "the second start found no checkpoint")
            else:
                self._report("kill and resume", "ok", "kill -9 after a step, and the rest later")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._is_second and any(
            isinstance(each, keras.callbacks.BackupAndRestore) for each in self._others.values()
        ):
            self._kill()

    def _kill(self) -> None:
        run = getattr(self.model, "training_run", None)
        # The others wait for the chief, which has written.
        if run is None or run.group.is_chief:
            self._overlay.notes.add("killed", self._where)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        asked = {
            name: monitor
            for name, each in self._others.items()
            if isinstance(monitor := getattr(each, "monitor", None), str)
            # It monitors a loss by default, and looks at it only then.
            and getattr(each, "save_best_only", True)
        }
        for name, monitor in asked.items():
            if monitor not in logs:
                text = f"{name} looks for {monitor!r}, which never comes"
                self._report("metric names", "fails", text, f"Choose one of {', '.join(logs)}.")
        if asked and {*asked.values()} <= {*logs}:
            self._report("metric names", "ok", ", ".join({*asked.values()}))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        steps = "2 steps" if self._real.steps is None else f"2 of {self._real.steps:,} steps"
        self._report("training", "ok", f"{steps}, 1 of {self._real.epochs:,} epochs")
        if healthy := [name for name in self._others if name not in self._broken]:
            self._report("callbacks", "ok", ", ".join(healthy))
        for finding in try_all(self._real, self.model):
            self._report(*finding)


@contextlib.contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object, and not its class, have an attribute for a while."""
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def folder_to_resume(callback: keras.callbacks.Callback) -> Any:
    """Where a callback keeps what a killed training goes on from; None for others."""
    if isinstance(callback, ResumableCheckpoint):
        return callback.folder
    is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    return callback.backup_dir if is_backup else None


def steps_of(given: dict[str, Any]) -> int | None:
    """The steps of a whole epoch; None if nothing says how many."""
    x = given["x"]
    if given["steps_per_epoch"] is not None:
        return int(given["steps_per_epoch"])
    leaves = keras.tree.flatten(x)
    if all(getattr(leaf, "shape", None) for leaf in leaves):  # Arrays.
        examples = int(len(leaves[0]) * (1 - given["validation_split"]))
        return math.ceil(examples / (given["batch_size"] or 32))
    try:
        return len(x)
    except TypeError:
        return None
