"""Draws examples with their labels, before and after augmentation."""

from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import printable, require_positive_integer, value_error
from keras_multigpu.data.pipeline.order import draw_seeds
from keras_multigpu.data.pipeline.reading import Reading
from keras_multigpu.image_grid import Block, Cell, grid_of, scaled, target_text
from keras_multigpu.pictures import checked_png, finished

COLUMNS = 8
"""How many images a row has."""

DRAWS = 3
"""How often each image is augmented."""

# A grid of numbers with shorter sides and no channels is hardly an image.
SMALLEST_SIDE = 8


class Examples(NamedTuple):
    """A text for each example; `(title, images)` of the originals and of each augmentation."""

    labels: list[str]
    rows: list[tuple[str, np.ndarray]]


def draw(reading: Reading, path: str | Path | None, count: int) -> Any:
    require_positive_integer("count", count)
    path = None if path is None else checked_png(path)
    what = repr(reading.with_(augment=None)).removeprefix("Batches(").removesuffix(")")
    return finished(drawn(examples_of(reading, count), what), path)


def drawn(examples: Examples, subtitle: str) -> Any:
    """A figure of the examples: each row of originals, with its augmentations below it."""
    columns = min(len(examples.labels), COLUMNS)
    text, blocks = [subtitle], []
    for begin in range(0, len(examples.labels), columns):
        some = slice(begin, begin + columns)
        labels = examples.labels[some]
        for title, images in examples.rows:
            cells = [Cell(image, [text]) for image, text in zip(images[some], labels, strict=True)]
            blocks.append(Block(title, text, cells))
            text, labels = [], [""] * len(labels)
    return grid_of(blocks, columns)


def examples_of(reading: Reading, count: int) -> Examples:
    augment = reading.augment
    plain = reading.with_(augment=None, global_batch_size=count, remainder="keep")
    try:
        # Damaged examples may be all that a batch had.
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
    images = image_leaf(x)
    rows = [("Examples", scaled(images))]
    for number in range(DRAWS if augment is not None else 0):
        seeds = draw_seeds(0, number, np.arange(len(images)), np.zeros(len(images), np.int64))
        # In a dataset, as in training, since a function can work there and not outside.
        augmented = tf.data.Dataset.from_tensors((x, y, weight, seeds)).map(augment)
        rows.append((f"Augmented {number + 1}", scaled(image_leaf(next(iter(augmented))[0]))))
    return Examples(label_texts(y, len(images), reading.source.class_names), rows)


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
