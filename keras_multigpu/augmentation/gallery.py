"""`gallery`: a picture of what layers do to an image."""

import inspect
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_seed
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.sequence import Sequence, as_layer
from keras_multigpu.checks import value_error
from keras_multigpu.image_grid import (
    Block,
    Cell,
    boxes_of,
    grid_of,
    scaled,
    target_text,
    value_range,
)
from keras_multigpu.pictures import checked_png, finished
from keras_multigpu.seeded_layers import folded

# The number of augmentations of a single layer, four in a row, and of each of several layers.
ALONE = 12
TOGETHER = 5

# The number of images taken of a batch: one to augment, and a partner for each augmentation.
MOST_IMAGES = 1 + ALONE

# Parameters with more numbers, such as matrices, are left out; a box has four.
LONGEST = 4

# Larger integers are seeds, which are left out.
LARGEST = 100_000


def gallery(layers: Any, images: Any, path: str | Path | None = None, *, seed: int = 0) -> Any:
    """Draw an image and many augmentations of it, each with the parameters that were drawn.

    One layer is drawn twelve times. Several layers get a row of five each. Parameters that are
    the same in all augmentations of a layer are left out.

    Args:
        layers: A layer or function, a list of them, or a dictionary of them by title.
        images: An image; or a batch, whose first image is augmented, and mixed with the others by
            layers that mix; or a dictionary of either and its targets, as layers take it. Boxes and
            masks are drawn into the images, and labels below.
        path: The file to write, which ends in `.png`; None for none.
        seed: Decides the parameters.

    Returns:
        A matplotlib figure, which a notebook shows.

    Raises:
        ImportError: matplotlib is missing: `pip install matplotlib`.
    """
    path = None if path is None else checked_png(path)
    require_seed(seed)
    titled, data = titled_layers(layers), batch_of(images)
    count, columns = (ALONE, 4) if len(titled) == 1 else (TOGETHER, TOGETHER)
    blocks = [block(title, layer, data, seed, count) for title, layer in titled.items()]
    return finished(grid_of(blocks, columns), path)


def titled_layers(layers: Any) -> dict[str, AugmentationLayer]:
    """The layers by title."""
    if isinstance(layers, Mapping):
        titled = {str(title): as_layer(layer) for title, layer in layers.items()}
    elif isinstance(layers, list | tuple):
        titled = {}
        for layer in map(as_layer, layers):
            number = sum(other.title == layer.title for other in titled.values())
            titled[layer.title + (f" {number + 1}" if number else "")] = layer
    else:
        layer = as_layer(layers)
        titled = {layer.title: layer}
    if not titled:
        raise value_error(
            "`layers` is empty.",
            "Expected at least one layer.",
            "Pass a layer, a list of layers, or a dictionary of layers by title.",
            layers=layers,
        )
    return titled


def batch_of(images: Any) -> dict[str, Any]:
    """Turn the argument `images` into a dictionary of a batch with no more images than needed."""
    data = dict(images) if isinstance(images, Mapping) else {"images": images}
    shape = np.shape(data["images"]) if "images" in data else ()
    if len(shape) not in (3, 4) or 0 in shape:
        raise value_error(
            "There is no image to draw.",
            "Expected `(height, width, channels)`, a batch `(count, height, width, channels)`, "
            "or a dictionary with such `images`.",
            "Add a channel axis to images without one.",
            shape=shape,
        )
    arrays = keras.tree.map_structure(np.asarray, data)
    return keras.tree.map_structure(
        lambda leaf: leaf[None] if len(shape) == 3 else leaf[:MOST_IMAGES], arrays
    )


def block(
    title: str, layer: AugmentationLayer, data: dict[str, Any], seed: int, count: int
) -> Block:
    """Augment the first image of a batch; return it and the results, with their draws."""
    values = own_value_range(layer) or value_range(data["images"])
    changed, drawn = augmented(layer, data, seed, count)
    original, *cells = (
        cell(example, values, layer.bounding_box_format, texts)
        for example, texts in zip(
            [row_of(data, 0), *changed], [["original"], *drawn_texts(layer, drawn)], strict=True
        )
    )
    return Block(title, [", ".join(argument_texts(layer))], cells, original)


def augmented(
    layer: AugmentationLayer, data: dict[str, Any], seed: int, count: int
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Augment a batch's first image `count` times; return the results and their draws."""
    images = data["images"]
    # Layers that mix use neighbours: every other row is another image, if there are several.
    rows = np.zeros((count, 2), int)
    rows[:, 1] = (1 + np.arange(count) % max(len(images) - 1, 1)) % len(images)
    pairs = keras.tree.map_structure(lambda leaf: leaf[rows.ravel()], data)
    seeds = tf.fill((2 * count, 2), tf.constant(seed % 2**31, tf.int32))
    drawn = layer.draw(folded(seeds, tf.range(2 * count)[:, None]), images.shape[1:])
    # As in a pipeline, where Keras's layers, too, draw for each image.
    changed = layer.apply(pairs, drawn, on_host=True)
    first = range(0, 2 * count, 2)
    return [row_of(changed, row) for row in first], [row_of(drawn, row) for row in first]


def row_of(data: Any, row: int) -> Any:
    """One example of a batch, or its draws, as arrays."""
    return keras.tree.map_structure(lambda leaf: np.asarray(leaf[row]), data)


def own_value_range(layer: AugmentationLayer) -> tuple[float, float] | None:
    """The values of black and white, if a layer or one of a `Sequence` knows them."""
    if isinstance(layer, Sequence):
        ranges = [own_value_range(step) for _, step in layer.steps()]
        return next((one for one in ranges if one is not None), None)
    return getattr(layer, "value_range", None)


def cell(
    example: dict[str, Any], values: tuple[float, float], box_format: str | None, texts: list[str]
) -> Cell:
    labels = [f"label {target_text(example['labels'])}"] if "labels" in example else []
    mask = example.get("segmentation_masks")
    if isinstance(mask, np.ndarray) and mask.ndim == 3:
        mask = mask[..., 0]
    made = Cell(scaled(example["images"], values), [*texts, *labels], mask=mask)
    boxes = example.get("bounding_boxes")
    if boxes is None or box_format is None:
        return made
    classes = boxes.get("labels", boxes.get("classes"))
    return made._replace(
        boxes=boxes_of(boxes["boxes"], classes, box_format, example["images"].shape)
    )


def drawn_texts(layer: AugmentationLayer, draws: list[Any]) -> list[list[str]]:
    """Describe the draws of each augmentation in lines, one for each step of a `Sequence`."""
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
    """Describe the draws of each augmentation in one line."""
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
    """Draws by name, without nested dictionaries."""
    found: dict[str, np.ndarray] = {}
    for name, value in drawn.items():
        found |= flattened(value) if isinstance(value, dict) else {name: value}
    return found


def is_telling(values: list[np.ndarray]) -> bool:
    """Whether a parameter is short, is not a seed, and differs between augmentations."""
    is_whole = values[0].dtype.kind in "iu"
    if values[0].size > LONGEST or (is_whole and np.abs(values).max() > LARGEST):
        return False
    return any(not np.array_equal(value, values[0]) for value in values)


def parameter_text(name: str, value: np.ndarray) -> str:
    """A parameter's name and value, such as `angle -12`; empty for what did not happen."""
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
    # For a wrapped layer of another package, that layer's arguments.
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
