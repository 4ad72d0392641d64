"""Draws examples with their labels, before and after augmentation."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.data.pipeline import augmenting
from keras_multigpu.data.pipeline.order import draw_seeds
from keras_multigpu.data.reading import Reading
from keras_multigpu.pictures import Row, draw_grid, finish, make_cells, require_png

# How many images a row has.
COLUMNS = 8

# How often each image is augmented.
DRAWS = 3


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
