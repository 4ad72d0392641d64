"""Gradients of embeddings: some rows of a table, the same row perhaps several times.

Keras hands them to the optimizer as they are, and Adam squares each occurrence of a row by
itself. Summed over replicas into a dense tensor they would give other numbers than on one
device, so the rows of all replicas are put one after another, which is the order they
have on one device.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.packing import Packing


def rows_of_all(context: Any, gradient: tf.IndexedSlices, present: Any) -> tf.IndexedSlices:
    """The rows of all replicas; a replica without examples has none.

    Args:
        context: The replica context.
        gradient: This replica's rows.
        present: Whether this replica has examples.
    """
    if context.num_replicas_in_sync == 1:
        return gradient
    own = tf.where(present, tf.shape(gradient.indices)[0], 0)
    everyones = tf.IndexedSlices(
        context.all_gather(gradient.values[:own], axis=0),
        context.all_gather(gradient.indices[:own], axis=0),
        gradient.dense_shape,
    )
    return added_up(everyones) if has_distinct_rows(gradient) else everyones


def of_table(gradient: tf.IndexedSlices, table: Any) -> tf.IndexedSlices:
    """The gradient with the static shape of its table."""
    shape = tf.constant(tuple(table.shape), tf.int64)
    values = tf.reshape(gradient.values, [-1, *table.shape[1:]])
    return tf.IndexedSlices(values, tf.cast(gradient.indices, tf.int64), shape)


def has_distinct_rows(gradient: tf.IndexedSlices) -> bool:
    """Whether equal rows were added up already, as Keras's product with a sparse matrix does.

    Of several replicas' rows the equal ones have to be added up as well then: one device has
    each row once. Only a graph tells.
    """
    if tf.executing_eagerly():
        return False
    operation = gradient.indices.op
    while operation.type in ("Reshape", "Cast", "Identity"):
        operation = operation.inputs[0].op
    return bool(operation.type == "Unique")


def added_up(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient with each row once."""
    rows, positions = tf.unique(gradient.indices)
    summed = tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(rows)[0])
    return tf.IndexedSlices(summed, rows, gradient.dense_shape)


def concatenated(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """The rows of two pieces of a batch."""
    return tf.IndexedSlices(
        tf.concat([first.values, second.values], axis=0),
        tf.concat([first.indices, second.indices], axis=0),
        first.dense_shape,
    )


def rows_spec(gradient: tf.IndexedSlices) -> tf.IndexedSlicesSpec:
    """The spec of a sparse gradient with any number of rows."""
    values, indices, shape = gradient.values, gradient.indices, gradient.dense_shape
    table = tf.get_static_value(shape)
    return tf.IndexedSlicesSpec(
        tf.TensorShape(table), values.dtype, indices.dtype, shape.dtype, tf.TensorShape([None])
    )


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient consists of rows."""
    return isinstance(gradient, tf.IndexedSlices)


def square_norm(gradient: tf.IndexedSlices) -> tf.Tensor:
    """The sum of the squares of a sparse gradient; a row that comes twice counts as one."""
    return tf.reduce_sum(tf.square(tf.cast(added_up(gradient).values, tf.float32)))


def square_norm_of_all(gradients: Sequence[Any]) -> tf.Tensor:
    """The sum of the squares of dense and sparse gradients, in few operations."""
    dense = [gradient for gradient in gradients if not is_sparse(gradient)]
    packs = Packing(dense).pack(dense)
    squares = [tf.reduce_sum(tf.square(tf.cast(pack, tf.float32))) for pack in packs]
    squares += [square_norm(gradient) for gradient in gradients if is_sparse(gradient)]
    return tf.add_n([tf.zeros(()), *squares])
