"""Gradients of embeddings: some rows of a table, the same row perhaps several times.

Keras hands them to the optimizer as they are, and Adam squares each occurrence of a row by
itself. Summed over replicas into a dense tensor they would give other numbers than on one
device, so the rows of all replicas are put one after another, which is the order they
have on one device.

Positions are not examples: the gradient of a table that is read at the same places for any part of
a batch has as many rows for the whole batch. So has that of a product with a sparse matrix, whose
equal rows Keras adds up. Such parts are added to each other, see `alike`.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.keras_internals import step_hooks
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.replica_group import ReplicaGroup

PASSED_ON = ("Reshape", "Cast", "Identity")
"""Operations after which indices are still distinct."""

_thread = threading.local()


class Noted(NamedTuple):
    """What is known of the tensors of a replica's pass; see `rows_noted`."""

    # Tensors are kept here, so that no later one gets the same `id`.
    of_rows: dict[Any, tf.Tensor]
    distinct: dict[Any, tf.Tensor]


def rows_of_all(group: ReplicaGroup, gradient: tf.IndexedSlices, present: Any) -> tf.IndexedSlices:
    """The rows of all replicas; a replica without examples has none."""
    if group.count == 1:
        return gradient
    own = tf.where(present, tf.shape(gradient.indices)[0], 0)
    values, indices = group.gather([gradient.values[:own], gradient.indices[:own]])
    everyones = tf.IndexedSlices(values, indices, gradient.dense_shape)
    return joined_parts(everyones, alike(gradient))


def of_table(gradient: tf.IndexedSlices, table: Any) -> tf.IndexedSlices:
    """The gradient with the static shape of its table."""
    shape = tf.constant(tuple(table.shape), tf.int64)
    values = tf.reshape(gradient.values, [-1, *table.shape[1:]])
    return tf.IndexedSlices(values, tf.cast(gradient.indices, tf.int64), shape)


def alike(gradient: tf.IndexedSlices) -> int | None:
    """How many rows the gradient has for any part of the batch, if it has the same for each.

    It is 0 where no row comes twice, and where the number is not known; None for rows that the
    examples decide. Known where rows are noted only.
    """
    if is_distinct(gradient.indices):
        return 0
    # Positions in a sequence, say, are made of its length alone.
    return None if is_of_rows(gradient.indices) else gradient.indices.shape[0] or 0


def is_distinct(indices: tf.Tensor) -> bool:
    """Whether equal rows were added up already, as Keras's product with a sparse matrix does."""
    if tf.executing_eagerly():
        noted = noted_here()
        return noted is not None and key_of(indices) in noted.distinct
    operation = indices.op
    while operation.type in PASSED_ON:
        operation = operation.inputs[0].op
    return bool(operation.type == "Unique")


def is_of_rows(tensor: tf.Tensor) -> bool:
    """Whether a tensor is made of the replica's rows, or of their number, or by chance."""
    noted = noted_here()
    if noted is None or tf.executing_eagerly():
        return noted is None or key_of(tensor) in noted.of_rows
    seen, waiting = set[tf.Operation](), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation in noted.of_rows or is_by_chance(operation.type):
            return True
        if operation not in seen and not is_length_of_another_axis(operation):
            waiting += [each.op for each in operation.inputs]
        seen.add(operation)
    return False


def is_by_chance(kind: str) -> bool:
    return "Random" in kind or "Shuffle" in kind or "Multinomial" in kind


def is_length_of_another_axis(operation: tf.Operation) -> bool:
    """Whether an operation takes a length out of a shape, and not the number of rows."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    rank = operation.inputs[0].op.inputs[0].shape.rank
    begin = tf.get_static_value(operation.inputs[1])
    return rank is not None and begin is not None and int(begin[0]) % rank != 0


def noted_here() -> Noted | None:
    return getattr(_thread, "noted", None)


def key_of(tensor: tf.Tensor) -> Any:
    return id(tensor) if tf.executing_eagerly() else tensor.op


@contextlib.contextmanager
def rows_noted(rows: Any) -> Iterator[None]:
    """Let it be known here which tensors are made of some rows; a graph tells it later."""
    leaves = tf.nest.flatten(rows, expand_composites=True)
    noted = Noted({key_of(leaf): leaf for leaf in leaves if isinstance(leaf, tf.Tensor)}, {})

    def note(kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        keys = [id(tensor) for tensor in inputs]
        if kind == "Unique" or (kind in PASSED_ON and keys[0] in noted.distinct):
            noted.distinct[id(outputs[0])] = outputs[0]
        if is_by_chance(kind) or any(key in noted.of_rows for key in keys):
            noted.of_rows.update((id(tensor), tensor) for tensor in outputs)

    eager = tf.executing_eagerly()
    before, _thread.noted = noted_here(), noted
    try:
        with step_hooks.noted_operations(note) if eager else contextlib.nullcontext():
            yield
    finally:
        _thread.noted = before


def joined_parts(gradient: tf.IndexedSlices, length: int | None) -> tf.IndexedSlices:
    """The gradient of a whole batch from its parts, one after another; see `alike`."""
    if length is None:
        return gradient
    if not length:
        return added_up(gradient)
    parts = tf.reshape(gradient.values, [-1, length, *gradient.values.shape[1:]])
    summed = tf.reduce_sum(parts, axis=0)
    return tf.IndexedSlices(summed, gradient.indices[:length], gradient.dense_shape)


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


def square_norm(gradient: tf.IndexedSlices) -> tf.Tensor:
    """The sum of the squares of a sparse gradient; a row that comes twice counts as one."""
    return tf.reduce_sum(tf.square(tf.cast(added_up(gradient).values, tf.float32)))


def square_norm_of_all(gradients: Sequence[Any]) -> tf.Tensor:
    """The sum of the squares of dense and sparse gradients, in few operations."""
    dense = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    packs = Packing(dense).pack(dense)
    squares = [tf.reduce_sum(tf.square(tf.cast(pack, tf.float32))) for pack in packs]
    squares += [
        square_norm(gradient) for gradient in gradients if isinstance(gradient, tf.IndexedSlices)
    ]
    return tf.add_n([tf.zeros(()), *squares])


def zero_unless(condition: tf.Tensor, tensor: Any) -> Any:
    """The tensor where the condition holds, zeros otherwise; of a sparse one, no rows."""
    if isinstance(tensor, tf.IndexedSlices):
        count = tf.where(condition, tf.shape(tensor.indices)[0], 0)
        return tf.IndexedSlices(tensor.values[:count], tensor.indices[:count], tensor.dense_shape)
    # Not a product: NaN times zero is NaN.
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def add_all(first: list[Any], second: list[Any]) -> list[Any]:
    return [
        concatenated(a, b) if isinstance(a, tf.IndexedSlices) else a + b
        for a, b in zip(first, second, strict=True)
    ]
