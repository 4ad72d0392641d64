"""What a pass over a replica's rows finds out besides tensors: what lies where in them.

A pass returns its `Layout` beside its outcome. Whoever reads the outcome, or its sum over
replicas, is given the layout with it; a pass itself remembers nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.training.exchange.packing import Packing, order_of_backward
from keras_multigpu.training.exchange.sparse_gradients import (
    alike,
    is_sparse,
    of_table,
    square_norm,
)
from keras_multigpu.training.replica_pass.additive_metrics import Additive
from keras_multigpu.training.replica_pass.output_rows import Counts


class Summands(NamedTuple):
    """What one replica adds to the sums over replicas; gradients come last to be."""

    losses: list[tf.Tensor] = []
    others: list[tf.Tensor] = []
    metrics: list[tf.Tensor] = []
    gradients: list[Any] = []


class GradientKinds(NamedTuple):
    """Whose gradients there are, by the places of the trainable variables.

    Attributes:
        dense: Those with a dense gradient.
        sparse: Those of whose gradient there are rows.
        alike: What `alike` says of these, in their order.
        yielded: The order of the dense gradients in the backward pass.
    """

    dense: list[int] = []
    sparse: list[int] = []
    alike: tuple[int | None, ...] = ()
    yielded: list[int] = []


class Layout(NamedTuple):
    """What lies where in an outcome.

    Attributes:
        packing: Where the summands lie in the packs.
        sizes: How many summands there are of each kind.
        gradients: Whose gradients there are.
        changed: Where the variables stand that the pass has changed; seeds excluded.
        metrics: Which metrics have summands; none in prediction.
        counts: How many rows each output has for an example, where the batch is taken in parts.
    """

    packing: Packing
    sizes: list[int]
    gradients: GradientKinds
    changed: list[int]
    metrics: Additive
    counts: Counts

    def sums(self, packs: Sequence[tf.Tensor]) -> Summands:
        """The summands in packs, or the sums."""
        flat = iter(self.packing.unpack(packs))
        return Summands(*(list(itertools.islice(flat, size)) for size in self.sizes))

    def first_loss(self, packs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The first of `sums(packs).losses`, by itself."""
        return self.packing.one(packs, 0)

    def square_norm(
        self, packs: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices]
    ) -> tf.Tensor:
        """The sum of the squares of all gradients, from packs and sparse gradients."""
        dense = self.packing.endings(packs, sum(self.sizes[:-1]))
        squares = [2.0 * tf.nn.l2_loss(tf.cast(part, tf.float32)) for part in dense]
        return tf.add_n([tf.zeros(()), *squares, *map(square_norm, slices)])


def packed(
    summands: Summands, yielded: Sequence[int], sent_as: Callable[[tf.DType], tf.DType]
) -> tuple[Packing, list[int], list[tf.Tensor]]:
    """How summands lie in packs, how many there are of each kind, and the packs.

    Gradients come to be in the order `yielded`, and are summed in another dtype; see `sent_as`.
    """
    flat = [tensor for part in summands for tensor in part]
    first = len(flat) - len(summands.gradients)
    order = [*range(first), *(first + index for index in yielded)]
    dtypes = [
        sent_as(tensor.dtype) if index >= first else tensor.dtype
        for index, tensor in enumerate(flat)
    ]
    packing = Packing(flat, order, dtypes)
    return packing, [len(part) for part in summands], packing.pack(flat)


def connected(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], arriving: Sequence[Any] = ()
) -> tuple[list[Any], GradientKinds]:
    """The gradients that exist, dense ones first, and whose they are.

    Where gradients were made of what the backward pass has yielded, this is `arriving`.
    """
    known = [i for i, gradient in enumerate(gradients) if gradient is not None]
    sparse = [i for i in known if is_sparse(gradients[i])]
    dense = [i for i in known if i not in sparse]
    first = arriving or gradients
    kinds = GradientKinds(
        dense,
        sparse,
        tuple(alike(gradients[i]) for i in sparse),
        order_of_backward([gradients[i] if first[i] is None else first[i] for i in dense]),
    )
    tensors = [
        *(tf.reshape(gradients[i], variables[i].shape) for i in dense),
        *(of_table(gradients[i], variables[i]) for i in sparse),
    ]
    return tensors, kinds
