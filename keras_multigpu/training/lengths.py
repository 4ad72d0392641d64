"""How many rows the leaves of a batch have, and what is said where these are not equally many."""

import itertools
import re
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error

PARTS = ("x", "y", "sample_weight")

MARK = "rows of the leaves of a batch:"
"""What an error begins with that a graph has raised."""


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have one row, whatever the number of examples."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def length_of(leaf: Any) -> int | tf.Tensor | None:
    """The number of rows of a leaf: an integer where it is static, None of an open spec."""
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.TypeSpec):
        return None
    ragged = isinstance(leaf, tf.RaggedTensor)
    return leaf.nrows(tf.int32) if ragged else tf.shape(leaf, tf.int32)[0]


def lengths_of(batch: Any) -> dict[str, Any]:
    """The number of rows of each leaf that replicas share, by the leaf's name."""
    return {
        name_of(path): length_of(leaf)
        for path, leaf in keras.tree.flatten_with_path(batch)
        if leaf is not None and leaf.shape.rank != 0 and not is_one_row(leaf)
    }


def name_of(path: tuple[Any, ...]) -> str:
    """What a user calls a leaf: `x`, or `x['image']`."""
    part, *inside = path
    return PARTS[part] + "".join(f"[{step!r}]" for step in inside)


def require_equal_lengths(batch: Any) -> list[tf.Operation]:
    """Raise a `ValueError` where the leaves of a batch, or of its specs, differ in length.

    What only a graph can tell it asserts in the operations that are returned, see
    `unequal_lengths`.
    """
    refuse_unequal_known(batch)
    lengths = lengths_of(batch)
    open_lengths = [rows for rows in lengths.values() if tf.is_tensor(rows)]
    if not open_lengths or len(lengths) == 1:
        return []
    equal = tf.reduce_all(tf.equal(tf.stack(list(lengths.values())), open_lengths[0]))
    return [tf.debugging.Assert(equal, [MARK, *lengths.values()], summarize=1)]


def unequal_lengths(error: tf.errors.OpError, spec: Any) -> ValueError | None:
    """What an error of a graph says of the leaves of a batch, whose specs are given; or None."""
    _, mark, after = error.message.partition(MARK)
    if not mark or spec is None:
        return None
    # Not names, which TensorFlow would have escaped.
    numbers = itertools.takewhile(str.isdecimal, re.findall(r"\[(.*?)\]", after))
    try:
        refuse_unequal(dict(zip(lengths_of(spec), map(int, numbers), strict=False)))
    except ValueError as named:
        return named
    return None


def refuse_unequal_known(batch: Any) -> None:
    """Raise a `ValueError` where leaves are known to differ in length, and ask no graph."""
    lengths = lengths_of(batch)
    refuse_unequal({name: rows for name, rows in lengths.items() if isinstance(rows, int)})


def refuse_unequal(lengths: dict[str, int]) -> None:
    """Raise a `ValueError` that names two leaves whose lengths differ, if there are such."""
    first, rows = next(iter(lengths.items()), ("", 0))
    for other, more in lengths.items():
        if more != rows:
            raise value_error(
                f"`{first}` has {rows} rows in a batch, and `{other}` has {more}.",
                "Expected equally many, one for each example, so that replicas can share them.",
                "Cut all of them with the same batch size, or train on one replica, which takes "
                "them as they are: `devices=1`.",
                rows=lengths,
            )
