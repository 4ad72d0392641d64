"""Cuts a global batch into one share for each replica, inside the step.

Shares are contiguous and in replica order; see `keras_multigpu.batch_sizes`. A leaf whose first
axis is known to be 1 belongs to all examples, as in broadcasting: every replica has it whole.
(Of a batch of one example it is the row that replicas without examples borrow.)
"""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.pure_model import Rows


def batch_size_of(batch: Any) -> int | tf.Tensor | None:
    """The number of examples in a batch: an integer where it is static, None in open specs."""
    leaves = [
        leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.shape.rank != 0
    ]
    for leaf in sorted(leaves, key=is_one_row):
        static = leaf.shape[0]
        if static is not None:
            return int(static)
        if isinstance(leaf, tf.TypeSpec):
            return None
        return leaf.nrows(tf.int32) if is_ragged(leaf) else tf.shape(leaf, tf.int32)[0]
    raise ValueError(
        "The batch holds no array with a batch axis. Expected at least one tensor of rank 1 or "
        f"more, with the examples along its first axis. Received: batch={batch}"
    )


def share_of(batch: tuple[Any, Any, Any], replica: int, replicas: int) -> Rows:
    """The rows of a global batch that belong to one replica.

    Args:
        batch: `(x, y, sample_weight)` of the global batch.
        replica: The replica's index.
        replicas: The number of replicas.
    """
    size = batch_size_of(batch)
    total = tf.convert_to_tensor(size, tf.int32)
    if replicas == 1:
        return Rows(batch, total, total)
    start, stop = share_bounds(size, replica, replicas)
    examples = tf.convert_to_tensor(stop - start, tf.int32)
    return Rows(rows(batch, start, stop), examples, total)


def rows(data: Any, start: Any, stop: Any) -> Any:
    """Rows `start` to `stop` of a batch, or its first row where these are none."""
    if isinstance(start, int) and isinstance(stop, int):
        start, stop = (start, stop) if stop > start else (0, 1)
    else:
        some = stop > start
        start, stop = tf.where(some, start, 0), tf.where(some, stop, 1)
    return keras.tree.map_structure(
        lambda leaf: leaf if is_one_row(leaf) else cut(leaf, start, stop), data
    )


def cut(leaf: Any, start: Any, stop: Any) -> Any:
    """Rows of one leaf of a batch; scalars and None are shared by all."""
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        begin = tf.concat([[start], tf.zeros([leaf.shape.rank - 1], tf.int64)], axis=0)
        size = tf.concat([[stop - start], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), tf.cast(size, tf.int64))
    return leaf[start:stop]


def share_spec(spec: tuple[Any, Any, Any], replicas: int) -> Rows:
    """The specs of a replica's rows, from those of a global batch.

    The rows have a static shape where the batch has one that divides evenly.
    """
    size = batch_size_of(spec)
    rows = size // replicas if isinstance(size, int) and size % replicas == 0 and size else None

    def share(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf):
            return leaf
        shape = [rows, *leaf.shape[1:]]
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        return type(leaf)(shape, leaf.dtype)

    integer = tf.TensorSpec((), tf.int32)
    return Rows(keras.tree.map_structure(share, spec), integer, integer)


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have one row, whatever the number of examples."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def is_ragged(leaf: Any) -> bool:
    """Whether a leaf has rows of different lengths."""
    return isinstance(leaf, tf.RaggedTensor)
