"""How many rows the leaves of a batch have, and which have equally many."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have one row, whatever the number of examples."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def is_cut(leaf: Any) -> bool:
    """Whether replicas share the rows of a leaf."""
    return leaf is not None and leaf.shape.rank != 0 and not is_one_row(leaf)


def length_of(leaf: Any) -> int | tf.Tensor | None:
    """The number of rows of a leaf: an integer where it is static, None of an open spec."""
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.TypeSpec):
        return None
    ragged = isinstance(leaf, tf.RaggedTensor)
    return leaf.nrows(tf.int32) if ragged else tf.shape(leaf, tf.int32)[0]


def lengths_of(batch: Any) -> list[Any]:
    """The number of rows of each leaf that replicas share."""
    return [length_of(leaf) for leaf in keras.tree.flatten(batch) if is_cut(leaf)]


Groups = tuple[int, ...]
"""Which leaves of a batch have equally many rows: a number for each one that replicas share.

Zero says as many as the first of them, and -1 that it has none. Nothing where all have as many.
"""


def groups_of(lengths: Sequence[int | None]) -> Groups:
    """The groups of leaves with equally many rows; unknown numbers count as equal."""
    known = {lengths[0]: 0} if lengths else {}
    found = tuple(
        -1 if n == 0 and n not in known else known.setdefault(n, len(known)) for n in lengths
    )
    return found if any(found) else ()
