"""Draws examples with their labels, before and after augmentation."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import printable, require_positive_integer, value_error
from keras_multigpu.data.pipeline import augmenting
from keras_multigpu.data.pipeline.order import draw_seeds
from keras_multigpu.data.reading import Reading
from keras_multigpu.pictures import (
    Cell,
    Row,
    corners_of,
    draw_grid,
    finish,
    require_png,
    scale_images,
    target_text,
)

# How many images a row has.
COLUMNS = 8

# How often each image is augmented.
DRAWS = 3

# Arrays without channels count as images only if their sides are at least this long.
SMALLEST_SIDE = 8

# Targets that layers also find among the inputs.
BESIDE = ("bounding_boxes", "segmentation_masks")


def draw(
    reading: Reading, path: str | Path | None, count: int, box_format: str | None = None
) -> Any:
    require_positive_integer("count", count)
    path = None if path is None else require_png(path)
    what = repr(reading.with_(augment=None)).removeprefix("Batches(").removesuffix(")")
    return finish(draw_rows(collect_rows(reading, count, box_format), what), path)


def draw_rows(rows: list[Row], heading: str) -> Any:
    """A figure with the augmentations below each row of originals."""
    count = len(rows[0][1])
    columns = min(count, COLUMNS)
    lines = [
        (title, cells[begin : begin + columns])
        for begin in range(0, count, columns)
        for title, cells in rows
    ]
    return draw_grid(lines, columns, heading)


def collect_rows(reading: Reading, count: int, box_format: str | None = None) -> list[Row]:
    augment = reading.augment
    if box_format is None and augment is not None:
        layers = augmenting.flatten_layers(reading.settings["augment"])
        known = [getattr(one, "bounding_box_format", None) for one in layers]
        box_format = next(filter(None, known), None)
    plain = reading.with_(augment=None, global_batch_size=count, remainder="keep")
    try:
        # A batch is empty if all its examples are damaged.
        some = plain.epoch(0).filter(lambda *x: tf.shape(keras.tree.flatten(x)[0])[0] > 0)
        batch = next(iter(some), None)
    except tf.errors.OpError as error:
        raise plain.failure_in(error) or error from None
    if batch is None:
        raise value_error(
            "There is nothing to draw: no example could be read.",
            "Expected at least one intact example.",
            "Look at `batches.quarantine` for the causes.",
            batches=reading,
        )
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    x = x[0] if isinstance(x, tuple) and len(x) == 1 and y is None else x
    rows = [("Examples", make_cells(x, y, reading.source.class_names, box_format))]
    numbers = np.arange(len(rows[0][1]))
    for draw_number in range(DRAWS if augment is not None else 0):
        seeds = draw_seeds(0, draw_number, numbers, np.zeros_like(numbers))
        # In a dataset, as in training, because some functions work only there.
        augmented = tf.data.Dataset.from_tensors((x, y, weight, seeds)).map(augment)
        new_x, new_y, _ = next(iter(augmented))
        cells = make_cells(new_x, new_y, None, box_format)
        rows.append((f"Augmented {draw_number + 1}", [one._replace(text="") for one in cells]))
    return rows


def make_cells(
    x: Any, y: Any, class_names: list[str] | None = None, box_format: str | None = None
) -> list[Cell]:
    """The images of a batch, with the first mask and boxes drawn and other targets as texts."""
    images = image_leaf(x)
    beside = {name: x[name] for name in BESIDE if name in x} if isinstance(x, dict) else {}
    leaves = keras.tree.flatten_with_path((beside, y))
    targets = {path: np.asarray(leaf) for path, leaf in leaves if leaf is not None}
    masks = [path for path, leaf in targets.items() if is_mask(leaf, images)]
    boxes = [path for path in targets if path[-1] == "boxes" and box_format is not None]
    labels = [(*path[:-1], name) for path in boxes for name in ("labels", "classes")]
    labels = [path for path in labels if path in targets]
    cells = []
    for number, image in enumerate(scale_images(images)):
        here = {path: leaf[number, ...] for path, leaf in targets.items()}
        texts = []
        for path, value in here.items():
            if path in labels:
                text = ", ".join(target_text(one, class_names) for one in value[value >= 0])
            elif not path[0] or path in (*masks, *boxes):  # It is drawn, or among the inputs.
                continue
            else:
                text = target_text(value, class_names)
            texts.append((f"{path[-1]}: " if len(path) > 1 else "") + text)
        cell = Cell(image, printable(", ".join(texts)))
        if masks:
            cell = cell._replace(mask=here[masks[0]].reshape(image.shape[:2]))
        if boxes:
            of_boxes = here[labels[0]] if labels else None
            corners = corners_of(here[boxes[0]], of_boxes, str(box_format), image.shape)
            cell = cell._replace(boxes=corners)
        cells.append(cell)
    return cells


def is_mask(target: np.ndarray, images: np.ndarray) -> bool:
    """Whether a target has a class for each pixel."""
    size = images.shape[:3]
    return target.dtype.kind in "iu" and target.shape in (size, (*size, 1))


def image_leaf(x: Any) -> np.ndarray:
    leaves = [leaf for leaf in keras.tree.flatten(x) if tf.is_tensor(leaf)]
    for leaf in leaves:
        if leaf.shape.rank == 4 and leaf.shape[-1] in (1, 3, 4):
            return leaf.numpy()
    for leaf in leaves:
        if leaf.shape.rank == 3 and min(leaf.shape[1:]) >= SMALLEST_SIDE:
            return leaf.numpy()[..., None]
    raise value_error(
        "These batches hold nothing that looks like an image.",
        "Expected inputs of the shape (height, width, channels), with 1, 3 or 4 channels.",
        "Plot other kinds of data yourself.",
        shapes=[tuple(leaf.shape[1:]) for leaf in leaves],
    )
