"""A replica's rows taken in pieces, one after another, so that less memory is needed at a time."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.exchange.sparse_gradients import concatenated
from keras_multigpu.training.exchange.sparse_gradients import is_sparse
from keras_multigpu.training.exchange.sparse_gradients import square_norm_of_all
from keras_multigpu.training.replica_pass.pure_model import Rows
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import COUNT
from keras_multigpu.training.shares import cut
from keras_multigpu.training.shares import rows


def rows_count(share: Rows) -> Any:
    """The number of rows at hand, the borrowed one included."""
    leaf = next(leaf for leaf in keras.tree.flatten(share.x) if leaf is not None)
    return leaf.shape[0] if leaf.shape[0] is not None else tf.shape(leaf)[0]


def piece_of(share: Rows, size: Any, index: int, pieces: int) -> tuple[Rows, Any]:
    """One of several pieces of a replica's rows, and how many rows it really has."""
    start, stop = share_bounds(size, index, pieces)
    examples = tf.cast(stop - start, COUNT) * tf.cast(share.examples > 0, COUNT)
    return Rows(rows(share.data, start, stop), examples, share.global_batch_size), stop - start


def piece_norm(piece: Rows, gradients: Sequence[Any]) -> tf.Tensor:
    """A piece's number of examples, and the square norm of the gradient of its mean loss."""
    square = tf.math.divide_no_nan(square_norm_of_all(gradients), tf.square(piece.fraction))
    return tf.stack([tf.cast(piece.examples, tf.float32), square])


def keep_if(condition: tf.Tensor, new: Values, old: Values, seeds: Sequence[int]) -> Values:
    """New values where the condition holds, old ones otherwise; seeds go on on every replica."""

    def choose(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        return before if after is before else tf.where(condition, after, before)

    return Values(
        old.trainable,
        [
            pair[0] if index in seeds else choose(*pair)
            for index, pair in enumerate(zip(new.others, old.others, strict=True))
        ],
        new.global_seed,
    )


def first_rows(tensors: Any, count: Any) -> Any:
    """The first rows of each tensor; scalars and None as they are."""
    return keras.tree.map_structure(lambda leaf: cut(leaf, 0, count), tensors)


def zero_unless(condition: tf.Tensor, tensor: Any) -> Any:
    """The tensor where the condition holds, zeros otherwise; of a sparse one, no rows."""
    if is_sparse(tensor):
        count = tf.where(condition, tf.shape(tensor.indices)[0], 0)
        return tf.IndexedSlices(tensor.values[:count], tensor.indices[:count], tensor.dense_shape)
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def add_all(first: list[Any], second: list[Any]) -> list[Any]:
    """Add two lists of tensors, one by one."""
    return [
        concatenated(a, b) if is_sparse(a) else a + b for a, b in zip(first, second, strict=True)
    ]
