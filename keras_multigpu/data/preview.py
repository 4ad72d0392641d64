"""Draws examples with their labels."""

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import (
    printable,
    require_positive_integer,
    value_error,
)
from keras_multigpu.data.pipeline.order import draw_seeds
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

COLUMNS = 8
"""How many images stand side by side."""

DRAWS = 3
"""How often each image is augmented."""

# A grid of numbers with shorter sides and no channels is hardly an image.
SMALLEST_SIDE = 8


class Examples(NamedTuple):
    """A text for each example; `(title, images)` of the originals and of each augmentation."""

    labels: list[str]
    rows: list[tuple[str, np.ndarray]]


def draw(batches: Any, path: str | Path | None, count: int) -> Any:
    """Draw examples of a `Reading`, before and after augmentation; the figure."""
    require_positive_integer("count", count)
    path = None if path is None else checked_png(path)
    what = repr(batches.with_(augment=None)).removeprefix("Batches(").removesuffix(")")
    return finished(drawn(examples_of(batches, count), what), path)


def drawn(examples: Examples, subtitle: str) -> Any:
    """A figure of the examples: each row of originals, with its augmentations below it."""
    title = "Examples before and after augmentation" if len(examples.rows) > 1 else "Examples"
    columns = min(len(examples.labels), COLUMNS)
    characters = int(width_of(columns) / CELL * CHARACTERS)
    lines = [title, *textwrap.wrap(subtitle, characters, max_lines=2)]
    rows = []
    for begin in range(0, len(examples.labels), columns):
        some = slice(begin, begin + columns)
        labels = examples.labels[some]
        for name, images in examples.rows:
            cells = [Cell(image, [text]) for image, text in zip(images[some], labels, strict=True)]
            rows.append(Row([*cells], [*lines, *filter(None, [name])]))
            lines, labels = [], [""] * len(labels)
    return grid_of(rows)


def examples_of(batches: Any, count: int) -> Examples:
    augment = batches.augment
    plain = batches.with_(augment=None, global_batch_size=count, remainder="keep")
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
            batches=batches,
        )
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    x = x[0] if isinstance(x, tuple) and len(x) == 1 and y is None else x
    images = image_leaf(x)
    labels = label_texts(y, len(images), batches.source.class_names)
    if augment is None:
        return Examples(labels, [("", displayed(images))])
    rows = [("original", displayed(images))]
    for number in range(DRAWS):
        seeds = draw_seeds(0, number, np.arange(len(images)), np.zeros(len(images), np.int64))
        # In a dataset, as in training, since a function can work there and not outside.
        batch = tf.data.Dataset.from_tensors((x, y, weight, seeds)).map(augment)
        rows.append((f"augmented {number + 1}", displayed(image_leaf(next(iter(batch))[0]))))
    return Examples(labels, rows)


def image_leaf(x: Any) -> np.ndarray:
    """The inputs that look like images; a `ValueError` if there are none."""
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
        "Draw other data by your own means.",
        shapes=[tuple(leaf.shape[1:]) for leaf in leaves],
    )


def displayed(images: np.ndarray) -> np.ndarray:
    return scaled(images, value_range(images))


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
        number = value.reshape(()).item()
        if isinstance(number, float) and not (class_names and number.is_integer()):
            return f"{number:.4g}"
        return class_text(int(number), class_names)
    if np.isin(value, (0, 1)).all():
        chosen = np.flatnonzero(value).tolist()
        return ", ".join(class_text(number, class_names) for number in chosen) or "-"
    if class_names is not None and len(class_names) == len(value):
        return class_text(int(value.argmax()), class_names)
    numbers = ", ".join(f"{number:.3g}" for number in value[:MOST_NUMBERS].tolist())
    return numbers + (", ..." if value.size > MOST_NUMBERS else "")


def class_text(number: int, class_names: list[str] | None) -> str:
    return class_names[number] if class_names and 0 <= number < len(class_names) else str(number)
