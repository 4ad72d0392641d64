"""The numbers of rows that a replica knows when a step runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.sizes import AnySize, terms_of


class LocalNumbers:
    """The numbers of one replica: int32 scalars in the graph that all replicas run.

    Args:
        replica: Which replica this is.
        own: How many examples it has, by batch.
        before: How many examples those before it have, by batch.
        sizes: How large the sizes are that have names; for batches, of all replicas together.
        batches: The size of each batch: a name, or a number where the graph was traced for it.
        compiled: Whether XLA compiles the graph.
    """

    def __init__(
        self,
        replica: tf.Tensor,
        own: Mapping[str, tf.Tensor],
        before: Mapping[str, tf.Tensor],
        sizes: Mapping[str, tf.Tensor],
        batches: Mapping[str, AnySize],
        compiled: bool = False,
    ) -> None:
        self.replica, self.own, self.before = replica, own, before
        self.sizes, self.batches, self.compiled = sizes, batches, compiled
        self.is_first = tf.equal(replica, 0)
        self._graph = tf.compat.v1.get_default_graph()
        self._known: dict[Any, tf.Tensor] = {}

    def number(self, size: AnySize) -> tf.Tensor:
        """A size, as a scalar of the graph."""
        if isinstance(size, int):
            return tf.constant(size, tf.int32)
        if size not in self._known:
            # Where all graphs inside of loops and conditions see it.
            with self._graph.as_default():
                terms = []
                for names, coefficient in terms_of(size):
                    term = tf.constant(coefficient, tf.int32)
                    for place, name in enumerate(names):
                        first = place == 0 and coefficient == 1
                        term = self.sizes[name] if first else term * self.sizes[name]
                    terms.append(term)
                self._known[size] = terms[0] if len(terms) == 1 else tf.add_n(terms)
        return self._known[size]

    @property
    def is_outermost(self) -> bool:
        """Whether operations are now added outside all loops, conditions and functions."""
        return tf.compat.v1.get_default_graph() is self._graph

    @property
    def fraction(self) -> tf.Tensor:
        """The fraction of all examples that this replica has, in double precision."""
        if "fraction" not in self._known:
            name = next(iter(self.own))
            with self._graph.as_default():
                own, total = (
                    tf.cast(count, tf.float64)
                    for count in (self.own[name], self.number(self.batches[name]))
                )
                self._known["fraction"] = tf.math.divide_no_nan(own, total)
        return self._known["fraction"]

    def local_length(self, blocks: tuple[Block, ...]) -> tf.Tensor:
        """How many rows this replica has of an axis with these blocks."""
        if not blocks:
            return tf.constant(0, tf.int32)
        if blocks not in self._known:
            with self._graph.as_default():
                lengths = [self._times(self.own[batch], factor) for batch, factor in blocks]
                self._known[blocks] = lengths[0] if len(lengths) == 1 else tf.add_n(lengths)
        return self._known[blocks]

    def entries(self, blocks: tuple[Block, ...], others: Sequence[Any], is_own: bool) -> tf.Tensor:
        """How many entries there are along an axis of such blocks, and other axes: a float64.

        Args:
            blocks: What the axis is made of.
            others: The lengths of the others.
            is_own: Whether only this replica's are counted.
        """
        key = (blocks, tuple(others), is_own)
        if key not in self._known:
            with self._graph.as_default():
                length = (
                    self.local_length(blocks)
                    if is_own
                    else tf.add_n([self.number(self.batches[b] * f) for b, f in blocks])
                )
                # The product of several lengths may be larger than an int32.
                lengths = [length, *(self.number(other) for other in others)]
                count = tf.cast(lengths[0], tf.float64)
                for each in lengths[1:]:
                    count *= tf.cast(each, tf.float64)
                self._known[key] = count
        return self._known[key]

    def ranges(self, blocks: tuple[Block, ...]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Where this replica's rows of each block begin in the axis, and how many they are."""
        found, start = [], tf.constant(0, tf.int32)
        for batch, factor in blocks:
            first = start + self._times(self.before[batch], factor)
            found.append((first, self._times(self.own[batch], factor)))
            if len(blocks) > 1:
                start = start + self.number(self.batches[batch] * factor)
        return found

    def rows_of(self, whole: tf.Tensor, layout: Rows) -> tf.Tensor:
        """This replica's rows of a whole tensor."""
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

    def _times(self, count: tf.Tensor, factor: AnySize) -> tf.Tensor:
        return count if factor == 1 else count * self.number(factor)
