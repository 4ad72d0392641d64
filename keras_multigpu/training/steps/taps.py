"""What one replica has of the tensors of a step: its loss, its gradients, its predictions.

A loss or a gradient is `Own`: what the replica's examples add to it, and what belongs to no
example, such as a penalty of weights. Of predictions a replica has its rows.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.partition.conversions import Value
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Block, Rows
from keras_multigpu.partition.planner import Scope
from keras_multigpu.partition.rules.sums import LINEAR, SCALED
from keras_multigpu.partition.splitter import Splitter
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.steps.step_record import StepRecord

# More operations than there are between a sum and a gradient.
MAX_DEPTH = 20

ADDED, FIRST = -1, -2
"""How the pieces of a share make up what the replica has, if not as rows along an axis."""


class Own(NamedTuple):
    """A replica's part of a tensor.

    Attributes:
        examples: What its examples add to it, or its rows; None if they add nothing.
        whole: What belongs to no example, and so to every replica; None if there is nothing.
    """

    examples: Any
    whole: Any


def first_of(part: Own) -> tf.Tensor:
    """The one of both that is there."""
    return part.whole if part.examples is None else part.examples


class Tapped(NamedTuple):
    """What a replica's part of a step returns of the taps, for a piece of its share.

    Attributes:
        loss: The replica's part of the loss.
        total_loss: The loss.
        own: The replica's part of each gradient; of values and indices of a sparse one.
        totals: The gradients.
        predictions: Its rows of the predictions' leaves, and of what Keras attached to these.
        statistics: The new values of layers' state.
    """

    loss: Own
    total_loss: tf.Tensor
    own: list[list[Own]]
    totals: list[list[tf.Tensor]]
    predictions: list[Any]
    statistics: list[tf.Tensor]


class Taps:
    """The taps of a step, while a replica's part of it is traced.

    Args:
        record: What was recorded of the step.

    Attributes:
        joins: The axis along which pieces have rows of each tensor of `Tapped`, `ADDED` or `FIRST`.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.joins: Any = None

    def of_replica(
        self, splitter: Splitter, scope: Scope, statistics: Sequence[Value], batch: str
    ) -> Tapped:
        """What a replica has, just after the splitter has added its part of the step.

        Args:
            splitter: What added the part.
            scope: What became of the tensors of the step.
            statistics: The new values of layers' state.
            batch: The name of the batch.
        """
        record = self.record
        gradients = [
            [scope.values[tensor.name] for tensor in parts_of(gradient)]
            for gradient, _ in record.gradients
        ]
        loss = scope.values[tf.convert_to_tensor(record.losses[0]).name]
        predictions = [
            prediction_of(splitter, scope, leaf, batch)
            for leaf in (*keras.tree.flatten(record.y_pred), *record.attached)
        ]
        self.joins = Tapped(
            Own(ADDED, FIRST),
            FIRST,
            [[Own(axis_of(value.layout, ADDED), FIRST) for value in parts] for parts in gradients],
            [[FIRST for _ in parts] for parts in gradients],
            [axis_of(layout, FIRST) for _, layout in predictions],
            [FIRST for _ in statistics],
        )
        return Tapped(
            own_part(splitter, loss),
            splitter.convert(loss, REPLICATED),
            [[own_part(splitter, value) for value in parts] for parts in gradients],
            [[splitter.convert(value, REPLICATED) for value in parts] for parts in gradients],
            [tensor for tensor, _ in predictions],
            [splitter.convert(value, REPLICATED) for value in statistics],
        )


def axis_of(layout: Any, otherwise: int) -> int:
    """The axis along which a replica has rows."""
    return layout.axis if isinstance(layout, Rows) else otherwise


def joined_pieces(pieces: Sequence[Tapped], joins: Tapped) -> Tapped:
    """What a replica has of its share, from what it has of each piece."""

    def joined(join: int, *parts: Any) -> Any:
        if join == FIRST or len(parts) == 1 or parts[0] is None:
            return parts[0]
        return functools.reduce(operator.add, parts) if join == ADDED else tf.concat(parts, join)

    whole: Tapped = tf.nest.map_structure(joined, joins, *pieces)
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


def own_part(splitter: Splitter, value: Value, depth: int = 0) -> Own:
    """A replica's part of a tensor, found in the linear operations that it comes from."""
    source, is_open = value.source, value.layout == PARTIAL
    plain = Own(value.local, None) if value.layout != REPLICATED else Own(None, value.local)
    if isinstance(value.layout, Rows) or source is None or not value.made_of or depth > MAX_DEPTH:
        return plain
    op, given = source.op, value.made_of
    places = {*range(len(given))[LINEAR.get(op.type, slice(0))], *SCALED.get(op.type, ())}
    if op.type == "Cast":
        places = {0}
    if not (source.dtype.is_floating and given[0].local.dtype.is_floating and places):
        return plain
    if any(isinstance(each.layout, Rows) for each in given):
        return plain
    parts = {place: own_part(splitter, given[place], depth + 1) for place in places}
    summed = [place for place, part in parts.items() if part.examples is not None]
    if op.type in SCALED:
        # The factor is the same for all.
        if len(summed) != 1:
            return plain
        parts = {place: parts[place] for place in summed}

    def result(kind: str) -> tf.Tensor | None:
        known = {place: getattr(part, kind) for place, part in parts.items()}
        if all(each is None for each in known.values()):
            return None
        inputs = []
        for place, each in enumerate(given):
            own = known[place] if place in known else splitter.convert(each, REPLICATED)
            inputs.append(tf.zeros_like(each.local) if own is None else own)
        return splitter.replica.run(op, inputs)[source.value_index]

    if not summed:
        return plain
    whole = result("whole")
    if not is_open:
        return Own(result("examples"), whole)
    if whole is None:
        return plain
    # Not from the operation's inputs: whether anything else holds one of these decides in which
    # order `AddN` adds them up, and a measurement must not change a number.
    first = tf.where(splitter.replica.is_first, whole, tf.zeros_like(whole))
    return Own(value.local - first, whole)


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
    loss = tf.convert_to_tensor(record.losses[0])
    return Tapped(
        Own(None, loss),
        loss,
        [[Own(None, part) for part in parts] for parts in gradients],
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
