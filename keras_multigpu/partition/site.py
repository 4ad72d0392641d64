"""The place where a replica's part of an operation is added to a graph."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.layouts import Block, Layout, Rows
from keras_multigpu.partition.sizes import AnySize, terms_of


class LocalSite:
    """Adds a replica's part of an operation to the default graph.

    All replicas run what is added here, so whatever differs between them is a number that is known
    when the step runs.

    Args:
        op: The operation of the global graph.
        numbers: The numbers that sizes are made of, by name: int32 scalars.
        local: How many examples of each batch this replica has: int32 scalars.
        made: Sizes that have been computed in this graph; sites of one graph share it.
    """

    def __init__(
        self,
        op: tf.Operation,
        numbers: Mapping[str, tf.Tensor],
        local: Mapping[str, tf.Tensor],
        made: dict[AnySize, tf.Tensor] | None = None,
    ) -> None:
        self.op = op
        self._numbers = numbers
        self._local = local
        self._made = {} if made is None else made

    def run(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The operation itself, on these inputs."""
        op = self.op
        # An attribute with an underscore tells where the operation was made, or for which device.
        attributes = {
            name: value for name, value in op.node_def.attr.items() if not name.startswith("_")
        }
        return list(
            tf.compat.v1.get_default_graph()
            .create_op(
                op.type,
                [t if isinstance(t, tf.Tensor) else tf.convert_to_tensor(t) for t in inputs],
                [tensor.dtype for tensor in op.outputs],
                name=op.name,
                attrs=attributes,
                op_def=op.op_def,
            )
            .outputs
        )

    def number(self, size: AnySize) -> tf.Tensor:
        """A size, known when the step runs: an int32 scalar."""
        if size not in self._made:
            self._made[size] = total(
                [
                    product([self._numbers[name] for name in names], coefficient)
                    for names, coefficient in terms_of(size)
                ]
            )
        return self._made[size]

    def local_length(self, blocks: tuple[Block, ...]) -> tf.Tensor:
        """How many rows of such an axis this replica has: an int32 scalar."""
        return total(
            [
                self._local[batch]
                if isinstance(factor, int) and factor == 1
                else self._local[batch] * self.number(factor)
                for batch, factor in blocks
            ]
        )

    def local_shape(self, shape: tf.Tensor, layout: Layout) -> tf.Tensor:
        """A replica's shape of a tensor with this global shape."""
        if not isinstance(layout, Rows):
            return shape
        return with_entry(shape, layout.axis, self.local_length(layout.blocks))


def product(factors: list[tf.Tensor], coefficient: int) -> tf.Tensor:
    if coefficient != 1 or not factors:
        factors = [tf.constant(coefficient), *factors]
    found = factors[0]
    for factor in factors[1:]:
        found *= factor
    return found


def total(terms: list[tf.Tensor]) -> tf.Tensor:
    if not terms:
        return tf.constant(0)
    found = terms[0]
    for term in terms[1:]:
        found += term
    return found


def with_entry(vector: tf.Tensor, place: int, entry: tf.Tensor) -> tf.Tensor:
    """A vector (or the rows of a matrix) with another entry at a place."""
    entry = tf.cast(entry, vector.dtype)
    known = tf.get_static_value(vector)
    if known is not None and known.ndim == 1:
        # TensorFlow then still sees the other entries.
        return tf.stack([entry if n == place else each for n, each in enumerate(np.array(known))])
    return tf.concat([vector[:place], [entry], vector[place + 1 :]], 0)
