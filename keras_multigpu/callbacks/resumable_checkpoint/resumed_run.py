"""Whether a checkpoint belongs to this run, and how the run resumes from it."""

import contextlib
import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded
from keras_multigpu.checks import shorten, type_error, value_error
from keras_multigpu.data.pipeline.loader import CORES
from keras_multigpu.identities import changes
from keras_multigpu.keras_internals.dataset_internals import UNSEEDED
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.variables.model_state import ModelState, identity_of_model, rates_of
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.writing import say, time_text

logger = logging.getLogger("keras_multigpu")

NEW_FOLDER = "Or choose another folder to start over."

PARTS = {"callbacks", "data", "made", "made_with", "model", "random", "rates", "run", "stopped"}
LEAST = {"epoch": 0, "step": 0, "micro_batches": 1, "compiled_micro_batches": 1}
SIZES = ("global_batch_size", "next_batch_size", "largest_share")
"""The parts of a checkpoint, and the numbers of its `run`; a size may be None."""

LARGEST = 2**40
"""The limit for counts of steps, epochs or examples."""

MAY_CHANGE = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")
"""The settings of an optimizer that may change when a run resumes, besides the learning rate."""

MOST_PIECES = 2**16
"""The largest number of micro-batches of a batch of unknown size."""

_left: WeakKeyDictionary[keras.optimizers.Optimizer, tuple[Any, Any]] = WeakKeyDictionary()
"""The rate that the last `fit` left in each optimizer, and the one that the user wrote."""


class Clock(NamedTuple):
    """When a run began, and how many seconds it has lost since, by the clock on the wall."""

    began: float = 0.0
    lost: float = 0.0


def clock_of(found: dict[str, Any] | None, epochs: int) -> Clock:
    """The clock of a run of so many epochs that begins, or resumes: then a line says its cost."""
    now, known = time.time(), (found or {}).get("clock")
    if found is None or not isinstance(known, dict) or known.keys() != {*Clock._fields, "saved"}:
        return Clock(now)
    # The clock on the wall may have been set back.
    is_odd = not all(isinstance(each, float) and 0 <= each <= now for each in known.values())
    if is_odd or found["stopped"] or found["run"]["epoch"] >= epochs:
        return Clock(now)
    began, earlier, lost = known["began"], known["lost"], now - known["saved"]
    before = f", {time_text(earlier)} in earlier restarts" if earlier else ""
    say(
        f"This run began {time_text(now - began)} ago, of which {time_text(earlier + lost)} were "
        f"lost: {time_text(lost)} from the last checkpoint to this start{before}."
    )
    return Clock(began, earlier + lost)


def encode(tree: Any) -> Encoded:
    """A state that is ready to be written; a `TypeError` if a callback's cannot be."""
    try:
        return Encoded(tree)
    except TypeError as cause:
        raise type_error(
            f"A callback's state cannot be saved: {cause}.",
            "Expected numbers, texts, None, NumPy arrays, and lists and dicts of them.",
            "Let the callback's `state` return such values.",
            callbacks=sorted(tree["callbacks"]),
        ) from cause


def list_versions() -> dict[str, Any]:
    """The versions and cores, which may change the last bits of a result."""
    return {
        "Keras": keras.version(),
        "TensorFlow": tf.__version__,
        "Python": platform.python_version(),
        "keras_multigpu": sys.modules["keras_multigpu"].__version__,
        # TensorFlow splits a sum among the threads that compute it.
        "cores": tf.config.threading.get_intra_op_parallelism_threads() or CORES,
    }


def report_other_versions(found: dict[str, Any], path: Path | str) -> None:
    """Log in one line that a checkpoint was saved with other versions, or on other cores."""
    then, now = found["made_with"], list_versions()
    changed = [name for name in now if name in then and then[name] != now[name]]
    if changed:
        before, after = (
            " and ".join(f"{all_[n]} {n}" if n == "cores" else f"{n} {all_[n]}" for n in changed)
            for all_ in (then, now)
        )
        text = "%s was saved with %s, this is %s: the last bits of the result may differ."
        logger.warning(text, path, before, after)


