"""`Misfits`: batches that a graph has read and cannot run.

The specs of a dataset do not say which leaves of its batches have equally many rows, and whether
their other open lengths are ever 0. A graph that reads it assumes that all have, and that none is.
It passes a batch that differs to Python, which makes a step for it.
"""

from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import Groups, Shares, number_in


class Misfits:
    """Takes a batch out of a graph.

    Args:
        groups: The groups of leaves with equally many rows that the graph is made for.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._queue: Any = None
        self._form: Any = None

    def check(self, shares: Any, number: tf.Tensor | int) -> Any:
        """The shares of a batch, inside the graph; it fails if it cannot run them.

        Args:
            shares: The shares that the graph has read.
            number: How many batches the graph has run before.
        """
        leaves = tf.nest.flatten(shares, expand_composites=True)
        tensors = [tf.convert_to_tensor(number), *(leaf for leaf in leaves if leaf is not None)]
        with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
            self._queue = tf.queue.FIFOQueue(1, [tensor.dtype for tensor in tensors])
        self._form = shares

        def put() -> tf.Tensor:
            with tf.control_dependencies([self._queue.enqueue(tensors)]):
                return tf.constant(False)

        numbers = [number_in(each) for each in shares[0].whole]
        with tf.device(HOST):
            totals = tf.stack(numbers)
            groups = tf.constant(self._groups or [0] * totals.shape[0])
            alike = (groups[:, None] != groups) | (totals[:, None] == totals)
            assumed = tf.reduce_all(alike) & are_positive(shares)
            fits = tf.cond(assumed, lambda: tf.constant(True), put)
            checked = tf.debugging.Assert(fits, ["The batch needs a step of its own."])
        with tf.control_dependencies([checked]):
            return after_dependencies(shares)

    @property
    def is_full(self) -> bool:
        return self._queue is not None and int(self._queue.size()) > 0

    def take(self) -> tuple[Shares, int]:
        """The shares that the graph could not run, and how many batches it has run before."""
        number, *tensors = self._queue.dequeue()
        rest = iter(tensors)
        leaves = tf.nest.flatten(self._form, expand_composites=True)
        found = [None if leaf is None else next(rest) for leaf in leaves]
        rows = tf.nest.pack_sequence_as(self._form, found, expand_composites=True)
        return Shares(tuple(rows), None), int(number)


def has_open_axes(leaf: Any) -> bool:
    """Whether a dense leaf, or its spec, has open lengths besides its number of rows."""
    is_dense = isinstance(leaf, tf.Tensor | tf.TensorSpec)
    return is_dense and bool(leaf.shape.rank) and None in leaf.shape[1:]


def are_positive(shares: Any) -> tf.Tensor:
    """Whether the open lengths of a batch are 1 or more. All replicas have the same."""
    for rows in shares:
        if opened := [leaf for leaf in tf.nest.flatten(rows.data) if has_open_axes(leaf)]:
            shapes = []
            for leaf in opened:
                # Where the leaf is: elsewhere it would be copied for its shape.
                with leaf.graph.colocate_with(leaf.op):
                    shapes.append(tf.shape(leaf)[1:])
            return tf.reduce_all(tf.concat(shapes, axis=0) > 0)
    return tf.constant(True)


def after_dependencies(shares: Any) -> Any:
    """The shares, made by operations that wait for the current control dependencies."""

    def same(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        # Beside the iterator, whose device only its resource knows.
        with leaf.graph.colocate_with(leaf.op):
            return tf.identity(leaf)

    return tf.nest.map_structure(same, shares, expand_composites=True)
