"""Makes what a step of the user's own computes that of the whole batch.

A `train_step` that was written for one device calls loss objects, means, sums and a gradient
tape. Each replica runs it with some of the rows, so while it runs

    a loss object            returns the loss of the global batch
    a mean, sum or variance  is taken over the rows of all replicas, of all values of a tensor
                             or along the batch's axis; a sum of what all replicas have in
                             common (a penalty on weights) stays as it is
    `GradientTape.gradient`  returns, for variables, the sum over replicas

Sums over replicas are differentiable: the gradient of one is the sum of the gradients that
arrive on each. A loss made of such sums is the same number on N replicas, of which each
contributes one N-th (one without examples nothing), and then all gradients are those of one
device, whatever is done with the numbers in between.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, step_hooks
from keras_multigpu.training.exchange.packing import Packing, order_of_backward
from keras_multigpu.training.exchange.sparse_gradients import (
    of_table,
    rows_of_all,
    zero_unless,
)
from keras_multigpu.training.replica_pass.loss_reduction import (
    NeedsWholeBatch,
    refuse_ragged,
    weighted_values,
)
from keras_multigpu.training.shares import wide
from keras_multigpu.training.steps.present_step import (
    PresentStep,
    assignment,
    left_alone,
    step_of_user_code,
    turn,
)

ADVICE = (
    "Make it of `self.compute_loss(...)`, of Keras loss objects, or of `keras.ops.mean(values)`, "
    "`sum`, `var` and `std` over all axes: these count the rows of all replicas, and so they do "
    "along the batch's axis, unless the model runs eagerly. Write `ops.mean(values)` instead of "
    "dividing by `ops.shape(x)[0]`. Write what compares examples as a `keras.losses.Loss` that "
    "returns one number, or in `compute_loss` instead of `train_step`: these are given the rows of "
    "all replicas."
)


def loss_call(
    original: Callable[..., Any],
    self: keras.losses.Loss,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """`Loss.__call__` that returns the loss of the global batch."""
    step = step_of_user_code()
    if step is None or self.reduction in (None, "none"):
        return original(self, y_true, y_pred, sample_weight)
    step.require_outermost(f"The loss `{self.name}` is called")
    with left_alone():
        value = loss_of_all(step, self, original, (y_true, y_pred, sample_weight))
    return step.shared(tf.cast(value, self.dtype))


def loss_of_all(
    step: PresentStep, loss: keras.losses.Loss, original: Callable[..., Any], data: Any
) -> tf.Tensor:
    """The value of a loss object for the rows of all replicas."""
    try:
        values, divisor = weighted_values(loss, *data)
    except NeedsWholeBatch:
        everyones = everyones_rows(step, data)
        with graph_internals.single_device():
            return original(loss, *everyones)
    total = tf.reduce_sum(tf.cast(values, wide()))
    if loss.reduction == "sum":
        return sum_of_all(step, [total])[0] if "rows" in step.origins(total) else total
    count = tf.size(values) if divisor is None else divisor
    return tf.math.divide_no_nan(*sum_of_all(step, [total, tf.cast(count, wide())]))


def over_all_rows(
    of_all: Callable[..., tf.Tensor],
    original: Callable[..., Any],
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """A reduction of TensorFlow's: `of_all`, over the rows of all replicas."""
    step, values = values_of_user_code(input_tensor, axis)
    if step is None or not values.dtype.is_floating:
        return original(input_tensor, axis, keepdims, name)
    with left_alone():
        return of_all(step, values, axis, keepdims)


def mean_of_all(step: PresentStep, values: tf.Tensor, axis: Any, keepdims: bool) -> tf.Tensor:
    """The mean along these axes, over all replicas."""
    # In float16 no number of rows above 2,048 is exact.
    summed_in = tf.float64 if values.dtype == tf.float64 else tf.float32
    own = tf.reduce_sum(tf.cast(values, summed_in), axis, keepdims)
    each = tf.cast(tf.size(values) / tf.size(own), summed_in)
    total, count = sum_of_all(step, [own, each])
    return step.shared(tf.cast(total / count, values.dtype))