def require_run(found: Any, path: Path | str) -> None:
    """Raise a `ValueError` unless a tree is that of a run; it may come from anywhere."""
    if not isinstance(found, dict) or (missing := sorted(PARTS - found.keys())):
        raise not_a_run(path, f"it has no {missing[0] if isinstance(found, dict) else 'run'!r}")
    if not isinstance(run := found["run"], dict):
        raise not_a_run(path, f"its 'run' cannot be {shorten(run, 60)}")
    for name in (*LEAST, *SIZES):
        value, least = run.get(name), LEAST.get(name, 1)
        if value is None and name in SIZES:
            continue
        if type(value) is not int or not least <= value < LARGEST:
            raise not_a_run(path, f"its 'run.{name}' cannot be {shorten(value, 60)}")


@contextlib.contextmanager
def refusing(path: Path | str) -> Iterator[None]:
    """Name the checkpoint if what is in it cannot be used."""
    try:
        yield
    except Exception as error:  # Odd values may raise anything.
        if ". Expected " in str(error):
            raise
        raise not_a_run(path, f"{type(error).__name__}: {error}") from error


def not_a_run(path: Path | str, why: str) -> ValueError:
    return value_error(
        f"{path} is not the checkpoint of a run: {why}.",
        f"Expected {', '.join(sorted(PARTS))}, as training writes them.",
        f"Check where it comes from and remove it. {NEW_FOLDER}",
        file=str(path),
    )


def resume(run: TrainingRun, found: dict[str, Any], path: Path | str) -> None:
    """Resume a run where a checkpoint was saved."""
    state = found["run"]
    reads = run.feed.source.anchor is None
    if found["stopped"] or state["epoch"] >= run.epochs:
        logger.warning("The run of %s is complete: no epoch is left to train.", path)
        # The model needs the form of the batches, which may have to be read from the first one.
        size = run.global_batch_size
        first: dict[str, Any] = {"epoch": 0, "step": int(reads), "anchor": None, "logs": {}}
        run.restore({**state, **first, "global_batch_size": size})
        run.epoch, run.step = run.epochs, 0
        return
    place = f"epoch {state['epoch'] + 1}, after step {state['step']}"
    logger.info("Resuming in %s, from %s.", place, path)
    if reads and run.group.is_chief and (state["epoch"] or state["step"]):
        logger.warning(
            "To resume in %s, the batches before it are read again. Data from "
            "`keras_multigpu.data` start there directly.",
            place,
        )
    run.restore(state)


def identity_of_data(run: TrainingRun) -> dict[str, Any]:
    """What must not change, so that a position in the data still means the same."""
    return {
        "kind": type(run.data).__name__,
        "examples": run.feed.source.num_examples,
        "global_batch_size": run.global_batch_size,
        "steps_per_epoch": run.steps_per_epoch,
        "data": run.feed.identity(),
    }


def warn_of_unseeded_shuffle(identity: Any) -> None:
    if isinstance(identity, list) and identity[:2] == UNSEEDED:
        logger.warning(
            "The dataset shuffles without a seed, so a resumed run sees different examples than it "
            "would have. Write `shuffle(..., seed=1)`."
        )
    elif isinstance(identity, (list, dict)):
        for part in identity.values() if isinstance(identity, dict) else identity:
            warn_of_unseeded_shuffle(part)


def refuse_other_data(now: dict[str, Any], found: dict[str, Any], path: Path | str) -> None:
    changed = changes(found["data"], now)
    if not changed:
        return
    fix = "Use the same data as before."
    if "global_batch_size" in changed and now["kind"] == "Batches":
        fix = (
            "To change the number of replicas, use `global_batch_size=` instead of "
            "`replica_batch_size=`."
        )
    raise value_error(
        f"The data have changed since {path} was saved: {describe_changes(changed)}.",
        "Expected the same examples in the same batches.",
        f"{fix} {NEW_FOLDER}",
        changes=len(changed),
    )


