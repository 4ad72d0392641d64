"""`gallery`: a picture of what layers do to an image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import pictures
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.sequence import Sequence, as_layer
from keras_multigpu.checks import value_error
from keras_multigpu.pictures import Cell, draw_grid, finish, require_png, value_range
from keras_multigpu.seeded_layers import fold_seeds

# Images in a row, of which the first is the original. A single layer gets two rows.
COLUMNS = 6


def gallery(layers: Any, images: Any, path: str | Path | None = None) -> Any:
    """Draw an image and several augmentations of it, eleven by one layer or five by each.

    Args:
        layers: A layer or function, a list of them, or a dictionary of them by title.
        images: An image; or a batch, whose first image is augmented, and mixed with the others by
            layers that mix; or a dictionary of either and its targets, as layers take it. Boxes and
            masks are drawn into the images, and labels below.
        path: The file to write, which ends in `.png`; None for none.

    Returns:
        A matplotlib figure, which a notebook shows.

    Raises:
        ImportError: matplotlib is missing: `pip install matplotlib`.
    """
    path = None if path is None else require_png(path)
    if not isinstance(layers, list | tuple | Mapping):
        layers = [layers]
    titles = [*layers] if isinstance(layers, Mapping) else [""] * len(layers)
    made = map(as_layer, layers.values() if isinstance(layers, Mapping) else layers)
    titled = [(str(title), layer) for title, layer in zip(titles, made, strict=True)]
    if not titled:
        raise value_error("`layers` is empty.", "Expected at least one layer.", layers=layers)
    data, count = batch_of(images), (COLUMNS if len(titled) > 1 else 2 * COLUMNS) - 1
    rows = [(title or layer.title, make_cells(layer, data, count)) for title, layer in titled]
    return finish(draw_grid(rows, COLUMNS), path)


def batch_of(images: Any) -> dict[str, Any]:
    """Turn the argument `images` into a dictionary of a batch."""
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
    return keras.tree.map_structure(lambda leaf: leaf[None] if len(shape) == 3 else leaf, arrays)


def make_cells(layer: AugmentationLayer, data: dict[str, Any], count: int) -> list[Cell]:
    """The first image of a batch, and the results of augmenting it `count` times."""
    images = data["images"]
    # Layers that mix use neighbours: every other row is another image, if there are several.
    rows = np.zeros((count, 2), int)
    rows[:, 1] = (1 + np.arange(count) % max(len(images) - 1, 1)) % len(images)
    pairs = keras.tree.map_structure(lambda leaf: leaf[rows.ravel()], data)
    seeds = fold_seeds(tf.zeros((2 * count, 2), tf.int32), tf.range(2 * count)[:, None])
    drawn = layer.draw(seeds, images.shape[1:])
    # As in a pipeline, where Keras's layers, too, draw for each image.
    changed = layer.apply(pairs, drawn, on_host=True)
    values = own_value_range(layer) or value_range(images)
    cells = []
    for batch, shown in ((data, [0]), (changed, range(0, 2 * count, 2))):
        part = keras.tree.map_structure(lambda leaf: np.asarray(leaf)[shown], batch)  # noqa: B023
        label = {"label": part.pop("labels")} if "labels" in part else None
        cells += pictures.make_cells(part, label, None, layer.bounding_box_format, values)
    return cells


def own_value_range(layer: AugmentationLayer) -> tuple[float, float] | None:
    """The values of black and white, if a layer or one of a `Sequence` knows them."""
    if isinstance(layer, Sequence):
        ranges = [own_value_range(step) for _, step in layer.steps()]
        return next((one for one in ranges if one is not None), None)
    return getattr(layer, "value_range", None)
