"""Gradients of embeddings: some rows of a table, the same row perhaps several times.

Keras hands them to the optimizer as they are, and Adam squares each occurrence of a row by
itself. Summed over replicas into a dense tensor they would give other numbers than on one
device, so the rows of all replicas are put one after another, which is the order they
have on one device.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import step_hooks
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.replica_group import ReplicaGroup

PASSED_ON = ("Reshape", "Cast", "Identity")
"""Operations after which indices are still distinct."""

_thread = threading.local()


def rows_of_all(group: ReplicaGroup, gradient: tf.IndexedSlices, present: Any) -> tf.IndexedSlices:
    """The rows of all replicas; a replica without examples has none."""
    if group.count == 1:
        return gradient
    own = tf.where(present, tf.shape(gradient.indices)[0], 0)
    values, indices = group.gather([gradient.values[:own], gradient.indices[:own]])
    everyones = tf.IndexedSlices(values, indices, gradient.dense_shape)
    return added_up(everyones) if has_distinct_rows(gradient) else everyones


def of_table(gradient: tf.IndexedSlices, table: Any) -> tf.IndexedSlices:
    """The gradient with the static shape of its table."""
    shape = tf.constant(tuple(table.shape), tf.int64)
    values = tf.reshape(gradient.values, [-1, *table.shape[1:]])
    return tf.IndexedSlices(values, tf.cast(gradient.indices, tf.int64), shape)


def has_distinct_rows(gradient: tf.IndexedSlices) -> bool:
    """Whether equal rows were added up already, as Keras's product with a sparse matrix does.

    Of several replicas' rows the equal ones have to be added up as well then: one device has
    each row once. A graph tells; without one, see `distinct_rows_noted`.
    """
    if tf.executing_eagerly():
        return id(gradient.indices) in getattr(_thread, "distinct", {})
    operation = gradient.indices.op
    while operation.type in PASSED_ON:
        operation = operation.inputs[0].op
    return bool(operation.type == "Unique")


@contextlib.contextmanager
def distinct_rows_noted() -> Iterator[None]:
    """Let `has_distinct_rows` know of gradients that are made on this thread without a graph."""
    if not tf.executing_eagerly():
        yield
        return
    # What is kept here shares its identity with nothing else.
    distinct: dict[int, tf.Tensor] = {}

    def note(kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        if kind == "Unique" or (kind in PASSED_ON and id(inputs[0]) in distinct):
            distinct[id(outputs[0])] = outputs[0]

    _thread.distinct = distinct
    try:
        with step_hooks.noted_operations(note):
            yield
    finally:
        _thread.distinct = {}


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


def zero_unless(condition: tf.Tensor, tensor: Any) -> Any:
    """The tensor where the condition holds, zeros otherwise; of a sparse one, no rows."""
    if is_sparse(tensor):
        count = tf.where(condition, tf.shape(tensor.indices)[0], 0)
        return tf.IndexedSlices(tensor.values[:count], tensor.indices[:count], tensor.dense_shape)
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def add_all(first: list[Any], second: list[Any]) -> list[Any]:
    return [
        concatenated(a, b) if is_sparse(a) else a + b for a, b in zip(first, second, strict=True)
    ]
