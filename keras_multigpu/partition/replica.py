"""What a replica knows of itself when a step runs: its rows of each batch, and all sizes."""

import contextlib
import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.layouts import Block, Layout, Rows, Shard
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.sizes import AnySize, Size, terms_of

BARRIER = "computed_again_after"
"""Marks the name of an `IdentityN` that yields nothing before all its inputs are there."""


class Replica:
    """One replica, as int32 scalars in the graph that all replicas run.

    All replicas run the same graph, so whatever differs between them is one of these scalars. A GPU
    keeps int32 scalars, and what it makes of them, on the host, where the shapes of its tensors are
    made.

    Args:
        index: The number of this replica.
        own: How many examples it has, by batch.
        before: How many examples the replicas before it have, by batch.
        sizes: The value of each named size; for batches, that of the global batch.
        batches: The size of each batch: a name, or a number if the graph was traced for it.
        place: Its place among those that divide variables.
        compiled: Whether XLA compiles the graph.
        on_cpu: Whether some replicas are CPUs.
        keeps_terms: Whether it has a term of its own of each open sum in a variable; by default
            these are whole.

    Attributes:
        known: What several operations take, made once.
    """

    def __init__(
        self,
        index: tf.Tensor,
        own: Mapping[str | Shard, tf.Tensor],
        before: Mapping[str | Shard, tf.Tensor],
        sizes: Mapping[str, tf.Tensor],
        batches: Mapping[str, AnySize],
        place: tf.Tensor | None = None,
        compiled: bool = False,
        on_cpu: bool = True,
        keeps_terms: tf.Tensor | None = None,
    ) -> None:
        self._keeps_terms = keeps_terms
        self.index, self.own, self.before = index, own, before
        self.place = index if place is None else place
        self.sizes, self.batches, self.compiled = sizes, batches, compiled
        self._is_apart = not (compiled or on_cpu)
        self.is_first = tf.equal(index, 0)
        self._graph = tf.compat.v1.get_default_graph()
        self.known: dict[Any, tf.Tensor] = {}

    def run(self, op: Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add an operation of the global graph to the default graph, with these inputs."""
        if self.compiled and op.type == "IdentityN" and BARRIER in op.name:
            return graph_internals.barrier_for_xla(inputs)
        return graph_internals.copy_operation(op.raw, inputs)

    def scalar(self, size: AnySize, dtype: tf.DType = tf.int32) -> tf.Tensor:
        """A size as a scalar; a product may be too large for an int32."""
        if isinstance(size, int):
            return tf.constant(size, dtype)
        if (size, dtype) not in self.known:
            # The outermost graph, so that loops and conditions can all use it.
            with self._graph.as_default():
                terms = []
                for names, coefficient in terms_of(size):
                    factors = [tf.cast(self.sizes[name], dtype) for name in names]
                    if coefficient != 1 or not factors:
                        factors.insert(0, tf.constant(coefficient, dtype))
                    terms.append(functools.reduce(operator.mul, factors))
                self.known[size, dtype] = terms[0] if len(terms) == 1 else tf.add_n(terms)
        return self.known[size, dtype]

    def size_of(self, batch: str | Shard) -> AnySize:
        """How many examples a batch has in all."""
        return batch.length if isinstance(batch, Shard) else self.batches[batch]

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        """The context for int64 numbers of which shapes are made, which a GPU would keep itself."""
        return tf.device("/device:CPU:0") if self._is_apart else contextlib.nullcontext()

    @property
    def is_outermost(self) -> bool:
        """Whether the default graph is the outermost one, not that of a loop or a condition."""
        return tf.compat.v1.get_default_graph() is self._graph

    def local_length(self, blocks: tuple[Block, ...]) -> tf.Tensor:
        """How many rows this replica has of an axis with these blocks."""
        if not blocks:
            return tf.constant(0, tf.int32)
        if blocks not in self.known:
            with self._graph.as_default():
                lengths = [self._times(self.own[batch], factor) for batch, factor in blocks]
                self.known[blocks] = lengths[0] if len(lengths) == 1 else tf.add_n(lengths)
        return self.known[blocks]

    def local_shape(self, shape: tf.Tensor, layout: Layout | None) -> tf.Tensor:
        """The shape of this replica's part of a tensor with this global shape."""
        if not isinstance(layout, Rows):
            return shape
        return with_entry(shape, layout.axis, self.local_length(layout.blocks))

    def shape_of(self, dims: Sequence[AnySize], layout: Layout | None) -> tf.Tensor:
        """The shape of this replica's part of a tensor whose axes have these global lengths."""
        shape = [self.scalar(dim) for dim in dims]
        if isinstance(layout, Rows):
            shape[layout.axis] = self.local_length(layout.blocks)
        return tf.stack(shape) if shape else tf.zeros([0], tf.int32)

    def ranges(self, blocks: tuple[Block, ...]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For each block of an axis, where this replica's rows begin and how many there are."""
        found, start = [], tf.constant(0, tf.int32)
        for batch, factor in blocks:
            first = start + self._times(self.before[batch], factor)
            found.append((first, self._times(self.own[batch], factor)))
            if len(blocks) > 1:
                start = start + self.scalar(self.size_of(batch) * factor)
        return found

    def term_of(self, value: tf.Tensor) -> tf.Tensor:
        """Its term of an open sum in a variable."""
        is_own = self.is_first if self._keeps_terms is None else self.is_first | self._keeps_terms
        return tf.where(is_own, value, nothing(value.dtype))

    def rows_of(self, whole: tf.Tensor, layout: Rows) -> tf.Tensor:
        """This replica's rows of a whole tensor."""
        if not layout.blocks:
            # An axis of no length has none.
            return whole
        rank, axis = whole.shape.rank, layout.axis
        parts = []
        for first, length in self.ranges(layout.blocks):
            if rank is None:
                parts.append(tf.gather(whole, tf.range(first, first + length), axis=axis))
            else:
                begin = [first if at == axis else 0 for at in range(rank)]
                size = [length if at == axis else -1 for at in range(rank)]
                parts.append(tf.slice(whole, begin, size))
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis)

    @functools.cached_property
    def with_rows(self) -> "Replica":
        """This replica, had it one example of each batch of which it has none."""
        found = copy.copy(self)
        with self._graph.as_default():
            found.own = {name: tf.maximum(count, 1) for name, count in self.own.items()}
        found.known = {}
        return found

    def padded(self, tensor: tf.Tensor, layout: Rows) -> tf.Tensor:
        """A tensor in rows as `with_rows` has it; with rows already, it takes no time."""
        shape = [None if at == layout.axis else n for at, n in enumerate(tensor.shape)]
        key = "padding", len(shape), layout
        if key not in self.known:
            with self._graph.as_default():
                more = self.with_rows.local_length(layout.blocks)
                more -= self.local_length(layout.blocks)
                places = [[0, at == layout.axis] for at in range(len(shape))]
                self.known[key] = tf.constant(places, tf.int32) * more
        # Not `Pad`, which TensorFlow fuses with a convolution: oneDNN's kernel for both looks at
        # the rows before padding, and without any returns its input (2.21).
        zero = nothing(tensor.dtype)
        padded = tf.raw_ops.PadV2(input=tensor, paddings=self.known[key], constant_values=zero)
        padded.set_shape(shape)
        return padded

    def unpadded(self, tensor: tf.Tensor, layout: Rows) -> tf.Tensor:
        """The part of a tensor of `with_rows` that is this replica's."""
        rank = tensor.shape.rank
        key = "size", rank, layout
        if key not in self.known:
            with self._graph.as_default():
                length = self.local_length(layout.blocks)
                self.known[key] = tf.stack(
                    [length if at == layout.axis else -1 for at in range(rank)]
                )
        return tf.slice(tensor, [0] * rank, self.known[key])

    def tensor_of(self, value: np.ndarray, dtype: tf.DType) -> tf.Tensor:
        """A tensor with these sizes as its entries."""
        if not any(isinstance(entry, Size) for entry in value.ravel()):
            entries = np.array(value.tolist()).reshape(value.shape)
            # Many operations take the same shapes and axes.
            graph = tf.compat.v1.get_default_graph()
            key = graph, dtype, entries.dtype, entries.shape, entries.tobytes()
            if key not in self.known:
                self.known[key] = tf.constant(entries, dtype, shape=value.shape)
            return self.known[key]
        scalars = [self.scalar(entry, dtype) for entry in value.ravel()]
        return tf.reshape(tf.stack(scalars), value.shape)

    def _times(self, count: tf.Tensor, factor: AnySize) -> tf.Tensor:
        return count if factor == 1 else count * self.scalar(factor)


def with_entry(vector: tf.Tensor, place: int, entry: tf.Tensor) -> tf.Tensor:
    """A vector, or the rows of a matrix, with another entry at a place."""
    entry = tf.cast(entry, vector.dtype)
    known = tf.get_static_value(vector)
    if known is not None and known.ndim == 1:
        # TensorFlow can then still infer the other entries.
        return tf.stack([entry if n == place else each for n, each in enumerate(np.array(known))])
    return tf.concat([vector[:place], [entry], vector[place + 1 :]], 0)


def nothing(dtype: tf.DType) -> tf.Tensor:
    """The number that changes no other in a sum."""
    # Added to 0.0, -0.0 would become 0.0.
    return tf.cast(tf.constant(-0.0) if dtype.is_floating else tf.constant(0), dtype)
