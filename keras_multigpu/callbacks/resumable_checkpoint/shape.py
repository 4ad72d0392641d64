"""Checks the shape of a checkpoint's tree before anything of it is used.

A checkpoint may come from anywhere, and its format allows plain values and arrays in any structure.
"""

import random
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.checks import shortened, value_error

NEW_FOLDER = "Or choose another folder to start over."

LARGEST = 2**40
"""The limit for counts of steps, epochs or examples."""

Shape = Callable[[Any], bool] | Mapping[str, "Shape"]
"""What a value must satisfy: a function, or the shapes of a dict's entries."""


class Partial(dict[str, Shape]):
    """The shapes of entries that may be missing."""


def require_run(found: Any, path: Path) -> None:
    """Raise a `ValueError` unless a tree is that of a run."""
    missing = sorted(PARTS.keys() - found.keys()) if isinstance(found, dict) else ["run"]
    if missing:
        raise not_a_run(path, f"it has no {missing[0]!r}")
    for name, shape in PARTS.items():
        if misfit := find_misfit(name, found[name], shape):
            place, value = misfit
            raise not_a_run(path, f"its {place!r} cannot be {shortened(value, 60)}")


def not_a_run(path: Path, why: str) -> ValueError:
    return value_error(
        f"{path} is not the checkpoint of a run: {why}.",
        f"Expected {', '.join(sorted(PARTS))}, as training writes them.",
        f"Check where it comes from and remove it. {NEW_FOLDER}",
        file=str(path),
    )


def find_misfit(name: str, value: Any, shape: Shape) -> tuple[str, Any] | None:
    """The name and the value of the innermost entry that does not fit; None if all do."""
    if not isinstance(shape, Mapping):
        return None if shape(value) else (name, value)
    if not is_dict(value):
        return name, value
    for key, inner in shape.items():
        if key in value or not isinstance(shape, Partial):
            if misfit := find_misfit(f"{name}.{key}", value.get(key), inner):
                return misfit
    return None


Fits = Callable[[Any], bool]


def is_a(*kinds: type) -> Fits:
    return lambda value: isinstance(value, kinds)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def dict_of(shape: Shape) -> Fits:
    return lambda value: (
        is_dict(value) and not any(find_misfit("", item, shape) for item in value.values())
    )


def list_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def optional(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def whole_from(least: int) -> Fits:
    return lambda value: (
        isinstance(value, (int, np.integer))
        and not isinstance(value, bool)
        and least <= int(value) < LARGEST
    )


is_array, is_bool, is_text = is_a(np.ndarray), is_a(bool), is_a(str)
is_whole, is_count, is_size = map(whole_from, (1 - LARGEST, 0, 1))


def is_number(value: Any) -> bool:
    if isinstance(value, (int, np.integer)):
        return is_whole(value)
    return isinstance(value, Real) or is_array(value)


def is_score(value: Any) -> bool:
    return is_number(value) and np.ndim(value) == 0


def is_plain(value: Any) -> bool:
    """Whether JSON can represent a value."""
    if isinstance(value, dict):
        return is_dict(value) and all(map(is_plain, value.values()))
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def is_value(value: Any) -> bool:
    """Whether a variable, or its copies on replicas, can have this value."""
    if not isinstance(value, tuple):
        return is_array(value)
    kinds = {(part.shape, part.dtype) if is_array(part) else None for part in value}
    return len(kinds) == 1 and None not in kinds


def is_random(value: Any) -> bool:
    """Whether the generators of Python and NumPy can be set to it."""
    try:
        random.Random().setstate(value["python"])
        np.random.RandomState().set_state(value["numpy"])
    except Exception:  # They raise various kinds.
        return False
    return True


RUN: dict[str, Shape] = {
    "epoch": is_count,
    "step": is_count,
    "global_batch_size": optional(is_size),
    "micro_batches": is_size,
    "compiled_micro_batches": is_size,
    "anchor": optional(lambda value: list_of(is_count)(value) and len(value) == 3),
    "next_batch_size": optional(is_size),
    "largest_share": optional(is_size),
    "logs": dict_of(is_number),
}

ATTRIBUTES = Partial(
    best=optional(is_score),
    best_epoch=is_whole,
    best_weights=optional(list_of(is_array)),
    cooldown_counter=is_whole,
    epoch=list_of(is_whole),
    history=dict_of(is_a(list)),
    stopped_epoch=is_whole,
    wait=is_whole,
    _batches_seen_since_last_saving=is_whole,
    _current_epoch=is_whole,
    _ema_weights_in_model=is_bool,
    _global_test_batch=is_whole,
    _global_train_batch=is_whole,
    # None if it saves at the end of epochs.
    _last_batch_seen=optional(is_whole),
)
"""The attributes of Keras's callbacks, named in `states` and `callback_internals`."""

STATE = Partial(
    public=ATTRIBUTES,
    counters=ATTRIBUTES,
    knows_direction=is_bool,
    file={"text": is_text, "keys": optional(list_of(is_text))},
    own=is_a(dict),
)
"""The parts of a callback's state; others are not restored."""

PARTS: dict[str, Shape] = {
    "run": RUN,
    "stopped": is_bool,
    "model": dict_of(is_value),
    "made": lambda value: isinstance(value, dict) and is_plain(value),
    "made_with": dict_of(is_a(str, int)),
    "rates": lambda value: isinstance(value, list) and is_plain(value),
    "callbacks": dict_of(STATE),
    "random": is_random,
    "data": lambda value: isinstance(value, dict) and is_plain(value),
}
"""The parts of a checkpoint."""
