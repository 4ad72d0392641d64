"""The texts of a gallery: the parameters that were drawn, and a layer's arguments."""

import inspect
import numbers
from typing import Any

import keras
import numpy as np

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.sequence import Sequence

# How many numbers of one parameter are written, as of a box; a matrix would say little.
LONGEST = 4

# The largest integer that is written; those that are larger are seeds.
LARGEST = 100_000


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
    flat = [flattened(drawn) for drawn in draws]
    names = [name for name in flat[0] if is_telling([drawn[name] for drawn in flat])]
    return [
        ", ".join(text for name in names if (text := parameter_text(name, drawn[name])))
        for drawn in flat
    ]


def flattened(drawn: dict[str, Any]) -> dict[str, np.ndarray]:
    """What was drawn by name, without dictionaries in dictionaries."""
    found: dict[str, np.ndarray] = {}
    for name, value in drawn.items():
        found |= flattened(value) if isinstance(value, dict) else {name: value}
    return found


def is_telling(values: list[np.ndarray]) -> bool:
    """Whether a parameter is short, not a seed, and differs between augmentations."""
    is_whole = values[0].dtype.kind in "iu"
    if values[0].size > LONGEST or (is_whole and np.abs(values).max() > LARGEST):
        return False
    return any(not np.array_equal(value, values[0]) for value in values)


def parameter_text(name: str, value: np.ndarray) -> str:
    """A parameter's name and value, such as `angle -12`; nothing for what did not happen."""
    words = name.replace("_", " ")
    if value.dtype == bool and value.size == 1:
        return words if value.all() else ""
    if value.size > 1 and not value.any():
        return ""
    return f"{words} {' '.join(f'{round(number, 2):g}' for number in value.ravel().tolist())}"


def argument_texts(layer: AugmentationLayer) -> list[str]:
    """A layer's arguments, or those of a `Sequence`'s layers, that are not the defaults."""
    if isinstance(layer, Sequence):
        steps = (step for _, step in layer.steps())
        return [f"{step.title}({', '.join(argument_texts(step))})" for step in steps]
    # Of a layer of another package the arguments there, not those of the adapter.
    wrapped = getattr(layer, "wrapped", None)
    own = wrapped if isinstance(wrapped, keras.Layer) else layer
    config = keras.tree.lists_to_tuples(own.get_config())
    texts = []
    for name, parameter in inspect.signature(type(own)).parameters.items():
        value = config.get(name)
        is_plain = isinstance(value, str | numbers.Number | tuple)
        if not is_plain or name in ("seed", "name", "dtype", "data_format"):
            continue
        if value != keras.tree.lists_to_tuples(parameter.default):
            texts.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value!r}")
    return texts
