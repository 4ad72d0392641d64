"""Where a rule adds a replica's part of an operation to the graph."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.layouts import Block, Layout, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.sizes import AnySize

BARRIER = "computed_again_after"
"""In the name of an `IdentityN` none of whose results is there before all that it is given."""


class Site:
    """Adds a replica's part of an operation to the default graph.

    All replicas run what is added here, so whatever differs between them is a number that is known
    when the step runs.

    Args:
        op: The operation of the global graph.
        numbers: What the replica knows of its rows.
    """

    def __init__(self, op: tf.Operation, numbers: LocalNumbers) -> None:
        self.op, self.numbers = op, numbers

    def run(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The operation itself, on these inputs."""
        is_barrier = self.op.type == "IdentityN" and BARRIER in self.op.name
        if is_barrier and self.numbers.compiled:
            return graph_internals.barrier_for_xla(inputs)
        return copied(self.op, inputs)

    def number(self, size: AnySize) -> tf.Tensor:
        """A size, known when the step runs: an int32 scalar."""
        return self.numbers.number(size)

    def local_length(self, blocks: tuple[Block, ...]) -> tf.Tensor:
        """How many rows of such an axis this replica has: an int32 scalar."""
        return self.numbers.local_length(blocks)

    def local_shape(self, shape: tf.Tensor, layout: Layout) -> tf.Tensor:
        """A replica's shape of a tensor with this global shape."""
        if not isinstance(layout, Rows):
            return shape
        return with_entry(shape, layout.axis, self.local_length(layout.blocks))


def copied(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of an operation of another graph on these inputs."""
    # An attribute with an underscore says where the operation was made, or for which device.
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


def with_entry(vector: tf.Tensor, place: int, entry: tf.Tensor) -> tf.Tensor:
    """A vector (or the rows of a matrix) with another entry at a place."""
    entry = tf.cast(entry, vector.dtype)
    known = tf.get_static_value(vector)
    if known is not None and known.ndim == 1:
        # TensorFlow then still sees the other entries.
        return tf.stack([entry if n == place else each for n, each in enumerate(np.array(known))])
    return tf.concat([vector[:place], [entry], vector[place + 1 :]], 0)
