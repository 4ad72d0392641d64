"""Short texts of targets, for pictures."""

from typing import Any

import keras
import numpy as np

from keras_multigpu.checks import printable

MOST_NUMBERS = 4
"""How many numbers of a target are written."""


def label_texts(y: Any, count: int, class_names: list[str] | None) -> list[str]:
    """A short text of each example's target, which may be a structure, or missing."""
    texts: list[list[str]] = [[] for _ in range(count)]
    for path, leaf in keras.tree.flatten_with_path(y):
        if leaf is None:
            continue
        prefix = f"{path[-1]}: " if path else ""
        values = np.asarray(leaf)
        for number in range(count):
            texts[number].append(prefix + target_text(values[number, ...], class_names))
    return [printable(", ".join(parts)) for parts in texts]


def target_text(value: np.ndarray, class_names: list[str] | None) -> str:
    """A short text of a class, of a vector of 0 and 1 for classes, of numbers, or of an image."""
    if value.dtype == object:
        return value.item().decode(errors="replace") if value.ndim == 0 else "texts"
    if value.ndim > 1:
        return "x".join(str(size) for size in value.shape)
    if value.size == 1:
        return scalar_text(value.reshape(()).item(), class_names)
    if np.isin(value, (0, 1)).all():
        chosen = np.flatnonzero(value).tolist()
        return ", ".join(class_text(number, class_names) for number in chosen) or "-"
    if class_names is not None and len(class_names) == len(value):
        return class_text(int(value.argmax()), class_names)
    numbers = ", ".join(f"{number:.3g}" for number in value[:MOST_NUMBERS].tolist())
    return numbers + (", ..." if value.size > MOST_NUMBERS else "")


def scalar_text(value: Any, class_names: list[str] | None) -> str:
    """A short text of one number: of its class, if it is one."""
    if isinstance(value, float) and not (class_names and value.is_integer()):
        return f"{value:.4g}"
    return class_text(int(value), class_names)


def class_text(number: int, class_names: list[str] | None) -> str:
    return class_names[number] if class_names and 0 <= number < len(class_names) else str(number)
