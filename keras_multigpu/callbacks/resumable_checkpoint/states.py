"""Saves and restores the state of callbacks.

The attributes of Keras's callbacks are listed here. Any other callback takes part if it has a
`state`, a dict that can be read and set, as every `RunCallback` has.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import callback_internals

logger = logging.getLogger("keras_multigpu")

PUBLIC: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
}
"""The public attributes that are the state of Keras's callbacks."""

Callbacks = Sequence[keras.callbacks.Callback]


def states_of(callbacks: Callbacks) -> dict[str, dict[str, Any]]:
    """The state of each callback that has one, by the names of `name_callbacks`."""
    states = {name: state_of(callback) for name, callback in name_callbacks(callbacks)}
    return {name: state for name, state in states.items() if state}


def restore_states(callbacks: Callbacks, states: dict[str, dict[str, Any]]) -> None:
    """Restore the states of callbacks; those without one stay as they are."""
    for name, callback in name_callbacks(callbacks):
        if name in states:
            restore_state(name, callback, states[name])


def report_changes(callbacks: Callbacks, states: dict[str, dict[str, Any]]) -> None:
    """Log which callbacks were added or removed since the states were saved."""
    present = states_of(callbacks).keys()
    for name in sorted(present - states.keys()):
        logger.warning("%s is new since the checkpoint was saved, and starts over.", name)
    # All names count, because a callback may have no state before it begins.
    for name in sorted(states.keys() - {name for name, _ in name_callbacks(callbacks)}):
        logger.warning("%s is in the checkpoint, but not among the callbacks.", name)


def counters_of(callbacks: Callbacks) -> dict[str, dict[str, Any]]:
    """What Keras's callbacks count from batch to batch, by the names of `name_callbacks`."""
    found = {
        name: callback_internals.counters_of(callback)
        for name, callback in name_callbacks(callbacks)
    }
    return {name: counters for name, counters in found.items() if counters}


def name_callbacks(callbacks: Callbacks) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Callbacks with names, from class and number within it, that stay the same in another run."""
    # Positions would shift if one is added or removed.
    counted: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        counted[kind] += 1
        yield (kind if counted[kind] == 1 else f"{kind} {counted[kind]}"), callback


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    names = [name for name in public_names(callback) if hasattr(callback, name)]
    own = getattr(callback, "state", None) if takes_state(callback) else None
    parts: dict[str, Any] = {
        "public": {name: copy_value(getattr(callback, name)) for name in names},
        "counters": callback_internals.counters_of(callback),
        "knows_direction": callback_internals.knows_direction(callback),
        "file": csv_state(callback) if isinstance(callback, keras.callbacks.CSVLogger) else {},
        "own": copy_value(own),
    }
    return {name: part for name, part in parts.items() if part}


def public_names(callback: keras.callbacks.Callback) -> list[str]:
    return [name for owner in PUBLIC if isinstance(callback, owner) for name in PUBLIC[owner]]


def takes_state(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has a `state` that is a dict and can be set; Keras's own have none."""
    declared = getattr(type(callback), "state", None)
    is_fixed = isinstance(declared, property) and declared.fset is None
    of_keras = type(callback).__module__.startswith("keras.")
    return not is_fixed and not of_keras and isinstance(getattr(callback, "state", {}), dict)


def restore_state(name: str, callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    # Only attributes that this package saves, because a file may name any.
    public = state.get("public", {})
    for attribute in public_names(callback):
        if attribute in public:
            setattr(callback, attribute, copy_value(public[attribute]))
    callback_internals.set_counters(callback, state.get("counters", {}))
    if state.get("knows_direction"):
        callback_internals.find_direction(callback)
    if "file" in state and isinstance(callback, keras.callbacks.CSVLogger):
        restore_csv(callback, state["file"])
    if "own" not in state or not takes_state(callback):
        return
    try:
        callback.state = copy_value(state["own"])
    except Exception as error:  # The callback's own code may raise anything.
        raise value_error(
            f"{name} rejects its state: {type(error).__name__}: {error}.",
            "Expected a `state` that can be set to what it returned.",
            "Let it accept what it returned when the checkpoint was saved, or choose another "
            "folder to start over.",
            callback=name,
        ) from error


def copy_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(copy_value(item) for item in value)
    return value


def csv_state(writer: keras.callbacks.CSVLogger) -> dict[str, Any]:
    """The text of the file so far, because a new process would overwrite it or append to it."""
    path = Path(writer.filename)
    if writer.csv_file is None or writer.csv_file.closed or not path.is_file():
        return {}
    writer.csv_file.flush()
    with path.open(newline="") as file:
        return {"text": file.read(), "keys": copy_value(writer.keys)}


def restore_csv(writer: keras.callbacks.CSVLogger, state: dict[str, Any]) -> None:
    """Restore the text of the file, so that the next row follows it."""
    "".join([state["text"], *(state["keys"] or ())])  # Raises unless they are texts.
    writer.csv_file.seek(0)
    writer.csv_file.truncate()
    writer.csv_file.write(state["text"])
    writer.csv_file.flush()
    writer.keys = copy_value(state["keys"])
    writer.writer = None
    writer.append_header = not state["text"]
