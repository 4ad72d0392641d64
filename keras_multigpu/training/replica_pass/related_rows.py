"""Finds losses whose values relate examples to each other although they list one for each.

`keras.losses.Circle` returns one value for each example, but looks for the nearest others in
the batch; `Dice(axis=(0, 1, 2))` returns one value for each channel. A part of the batch then
gives other values, which no arithmetic brings together again. A loss does not say so, so it
is tried on a few random rows: the values of some must not change with the others, nor with
their place among them.
"""

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.training.replica_group import HOST

ROWS = 6
"""How many rows are tried."""
KEPT = 2
"""How many of them stay as they are, at the other end, while the others change."""

_known: "weakref.WeakKeyDictionary[keras.losses.Loss, dict[Any, bool]]" = (
    weakref.WeakKeyDictionary()
)


def relates_rows(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss's value for an example depends on the others in the batch.

    It is tried once for each loss and form of targets and predictions. A loss that cannot be
    tried on random numbers, or draws some of its own, counts as one that does not.

    Args:
        loss: The loss object.
        y_true: The targets, of which only the shapes and dtypes are used.
        y_pred: The predictions.
    """
    specs = [
        (tuple(leaf.shape[1:]), tf.as_dtype(leaf.dtype)) if tried(leaf) else None
        for leaf in tf.nest.flatten((y_true, y_pred))
    ]
    known = _known.setdefault(loss, {})
    key = str(specs)
    if key not in known:
        known[key] = None not in specs and differs(loss, (y_true, y_pred), specs)
    return known[key]


def tried(leaf: Any) -> bool:
    """Whether random rows can stand in for a tensor."""
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.dtype != tf.string


def differs(loss: keras.losses.Loss, data: Any, specs: list[Any]) -> bool:
    """Whether the value of a row changes with the rows beside it, or with its place."""
    targets = len(tf.nest.flatten(data[0]))
    first, other = (random_rows(specs, targets, seed) for seed in (0, 1))
    mixed = [np.concatenate([b[KEPT:], a[:KEPT]]) for a, b in zip(first, other, strict=True)]
    try:
        # Nothing is left of what the loss assigns; its second draw is not its first.
        with tf.init_scope(), tf.device(HOST), keras.StatelessScope():
            values, again, beside = (
                values_of(loss, tf.nest.pack_sequence_as(data, rows))
                for rows in (first, first, mixed)
            )
    except Exception:  # Random numbers may be nonsense to a loss, as its own code decides.
        return False
    if values.ndim == 0 or not np.array_equal(values, again, equal_nan=True):
        return False
    return len(values) != ROWS or not np.allclose(
        values[:KEPT], beside[-KEPT:], rtol=1e-4, atol=1e-6, equal_nan=True
    )


def random_rows(specs: list[Any], targets: int, seed: int) -> list[np.ndarray]:
    """Rows that most losses can read: targets of 0 and 1, predictions between them."""
    random = np.random.default_rng(seed)
    rows = []
    for i, (shape, dtype) in enumerate(specs):
        full = (ROWS, *(3 if length is None else length for length in shape))
        numbers = random.integers(0, 2, full) if i < targets else random.uniform(0.1, 0.9, full)
        rows.append(numbers.astype(dtype.as_numpy_dtype))
    return rows


def values_of(loss: keras.losses.Loss, data: Any) -> np.ndarray:
    """The loss's values for a batch."""
    y_true, y_pred = tf.nest.map_structure(
        lambda rows: keras.ops.convert_to_tensor(rows, dtype=loss.dtype), data
    )
    return np.asarray(keras.ops.convert_to_numpy(loss.call(y_true, y_pred)))
