"""Arrays as examples: their specs, lengths and classes."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.pipeline.source import Example

MOST_CLASSES = 2**20


def as_array(leaf: Any) -> np.ndarray | None:
    """An array, tensor or table as a NumPy array, which stays memory-mapped."""
    if leaf is None:
        return None
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise value_error(
            f"The data cannot be converted to an array: {error}.",
            "Expected arrays, tensors or tables, with the examples along the first axis.",
            "Convert it with `numpy.stack`, for example.",
            type=type(leaf).__name__,
        ) from error
    if array.dtype == object or array.dtype.kind in "US":
        # TensorFlow has one type for texts.
        array = array.astype(object)
        require_texts(array)
    if array.ndim == 0:
        raise value_error(
            "A single number was given as an array.",
            "Expected arrays with the examples along the first axis.",
            "A list of numbers counts as several inputs: wrap it in `numpy.array`.",
            array=leaf,
        )
    return array


def require_texts(array: np.ndarray) -> None:
    for entry in array.flat:
        if not isinstance(entry, str | bytes):
            raise value_error(
                "An array of objects holds something other than texts.",
                "Expected texts, or numbers in an array whose examples all have one shape.",
                "Pad examples of different lengths, turn numbers into `numpy.asarray(array, "
                "float)`, or pass a `tf.data.Dataset` to `from_dataset`.",
                shape=array.shape,
                type=type(entry).__name__,
            )


def spec_of(leaf: np.ndarray | None) -> tf.TensorSpec | None:
    """The spec of one example of an array; floats get Keras's float type, as in `fit`."""
    if leaf is None:
        return None
    is_wide = np.issubdtype(leaf.dtype, np.floating) and leaf.dtype.itemsize > 2
    return tf.TensorSpec(leaf.shape[1:], keras.config.floatx() if is_wide else leaf.dtype)


def weight_spec_of(leaf: np.ndarray | None) -> tf.TensorSpec | None:
    """The spec of one example's weight: a float, since class weights may multiply it."""
    if leaf is None:
        return None
    if leaf.dtype == object:
        raise value_error(
            "`sample_weight` holds something other than numbers.",
            "Expected a number for each example.",
            "Convert it, for example with `numpy.asarray(sample_weight, float)`.",
            first=leaf.reshape(-1)[:1].tolist(),
        )
    return tf.TensorSpec(leaf.shape[1:], weight_type())


def weight_type() -> str:
    """Keras's float type, but at least `float32` for the sake of sums."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


def specs_of(example: Example) -> Example:
    x, y, weight = example
    x, y = keras.tree.map_structure(spec_of, (x, y))
    return x, y, keras.tree.map_structure(weight_spec_of, weight)


def common_length(arrays: Sequence[np.ndarray]) -> int:
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) != 1:
        raise value_error(
            "The arrays have different numbers of examples.",
            "Expected equal lengths along the first axis.",
            lengths=[len(array) for array in arrays],
        )
    return lengths[0]


def class_labels(y: Any) -> np.ndarray | None:
    """The class of each example, if the targets are integer classes or one-hot rows."""
    if not isinstance(y, np.ndarray) or not len(y):
        return None
    if y.dtype.kind in "iu" and (y.ndim == 1 or y.shape[1:] == (1,)):
        labels = y.reshape(-1).astype(np.int64)
        # Larger numbers are probably no classes.
        return labels if labels.min() >= 0 and labels.max() < MOST_CLASSES else None
    # Only for matrices: comparing all of a large memory-mapped mask would read it.
    if y.ndim == 2 and y.shape[1] > 1 and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        return y.argmax(1)
    return None
