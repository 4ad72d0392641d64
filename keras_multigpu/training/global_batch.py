"""A batch in the one form that all of training takes: `(x, y, sample_weight)` of tensors."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

Batch = tuple[Any, Any, Any]
"""A global batch: `(x, y, sample_weight)`, of tensors or of their specs."""

ABSENT = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
"""What stands in a dataset for a missing array."""


def normalized(batch: Any) -> Batch:
    """A batch as `(x, y, sample_weight)` of tensors or specs; missing parts are None."""
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    return keras.tree.map_structure(as_tensor, tuple(keras.tree.lists_to_tuples(parts)))


def as_tensor(leaf: Any) -> Any:
    """A leaf of a batch as a tensor, in Keras's float type where it is a float array."""
    if leaf is None or isinstance(leaf, ABSENT):
        return None
    if tf.is_tensor(leaf) or isinstance(leaf, tf.TypeSpec):
        return leaf
    if hasattr(leaf, "tocoo"):
        return sparse_tensor(leaf.tocoo())
    leaf = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    if np.issubdtype(leaf.dtype, np.floating) and leaf.dtype.itemsize > 2:
        return tf.convert_to_tensor(leaf, keras.config.floatx())
    return tf.convert_to_tensor(leaf)


def sparse_tensor(matrix: Any) -> tf.SparseTensor:
    """A SciPy matrix in coordinates as a tensor."""
    indices = np.stack([matrix.row, matrix.col], axis=1).astype("int64")
    return tf.sparse.reorder(tf.SparseTensor(indices, as_tensor(matrix.data), matrix.shape))
