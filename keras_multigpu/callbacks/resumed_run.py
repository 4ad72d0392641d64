"""Whether a checkpoint belongs to this run, and how the run goes on with it."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.checkpoint_format import Encoded
from keras_multigpu.checks import problem
from keras_multigpu.data.batches import Batches
from keras_multigpu.training.model_state import ModelState
from keras_multigpu.training.run import TrainingRun

_log = logging.getLogger("keras_multigpu")

NEW_FOLDER = "Or choose another folder to begin anew."


def encoded(tree: Any) -> Encoded:
    """A state, ready to be written; the error of one that cannot be."""
    try:
        return Encoded(tree)
    except TypeError as cause:
        raise TypeError(
            problem(
                f"A callback's state cannot be saved: {cause}.",
                "Expected numbers, texts, None, NumPy arrays, and lists and dicts of them.",
                "Let the callback's `state` return such values.",
                callbacks=sorted(tree["callbacks"]),
            )
        ) from cause


def go_on(run: TrainingRun, found: dict[str, Any], path: Path) -> None:
    """Let a run go on where a checkpoint was saved."""
    state = found["run"]
    if found["stopped"] or state["epoch"] >= run.epochs:
        _log.warning("%s is of a run that has ended: no epoch is trained.", path)
        # One batch, where only batches tell of what kind they are; none of them is trained on.
        first = {**state, "epoch": 0, "step": int(run.skips_by_reading), "anchor": None, "logs": {}}
        run.restore({**first, "global_batch_size": run.global_batch_size})
        run.epoch, run.step = run.epochs, 0
        return
    place = f"epoch {state['epoch'] + 1}, after step {state['step']}"
    _log.info("Going on in %s, from %s.", place, path)
    if run.skips_by_reading and (state["epoch"] or state["step"]):
        _log.warning(
            "To go on in %s, the batches before it are read again. "
            "Data from `keras_multigpu.data` begin there at once.",
            place,
        )
    run.restore(state)


def description_of(run: TrainingRun) -> dict[str, Any]:
    """What has to be the same for the data to be the same."""
    data = run.data
    described = {
        "kind": type(data).__name__,
        "global_batch_size": run.global_batch_size,
        "steps_per_epoch": run.steps_per_epoch,
        "examples": len(data) if isinstance(data, np.ndarray) else None,
        "settings": None,
    }
    if isinstance(data, Batches):
        # Without the source's name: data may have moved. A cache changes no example.
        _, _, settings = repr(data).removesuffix(")").partition(", ")
        settings = re.sub(r", cache=('[^']*'|\w+\('[^']*'\))", "", settings)
        described["examples"] = data.num_examples
        described["settings"] = re.sub(r" at 0x[0-9a-f]+", "", settings)
    return described


def refuse_other_data(now: dict[str, Any], then: dict[str, Any], path: Path) -> None:
    """Raise a `ValueError` where a position in the data would mean something else."""
    changed = [name for name in now if now[name] != then[name]]
    if not changed:
        return
    fix = "Use the data of the run, as they were."
    if "global_batch_size" in changed and now["kind"] == "Batches":
        fix = (
            "With another number of replicas say `global_batch_size=` in place of "
            "`replica_batch_size=`."
        )
    raise ValueError(
        problem(
            f"The data have changed since {path} was saved: "
            + "; ".join(f"{name} was {then[name]!r}" for name in changed)
            + ".",
            "Expected the same examples in the same batches.",
            f"{fix} {NEW_FOLDER}",
            **{name: now[name] for name in changed},
        )
    )


def refuse_later_start(run: TrainingRun, state: dict[str, Any], path: Path) -> None:
    """Raise a `ValueError` where `initial_epoch` lies behind the checkpoint."""
    if run.epoch > state["epoch"]:
        raise ValueError(
            problem(
                f"`fit` is to begin with an epoch that comes after the one of {path}.",
                f"Expected `initial_epoch` to be at most {state['epoch']}.",
                f"Leave it out: the checkpoint knows where to go on. {NEW_FOLDER}",
                initial_epoch=run.epoch,
            )
        )


def refuse_other_model(model: keras.Model, values: dict[str, np.ndarray], path: Path) -> None:
    """Raise a `ValueError` where a checkpoint is that of another model; nothing is changed."""
    differences = ModelState(values).differences(model)
    if differences:
        raise ValueError(
            problem(
                f"{path} is of another model: {'; '.join(differences[:3])}.",
                "Expected the same layers, optimizer, loss and metrics.",
                f"Build and compile the model as it was. {NEW_FOLDER}",
                differences=len(differences),
            )
        )


def refuse_others(own: keras.callbacks.Callback, callbacks: Sequence[Any]) -> None:
    """Raise a `ValueError` where a second callback wants to decide where training goes on."""
    for callback in callbacks:
        second = isinstance(callback, type(own)) and callback is not own
        if second or isinstance(callback, keras.callbacks.BackupAndRestore):
            name = type(callback).__name__
            raise ValueError(
                problem(
                    f"{'A second' if second else 'A'} `{name}` came with `ResumableCheckpoint`.",
                    "Expected one callback that decides where training goes on.",
                    "Leave the other one out.",
                    callbacks=[type(callback).__name__ for callback in callbacks],
                )
            )
