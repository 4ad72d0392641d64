"""What one replica has of the tensors of a step: its loss, its gradients, its predictions.

Taps are tensors of the step of one device. A replica's part of the step returns for each of them:

    an open sum      what the replica adds to it, with all pieces of its share
    rows             its own
    any other        the value, which all replicas have
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.partition.conversions import Value
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Block, Rows
from keras_multigpu.partition.planner import Scope
from keras_multigpu.partition.sizes import Size
from keras_multigpu.partition.splitter import Splitter
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.steps.replica_values import NoReplicaLoss, ReplicaValues
from keras_multigpu.training.steps.step_record import StepRecord

ALONE = {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "StopGradient", "Transpose"}
ADDED = {"Add", "AddN", "AddV2", "Sub"}
# More operations than there are between a sum and a gradient.
MAX_DEPTH = 20


class Tapped(NamedTuple):
    """What a replica's part of a step returns of the taps, for a piece of its share.

    Attributes:
        loss: The loss as if the replica's examples were all; empty if there is none.
        total_loss: The loss.
        own: The replica's part of each gradient; values and indices of a sparse one.
        totals: The gradients.
        predictions: Its rows of the predictions' leaves, and of what Keras attached to these.
        statistics: The new values of layers' state, from its own examples.
    """

    loss: list[tf.Tensor]
    total_loss: tf.Tensor
    own: list[list[tf.Tensor]]
    totals: list[list[tf.Tensor]]
    predictions: list[Any]
    statistics: list[tf.Tensor]


class Taps:
    """The taps of a step, while a replica's part of it is traced.

    Args:
        record: What was recorded of the step.

    Attributes:
        axes: The axis along which pieces have rows of each tensor of `Tapped`; -1 without rows.
        is_sum: Which gradients are sums over replicas.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.axes: Any = None
        self.is_sum: list[bool] = []

    def of_replica(
        self,
        splitter: Splitter,
        scope: Scope,
        statistics: Sequence[Value],
        examples: tf.Tensor,
        batch: str,
    ) -> Tapped:
        """What a replica has, just after the splitter has added its part of the step.

        Args:
            splitter: What added the part.
            scope: What became of the tensors of the step.
            statistics: The new values of layers' state.
            examples: How many examples the replica has, in all pieces.
            batch: The name of the batch.
        """
        record = self.record
        own = ReplicaValues(splitter, examples, batch, record.given)
        of_layers = ReplicaValues(splitter, examples, batch, None)
        gradients = [
            [scope.values[tensor.name] for tensor in parts_of(gradient)]
            for gradient, _ in record.gradients
        ]
        local = [[own_part(splitter, value) for value in parts] for parts in gradients]
        loss = scope.values[tf.convert_to_tensor(record.losses[0]).name]
        total = splitter.convert(loss, REPLICATED)
        is_open = splitter.exchange.replicas == 1 or isinstance(
            splitter.replica.batches[batch], Size
        )
        try:
            if not is_open:
                raise NoReplicaLoss
            of_replica = [tf.where(examples > 0, own(loss), tf.zeros_like(total))]
        except NoReplicaLoss:
            of_replica = []
        predictions = [
            prediction_of(splitter, scope, leaf, batch)
            for leaf in (*keras.tree.flatten(record.y_pred), *record.attached)
        ]
        self.is_sum = [any(part is not None for part in parts) for parts in local]
        self.axes = Tapped(
            [-1] * len(of_replica),
            -1,
            [[axis_of(value.layout) for value in parts] for parts in gradients],
            [[-1 for _ in parts] for parts in gradients],
            [axis_of(layout) for _, layout in predictions],
            [-1 for _ in statistics],
        )
        return Tapped(
            of_replica,
            total,
            [
                [own_in_all_pieces(splitter, *each) for each in zip(parts, own_ones, strict=True)]
                for parts, own_ones in zip(gradients, local, strict=True)
            ],
            [[splitter.convert(value, REPLICATED) for value in parts] for parts in gradients],
            [tensor for tensor, _ in predictions],
            [of_layers.or_whole(value) for value in statistics],
        )


def axis_of(layout: Any) -> int:
    """The axis along which a replica has rows; -1 without rows."""
    return layout.axis if isinstance(layout, Rows) else -1


