"""The texts below the images of a gallery: drawn parameters, labels and arguments."""

import inspect
import numbers
from typing import Any

import keras
import numpy as np

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.sequence import Sequence

# How many numbers of one parameter are written, as of a box; a matrix would say little.
LONGEST = 4

OTHER_AXIS = {"height": "width", "width": "height", "x": "y", "y": "x"}
"""How the names of parameters begin that belong to one of two axes."""

# The largest integer that is written; those that are larger are seeds.
LARGEST = 100_000

MOST_LABELS = 3
"""How many classes of a mixed label are written."""


def drawn_texts(layer: AugmentationLayer, draws: list[Any]) -> list[list[str]]:
    """For each augmentation what was drawn, as lines: a `Sequence` has one for each step."""
    if not isinstance(layer, Sequence):
        return [[text] if text else [] for text in parameter_texts(layer, draws)]
    if len(layer.steps()) == 1:
        ((name, step),) = layer.steps()
        return drawn_texts(step, [drawn[name] for drawn in draws])
    lines: list[list[str]] = [[] for _ in draws]
    for name, step in layer.steps():
        texts = parameter_texts(step, [drawn[name] for drawn in draws])
        for place, text in enumerate(texts):
            lines[place].append(f"{step.title}: {text}" if text else step.title)
    return lines


def parameter_texts(layer: AugmentationLayer, draws: list[Any]) -> list[str]:
    """For each augmentation, what was drawn, in one line."""
    described = getattr(layer, "drawn_text", None)
    if described is not None:
        return [described(drawn) for drawn in draws]
    flat = [with_axes_joined(flattened(drawn)) for drawn in draws]
    names = [name for name in flat[0] if is_telling([drawn[name] for drawn in flat])]
    return [
        ", ".join(text for name in names if (text := parameter_text(name, drawn[name])))
        for drawn in flat
    ]


def flattened(drawn: Any) -> dict[str, np.ndarray]:
    """What was drawn by name, without dictionaries in dictionaries."""
    found: dict[str, np.ndarray] = {}
    for name, value in drawn.items():
        if isinstance(value, dict):
            found.update(flattened(value))
        else:
            found[name] = np.asarray(value)
    return found


def with_axes_joined(drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What was drawn, where `height_zoom` and `width_zoom` are one number if they are equal."""
    joined: dict[str, np.ndarray] = {}
    for name, value in drawn.items():
        axis, _, what = name.partition("_")
        other = f"{OTHER_AXIS.get(axis)}_{what}"
        if other not in drawn:
            joined[name] = value
        elif what not in joined:
            first, second = sorted((name, other))
            same = np.array_equal(value, drawn[other])
            joined[what] = value if same else np.stack([drawn[first], drawn[second]])
    return joined


def is_telling(values: list[np.ndarray]) -> bool:
    """Whether a parameter is short, not a seed, and differs between augmentations."""
    if any(value.size > LONGEST or is_seed(value) for value in values):
        return False
    return any(not np.array_equal(value, values[0]) for value in values)


def is_seed(value: np.ndarray) -> bool:
    """Whether integers are too large to be counts or places in an image."""
    return value.dtype.kind in "iu" and bool((np.abs(value.astype(np.int64)) > LARGEST).any())


def parameter_text(name: str, value: np.ndarray) -> str:
    """A parameter's name and value, such as `angle -12`; nothing for what did not happen."""
    words = name.replace("_", " ")
    if value.dtype == bool and value.size == 1:
        return words if value.all() else ""
    if value.size > 1 and not value.any():
        return ""
    return f"{words} {' '.join(number_text(one) for one in value.ravel())}"


def number_text(value: Any) -> str:
    if isinstance(value, bytes | str):
        return value.decode() if isinstance(value, bytes) else value
    if np.issubdtype(np.asarray(value).dtype, np.floating):
        digits = 2 if abs(value) < 0.995 else 1 if abs(value) < 9.95 else 0
        text = f"{value:.{digits}f}"
        return "0" if float(text) == 0 else text
    return str(value)


def label_text(label: np.ndarray) -> str:
    """A label; of a mixed one its largest parts."""
    if label.ndim != 1 or not np.issubdtype(label.dtype, np.floating) or label.size < 2:
        return f"label {' '.join(map(str, label.ravel()[:LONGEST]))}"
    order = np.argsort(-label, kind="stable")[:MOST_LABELS]
    shares = [f"{label[place]:.0%} {place}" for place in order if label[place] >= 0.005]
    return f"label {' + '.join(shares)}"


def argument_texts(layer: AugmentationLayer) -> list[str]:
    """A layer's arguments, or those of a `Sequence`'s layers, that are not the defaults."""
    if isinstance(layer, Sequence):
        steps = (step for _, step in layer.steps())
        return [f"{step.title}({', '.join(argument_texts(step))})" for step in steps]
    # Of a layer of another package the arguments there, not those of the adapter.
    wrapped = getattr(layer, "wrapped", None)
    own = wrapped if isinstance(wrapped, keras.Layer) else layer
    config = own.get_config()
    return [
        f"{name}={value_text(config[name])}"
        for name, parameter in inspect.signature(type(own)).parameters.items()
        if name in config
        and is_plain(config[name])
        and plain(config[name]) != plain(parameter.default)
        and name not in ("seed", "name", "dtype", "data_format")
    ]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a list of such, and no object that prints badly."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | numbers.Number)


def plain(value: Any) -> Any:
    """A value in a form in which lists equal tuples."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(value_text, value))})"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
