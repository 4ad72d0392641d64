"""Examples of a stream that have different shapes, and so make no batch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.streams.order import in_python


def alike(
    examples: tf.data.Dataset, name: str, batch_size: int, failed: Callable[[Exception], Exception]
) -> tf.data.Dataset:
    """The same examples, with an error that explains where those of a batch differ in shape.

    Where the shapes are known beforehand, nothing is checked.
    """
    if all(map(has_one_shape, keras.tree.flatten(examples.element_spec))):
        return examples

    def differ(first: np.ndarray, shapes: np.ndarray) -> np.ndarray:
        raise failed(
            value_error(
                f"The examples of {name} differ in shape.",
                "Expected one shape for all examples of a batch.",
                "Resize, crop or pad them in `dataset.map`, or make them ragged tensors.",
                first=split_again(first),
                another=split_again(shapes),
            )
        )

    @tf.autograph.experimental.do_not_convert
    def compared(state: tuple[tf.Tensor, tf.Tensor], *element: Any) -> Any:
        row, first = state
        shapes = shapes_of(element)
        first = tf.cond(row == 0, lambda: shapes, lambda: first)
        is_same = tf.logical_and(
            tf.size(first) == tf.size(shapes),
            # Cut to one length: both branches of a graph are shaped alike.
            tf.reduce_all(first[: tf.size(shapes)] == shapes[: tf.size(first)]),
        )
        checked = tf.cond(
            is_same, lambda: row, lambda: in_python(differ, [first, shapes], tf.int64, [])
        )
        return ((checked + 1) % batch_size, first), element if len(element) > 1 else element[0]

    start = tf.constant(0, tf.int64), tf.constant([], tf.int32)
    return examples.scan(start, compared)


def has_one_shape(spec: Any) -> bool:
    """Whether tensors of this spec need no check: they are all alike, ragged, or missing."""
    return not isinstance(spec, tf.TensorSpec) or spec.shape.is_fully_defined()


def shapes_of(example: Any) -> tf.Tensor:
    """The shapes of the tensors of an example, a -1 behind each."""
    dense = [leaf for leaf in keras.tree.flatten(example) if isinstance(leaf, tf.Tensor)]
    return tf.concat([part for leaf in dense for part in (tf.shape(leaf), [-1])], 0)


def split_again(shapes: np.ndarray) -> list[tuple[int, ...]]:
    """What `shapes_of` joined."""
    parts = np.split(shapes, np.flatnonzero(shapes < 0) + 1)[:-1]
    return [tuple(part[:-1].tolist()) for part in parts]