def joined_pieces(pieces: Sequence[Tapped], axes: Tapped) -> Tapped:
    """What a replica has of its share, from what it has of each piece."""

    def joined(axis: int, *parts: Any) -> Any:
        if axis < 0 or len(parts) == 1:
            return parts[0]
        return tf.concat(parts, axis)

    whole: Tapped = tf.nest.map_structure(joined, axes, *pieces)
    return whole


def parts_of(gradient: Any) -> list[tf.Tensor]:
    """The tensors of a gradient; values and indices of a sparse one."""
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def gradient_of(parts: Sequence[tf.Tensor], variable: keras.Variable) -> Any:
    """The gradient from its `parts_of`."""
    if len(parts) == 1:
        return parts[0]
    values, indices = parts
    return tf.IndexedSlices(values, indices, tf.constant(tuple(variable.shape), tf.int64))


def own_part(splitter: Splitter, value: Value, depth: int = 0) -> tf.Tensor | None:
    """A replica's part of a tensor: its rows, or its summand; None if it has neither.

    What all replicas have and is added to a sum counts in proportion to the replica's examples.
    """
    source = value.source
    if value.layout == PARTIAL or isinstance(value.layout, Rows):
        return value.local
    if source is None or not value.made_of or depth > MAX_DEPTH or not source.dtype.is_floating:
        return None
    if value.layout != REPLICATED or source.op.type not in ALONE | ADDED | {"Mul"}:
        return None
    alone = source.op.type in ALONE
    parts = [
        own_part(splitter, each, depth + 1) if not alone or place == 0 else None
        for place, each in enumerate(value.made_of)
    ]
    rows = [isinstance(each.layout, Rows) for each in value.made_of]
    known = [part for part in parts if part is not None]
    if not known or any(rows) or (source.op.type == "Mul" and len(known) > 1):
        return None
    inputs = []
    for part, each in zip(parts, value.made_of, strict=True):
        if part is None:
            part = each.local
            if source.op.type in ADDED:
                part *= tf.cast(splitter.replica.fraction, part.dtype)
        inputs.append(part)
    return splitter.again(value, inputs, whole=True)


def own_in_all_pieces(splitter: Splitter, value: Value, part: tf.Tensor | None) -> tf.Tensor:
    """What a replica has of a gradient, in all pieces of its share; rows of this piece."""
    if part is None:
        return value.local
    return part if isinstance(value.layout, Rows) else splitter.exchange.sum_over_pieces(part)


def prediction_of(
    splitter: Splitter, scope: Scope, leaf: Any, batch: str
) -> tuple[tf.Tensor | None, Any]:
    """What a replica has of a leaf of the predictions, with its layout."""
    value = scope.values.get(leaf.name) if isinstance(leaf, tf.Tensor) else None
    if value is None:
        return None, None
    layout, dims = value.layout, scope.facts.dims(leaf)
    if not isinstance(layout, Rows):
        layout = REPLICATED
        of_batch = Rows(0, (Block(batch),))
        if dims and dims[0] == scope.facts.length(of_batch.blocks):
            layout = of_batch
    return splitter.convert(value, layout), layout


def tapped_without_graph(taps: Taps, model: keras.Model) -> Tapped:
    """The taps of a step that one replica has run for the whole batch, without a graph."""
    record = taps.record
    gradients = [parts_of(gradient) for gradient, _ in record.gradients]
    taps.is_sum = [False] * len(gradients)
    loss = tf.convert_to_tensor(record.losses[0])
    return Tapped(
        [loss],
        loss,
        gradients,
        gradients,
        [*keras.tree.flatten(record.y_pred), *record.attached],
        [
            tf.convert_to_tensor(variable)
            for variable in model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        ],
    )


def square_norm_of_all(gradients: Sequence[Any]) -> tf.Tensor:
    """The sum of the squares of dense and sparse gradients, in few operations."""
    dense = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    summands = [*Packing(dense).pack(dense)]
    summands += [row_sums(each) for each in gradients if isinstance(each, tf.IndexedSlices)]
    squares = [tf.reduce_sum(tf.square(tf.cast(each, tf.float32))) for each in summands]
    return tf.add_n([tf.zeros(()), *squares])


def row_sums(gradient: tf.IndexedSlices) -> tf.Tensor:
    """The rows of a sparse gradient, with the values of each row added up."""
    rows, positions = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(rows)[0])