def describe_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    phrases = []
    for place, (then, now) in list(changed.items())[:3]:
        phrases.append(f"{place} was {shorten(then, 60)} and is {shorten(now, 60)}")
    return "; ".join([*phrases, *(["..."] if len(changed) > 3 else [])])


def require_position(run: TrainingRun, state: dict[str, Any], path: Path | str) -> None:
    """Raise a `ValueError` unless this run can continue from a state."""
    size, examples = state["global_batch_size"], run.feed.source.num_examples
    ends = size and examples is not None and state["step"] * size >= examples + size
    most = max(size or MOST_PIECES, run.micro_batches)
    for name, is_odd in (("step", ends), ("micro_batches", state["micro_batches"] > most)):
        if is_odd:
            raise not_a_run(path, f"its 'run.{name}' cannot be {state[name]}")
    if run.epoch > state["epoch"]:
        raise value_error(
            f"`fit` would begin with an epoch after that of {path}.",
            f"Expected `initial_epoch` to be at most {state['epoch']}.",
            f"Leave it out: the checkpoint knows where to resume. {NEW_FOLDER}",
            initial_epoch=run.epoch,
        )


def refuse_other_model(
    model: keras.Model, rates: list[Any], found: dict[str, Any], path: Path | str
) -> None:
    """Raise a `ValueError` if a checkpoint is of another model; log changes that are allowed."""
    changed = changes(found["made"], identity_of_model(model))
    refused = {
        place: pair
        for place, pair in changed.items()
        if not (place.startswith("optimizers[") and place.rpartition(".")[2] in MAY_CHANGE)
    }
    differences = ModelState(found["model"]).differences(model)
    if refused or differences:
        what = describe_changes(refused) or "; ".join(differences[:3])
        raise value_error(
            f"{path} is of another model: {what}.",
            "Expected the same layers, optimizer, loss and metrics; of an optimizer "
            f"the rate and {', '.join(f'`{name}`' for name in MAY_CHANGE)} may change.",
            f"Build and compile the model as it was. {NEW_FOLDER}",
            differences=len(refused or differences),
        )
    if len(found["rates"]) != len(rates):
        raise not_a_run(path, "its 'rates' are not those of its optimizers")
    for number, pair in enumerate(zip(found["rates"], rates, strict=True)):
        changed |= changes(*pair, f"optimizers[{number}].learning_rate")
    if changed:
        text = describe_changes(changed)
        if len(rates) == 1:
            text = text.replace("optimizers[0].", "its ")
        text = (
            f"Since {path} was saved, the optimizer has changed: {text}. The new values are used."
        )
        logger.warning("%s", text)


def written_rates(model: keras.Model) -> list[Any]:
    """The learning rates that the user wrote, rather than those that a `fit` left."""
    known = [_left.get(part, (None, None)) for part in optimizers_of(model)]
    return [
        written if rate == left else rate
        for rate, (left, written) in zip(rates_of(model), known, strict=True)
    ]


def remember_rates(model: keras.Model, written: list[Any]) -> None:
    """Remember the rates that this `fit` leaves, so that they are not mistaken for the user's."""
    rates = zip(rates_of(model), written, strict=True)
    _left.update(zip(optimizers_of(model), rates, strict=True))


def apply_rates(model: keras.Model, now: list[Any], then: list[Any]) -> None:
    """Set the learning rates that the user changed since; others stay as callbacks left them."""
    for optimizer, new, old in zip(optimizers_of(model), now, then, strict=True):
        # A new schedule is already in the optimizer.
        if new != old and isinstance(new, float):
            optimizer.learning_rate = new


def refuse_backups(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise value_error(
                "A `BackupAndRestore` came with `ResumableCheckpoint`.",
                "Expected one callback that decides where training resumes.",
                callbacks=[type(callback).__name__ for callback in callbacks],
            )