def moments_of_all(
    step: PresentStep, values: tf.Tensor, axis: Any, keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and the variance along these axes, over all replicas."""
    # About the mean of all: the mean of squares less the square of the mean keeps few digits where
    # the mean is large.
    middle = mean_of_all(step, values, axis, keepdims=True)
    variance = mean_of_all(step, tf.square(values - middle), axis, keepdims)
    return tf.reshape(middle, tf.shape(variance)), variance


def variance_of_all(step: PresentStep, values: tf.Tensor, axis: Any, keepdims: bool) -> tf.Tensor:
    """The variance along these axes, over all replicas."""
    return moments_of_all(step, values, axis, keepdims)[1]


def deviation_of_all(step: PresentStep, values: tf.Tensor, axis: Any, keepdims: bool) -> tf.Tensor:
    """The standard deviation along these axes, over all replicas."""
    return tf.sqrt(variance_of_all(step, values, axis, keepdims))


def both_moments(
    original: Callable[..., Any],
    x: Any,
    axes: Any,
    shift: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """`tf.nn.moments` over the rows of all replicas."""
    step, values = values_of_user_code(x, axes)
    if step is None or not values.dtype.is_floating:
        return original(x, axes, shift, keepdims, name)
    with left_alone():
        return moments_of_all(step, values, axes, keepdims)


def total(
    original: Callable[..., Any],
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """`tf.reduce_sum` that adds up what depends on rows over all replicas."""
    step, values = values_of_user_code(input_tensor, axis)
    if step is None or "rows" not in step.origins(values):
        return original(input_tensor, axis, keepdims, name)
    with left_alone():
        (value,) = sum_of_all(step, [tf.reduce_sum(values, axis, keepdims)])
    return step.shared(value, is_total=True)


def values_of_user_code(input_tensor: Any, axis: Any) -> tuple[PresentStep | None, Any]:
    """The step and the tensor, if the user's code reduces one along the batch's axis."""
    step = step_of_user_code()
    # In a branch or loop a tensor may be one example's, so there nobody can tell.
    if step is None or step.is_nested or step_hooks.called_by_library(depth=2):
        return None, None
    if isinstance(input_tensor, tf.RaggedTensor | tf.SparseTensor):
        return None, None
    values = tf.convert_to_tensor(input_tensor)
    rank = values.shape.rank
    axes = set[int]() if rank in (0, None) else axes_of(axis, rank)
    whole = rank != 0 and (axis is None or axes == set(range(rank or 0)))
    if not whole and not (axes and along_rows(step, values, axes)):
        return None, None
    return step, values


def axes_of(axis: Any, rank: int) -> set[int]:
    """What an `axis` argument names; nothing if that is known only when the graph runs."""
    if axis is None:
        return set(range(rank))
    named = tf.get_static_value(tf.convert_to_tensor(axis, tf.int32))
    return set() if named is None else {int(a) % rank for a in named.reshape(-1)}


def along_rows(step: PresentStep, values: tf.Tensor, axes: set[int]) -> bool:
    """Whether the batch's axis is among these, as far as its length tells."""
    if "rows" not in step.origins(values):
        return False
    shape = values.shape.as_list()
    if step.is_open:
        kept = [size for axis, size in enumerate(shape) if axis not in axes]
        return None in [shape[axis] for axis in axes] and None not in kept
    trait = step.flow.trait(values) if step.flow and not tf.executing_eagerly() else None
    if trait is not None and trait.kind == "rows":
        return trait.axis in axes
    if 0 in axes and shape[0] is not None and shape[0] in step.lengths:
        step.relates("a reduction along an axis as long as the share")
    return False


def gradient(
    original: Callable[..., Any],
    self: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """`GradientTape.gradient` that sums over replicas what it returns for variables."""
    step = step_of_user_code()
    if step is None or target is None:
        return original(self, target, sources, output_gradients, unconnected_gradients)
    flat = tf.nest.flatten(sources)
    if any(map(is_variable, flat)):
        step.require_outermost("A gradient with respect to variables is taken")
    elif step.is_nested:
        return original(self, target, sources, output_gradients, unconnected_gradients)
    in_common = [i for i, source in enumerate(flat) if is_in_common(step, source)]
    with left_alone():
        arriving = parts_of_one(step, target, output_gradients, bool(in_common))
        found = tf.nest.flatten(original(self, target, sources, arriving, unconnected_gradients))
        summed = summed_gradients(step, [flat[i] for i in in_common], [found[i] for i in in_common])
    for i, value in zip(in_common, summed, strict=True):
        found[i] = value
    step.with_gradient.update(id(flat[i]) for i in in_common)
    return tf.nest.pack_sequence_as(sources, found)


def parts_of_one(step: PresentStep, target: Any, output_gradients: Any, in_common: bool) -> Any:
    """What arrives at a target: one N-th on each replica where all have the same number."""
    # A target of the replica's own rows gets all of it, as the rows of others are not in it.
    targets = [tf.convert_to_tensor(t) for t in tf.nest.flatten(target)]
    origins = frozenset[str]().union(*(step.origins(t) for t in targets))
    scalar = any(t.shape.rank == 0 for t in targets)
    if "rows" in origins and scalar and in_common:
        step.relates("a gradient of a number made of a share")
    if "rows" in origins and "shared" not in origins:
        return output_gradients
    given = [None] * len(targets)
    if output_gradients is not None:
        given = tf.nest.flatten(output_gradients)
    part = tf.where(step.present, 1.0 / step.holders, 0.0)
    parts = [
        (tf.ones_like(t) if g is None else tf.convert_to_tensor(g)) * tf.cast(part, t.dtype)
        for t, g in zip(targets, given, strict=True)
    ]
    return tf.nest.pack_sequence_as(target, parts)


def summed_gradients(
    step: PresentStep, variables: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    """The sums of gradients over replicas; one without examples adds nothing."""
    result = list(gradients)
    dense = [
        i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)
    ]
    tensors = [
        zero_unless(step.present, tf.ensure_shape(tf.convert_to_tensor(result[i]), v.shape))
        for i in dense
        for v in [variables[i]]
    ]
    total = functools.partial(step.group.sum, differentiable=True)
    # What is packed has to know how long it is.
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        sent_as = [step.group.sent_as.get(tensor.dtype, tensor.dtype) for tensor in tensors]
        packing = Packing(tensors, order_of_backward([gradients[i] for i in dense]), sent_as)
        totals = packing.unpack(packing.summed(packing.pack(tensors), total))
    else:
        totals = total(tensors)
    for i, value in zip(dense, totals, strict=True):
        result[i] = step.shared(value)
    for i, value in enumerate(result):
        if isinstance(value, tf.IndexedSlices):
            result[i] = rows_of_all(step.group, of_table(value, variables[i]), step.present)
    return result


def is_variable(source: Any) -> bool:
    return isinstance(source, keras.Variable | tf.Variable)


def is_in_common(step: PresentStep, source: Any) -> bool:
    """Whether all replicas have the same source of gradients: a variable, or made of some."""
    if is_variable(source):
        return True
    return isinstance(source, tf.Tensor) and "rows" not in step.origins(source)


def sum_of_all(step: PresentStep, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over replicas; one without examples adds nothing."""
    return step.group.sum([zero_unless(step.present, value) for value in own], differentiable=True)


def losses_of_all(original: Callable[..., Any], self: keras.layers.Layer) -> list[tf.Tensor]:
    """`losses` of any layer, which lists what was added for a replica's rows: for all rows."""
    listed, step = original(self), step_of_user_code()
    if step is None:
        return listed
    with left_alone():
        return [step.shared(each) for each in sum_of_all(step, parts_of_added(step, listed))]


def parts_of_added(step: PresentStep, losses: Sequence[Any]) -> list[tf.Tensor]:
    """A replica's parts of the losses that layers and regularizers add, taken for means."""
    return [tf.cast(loss, wide()) * step.rows.fraction for loss in losses]


def everyones_rows(step: PresentStep, data: Any) -> Any:
    """The rows of all replicas, of which this replica's own can be differentiated."""
    refuse_ragged(data, step.group.count)
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    own_count = tf.where(step.present, tf.shape(leaves[0])[0], 0)
    (counts,) = step.group.gather([own_count[tf.newaxis]])
    first = tf.reduce_sum(counts[: step.replica.id])
    last = first + own_count

    def joined(leaf: Any) -> Any:
        if leaf is None:
            return None
        own = tf.convert_to_tensor(leaf)[:own_count]
        (everyones,) = step.group.gather([tf.stop_gradient(own)])
        if own.dtype.is_floating:
            # Each replica contributes one N-th of the loss; this makes up for it, adding nothing.
            own += tf.cast(step.holders - 1, own.dtype) * (own - tf.stop_gradient(own))
        return tf.concat([everyones[:first], own, everyones[last:]], axis=0)

    return tf.nest.map_structure(joined, data)


EXCHANGES: list[step_hooks.Exchange] = [
    (step_hooks.LOSSES, loss_call),
    (step_hooks.ADDED, losses_of_all),
    (step_hooks.MEANS, functools.partial(over_all_rows, mean_of_all)),
    (step_hooks.SUMS, total),
    (step_hooks.VARIANCES, functools.partial(over_all_rows, variance_of_all)),
    (step_hooks.DEVIATIONS, functools.partial(over_all_rows, deviation_of_all)),
    (step_hooks.MOMENTS, both_moments),
    (step_hooks.GRADIENTS, gradient),
    (step_hooks.VARIABLES, assignment),
    (step_hooks.TURNS, turn),
]
"""What is exchanged while a step of the user's own runs on several replicas."""
