"""`gallery`: a picture of what layers do to an image."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_seed
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.gallery_texts import argument_texts, drawn_texts, label_text
from keras_multigpu.augmentation.sequence import Sequence, as_layer
from keras_multigpu.checks import value_error
from keras_multigpu.image_grid import (
    CELL,
    CHARACTERS,
    Cell,
    Row,
    grid_of,
    scaled,
    value_range,
    width_of,
)
from keras_multigpu.pictures import checked_png, finished
from keras_multigpu.seeded_layers import folded

ALONE = 12
"""How many augmentations are drawn of one layer."""

TOGETHER = 5
"""How many are drawn of each of several layers."""

MOST_IMAGES = 1 + ALONE
"""How many images of a batch are taken: one to augment, and one for each augmentation."""

COLUMNS = {1: 4, 2: 5}
"""How many augmentations a row has: of one layer, of each of several."""


class Block(NamedTuple):
    """What is drawn of one layer: name, arguments, the image as it was, the augmentations."""

    title: str
    arguments: list[str]
    original: Cell
    cells: list[Cell]


class Request(NamedTuple):
    """A batch, whose first image is augmented, what decides the draws, and black and white."""

    data: dict[str, Any]
    seed: int
    values: tuple[float, float]


def gallery(layers: Any, images: Any, path: str | Path | None = None, *, seed: int = 0) -> Any:
    """Draw an image and many augmentations of it, each with the parameters that were drawn.

    One layer is drawn twelve times. Several layers get a row of five each. Parameters that are
    the same in all augmentations of a layer are left out.

    Args:
        layers: A layer or function, a list of them, or a dictionary of them by title.
        images: An image; or a batch, of which the first image is augmented, and mixed with the
            others by layers that mix; or a dictionary of either and its targets, as layers take
            it. Boxes and masks are drawn into the images, labels are written below.
        path: The file to write, which ends in `.png`; None for none.
        seed: Integer; another one draws other parameters.

    Returns:
        A figure of matplotlib, which a notebook shows.

    Raises:
        ImportError: matplotlib is missing: `pip install matplotlib`.
    """
    path = None if path is None else checked_png(path)
    require_seed(seed)
    titled = titled_layers(layers)
    data = batch_of(images)
    request = Request(data, seed, value_range(data["images"]))
    count = ALONE if len(titled) == 1 else TOGETHER
    blocks = [block(title, layer, request, count) for title, layer in titled.items()]
    return finished(figure_of(blocks), path)


def figure_of(blocks: list[Block]) -> Any:
    columns = COLUMNS[min(len(blocks), 2)]
    return grid_of([row for block in blocks for row in rows_of(block, columns)])


def rows_of(block: Block, columns: int) -> list[Row]:
    """The rows of one layer: the original begins the first."""
    characters = int(width_of(columns + 1) / CELL * CHARACTERS)
    arguments = textwrap.wrap(", ".join(block.arguments), characters, max_lines=4)
    rows = []
    for begin in range(0, len(block.cells), columns):
        first = block.original if begin == 0 else None
        heading = [block.title, *arguments] if begin == 0 else []
        rows.append(Row([first, *block.cells[begin : begin + columns]], heading, apart=True))
    return rows


def titled_layers(layers: Any) -> dict[str, AugmentationLayer]:
    """The layers by title; a `ValueError` if there are none."""
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
    """What users pass as a dictionary of a batch, cut to as many images as are needed."""
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


def block(title: str, layer: AugmentationLayer, request: Request, count: int) -> Block:
    changed, drawn = augmented(layer, request, count)
    values = own_value_range(layer) or request.values
    texts = drawn_texts(layer, drawn)
    cells = [
        cell(example, values, layer.bounding_box_format, text)
        for example, text in zip(changed, texts, strict=True)
    ]
    original = cell(row_of(request.data, 0), values, layer.bounding_box_format, ["original"])
    return Block(title, argument_texts(layer), original, cells)


def augmented(layer: AugmentationLayer, request: Request, count: int) -> tuple[list[dict], list]:
    """Augmentations of a batch's first image, and what was drawn for each."""
    images = request.data["images"]
    # Layers that mix take neighbours: every other row is another image, if there are several.
    rows = np.zeros((count, 2), int)
    rows[:, 1] = (1 + np.arange(count) % max(len(images) - 1, 1)) % len(images)
    pairs = keras.tree.map_structure(lambda leaf: leaf[rows.ravel()], request.data)
    seed = tf.fill((2 * count, 2), tf.constant(request.seed % 2**31, tf.int32))
    drawn = layer.draw(folded(seed, tf.range(2 * count)[:, None]), images.shape[1:])
    # As in a pipeline, where layers of Keras, too, draw for each image.
    changed = layer.apply(pairs, drawn, on_host=True)
    first = range(0, 2 * count, 2)
    return [row_of(changed, row) for row in first], [row_of(drawn, row) for row in first]


def row_of(data: Any, row: int) -> Any:
    """One example of a batch, or what was drawn for it, as arrays."""
    return keras.tree.map_structure(lambda leaf: np.asarray(leaf[row]), data)


def own_value_range(layer: AugmentationLayer) -> tuple[float, float] | None:
    """The values of black and white, if a layer or one of its layers knows them."""
    if isinstance(layer, Sequence):
        ranges = [own_value_range(step) for _, step in layer.steps()]
        return next((one for one in ranges if one is not None), None)
    return getattr(layer, "value_range", None)


def cell(
    example: dict[str, Any], values: tuple[float, float], box_format: str | None, texts: list[str]
) -> Cell:
    lines = list(texts)
    if "labels" in example:
        lines.append(label_text(example["labels"]))
    boxes = boxes_of(example, box_format)
    return Cell(scaled(example["images"], values), lines, boxes, mask_of(example))


def boxes_of(example: dict[str, Any], box_format: str | None) -> np.ndarray:
    """The boxes that are still in the image, as (left, top, right, bottom) in pixels."""
    boxes = example.get("bounding_boxes")
    if boxes is None or box_format is None:
        return np.zeros((0, 4))
    height, width = example["images"].shape[:2]
    corners = keras.utils.bounding_boxes.convert_format(
        boxes["boxes"], source=box_format, target="xyxy", height=height, width=width
    )
    inside = np.asarray(boxes.get("labels", np.zeros(len(corners)))) >= 0
    return np.asarray(corners)[inside]


def mask_of(example: dict[str, Any]) -> np.ndarray | None:
    mask = example.get("segmentation_masks")
    if not isinstance(mask, np.ndarray):
        return None
    return mask[..., 0] if mask.ndim == 3 else mask
