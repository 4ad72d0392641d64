"""Mean and variance along the batch with one sum over replicas, where the rules would take two.

A variance is the mean of squared distances from the mean, so by the rules replicas sum the mean
first and the distances next. MobileNetV2 has 52 such pairs, and at each sum all wait for the
slowest replica. Here each replica computes the mean of its own rows and their squared distances
from it, and replicas add these up in double precision. That is as precise as one device, even for a
large mean, for which sums of plain squares would not be.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.facts.axes import static_axes
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import Layout, Rows
from keras_multigpu.partition.program import Operation, Program, Tensor, passed_on
from keras_multigpu.partition.replica import Replica


class Moments(NamedTuple):
    """The operations that compute the mean and the variance of a tensor."""

    mean: Operation
    variance: Operation


def find_moments(program: Program) -> dict[Operation, Moments]:
    """All means and variances of the same tensor along the same axes, by the means."""
    found = {}
    for op in program.operations:
        # `tf.nn.moments` computes them in one way, `tf.math.reduce_variance` in the other.
        if op.type == "SquaredDifference":
            whole, about = op.inputs
        elif op.type == "Square" and op.inputs[0].op.type == "Sub":
            whole, about = op.inputs[0].op.inputs
        else:
            continue
        mean = passed_on(about).op
        if mean.type == "StopGradient":
            mean = mean.inputs[0].op
        if not is_mean(mean) or not mean.get_attr("keep_dims") or mean.inputs[0] is not whole:
            continue
        for variance in op.outputs[0].users:
            if is_mean(variance) and variance.inputs[0] is op.outputs[0]:
                found[mean] = Moments(mean, variance)
    return found


def is_mean(op: Operation) -> bool:
    return op.type == "Mean" and op.outputs[0].dtype in (tf.float32, tf.float64)


def axes_of(moments: Moments, facts: Facts) -> list[int]:
    """The axes along which both are taken; none if that is not known."""
    axes, others = (static_axes(facts, op.inputs[1], moments.mean.inputs[0]) for op in moments)
    return sorted(set(axes or ())) if set(axes or ()) == set(others or ()) else []


def is_along_rows(moments: Moments, layouts: Mapping[Tensor, Layout], facts: Facts) -> bool:
    """Whether they are taken along the rows of a tensor whose lengths are known."""
    tensor = moments.mean.inputs[0]
    layout, dims = layouts[tensor], facts.dims(tensor)
    if not isinstance(layout, Rows) or dims is None or None in dims:
        return False
    return layout.axis in axes_of(moments, facts)


def joined_moments(
    moments: Moments,
    local: tf.Tensor,
    layout: Rows,
    facts: Facts,
    replica: Replica,
    total: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """The mean and the variance of all replicas' rows.

    Args:
        moments: The operations of the global graph.
        local: This replica's part of the tensor.
        layout: The layout of the tensor.
        facts: The facts of the global graph.
        replica: This replica.
        total: Sums a tensor over replicas.
    """
    dims: Any = facts.dims(moments.mean.inputs[0])
    axes = axes_of(moments, facts)
    own = tf.cast(replica.local_length(layout.blocks), tf.float64)
    every = replica.scalar(facts.length(layout.blocks), tf.float64)
    for axis in axes:
        if axis != layout.axis:
            length = replica.scalar(dims[axis], tf.float64)
            own, every = own * length, every * length
    over = tf.constant(axes)
    mean = tf.reduce_mean(local, over, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(local, mean), over, keepdims=True)
    mean, variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    # The mean of no rows is not a number.
    sums = tf.math.multiply_no_nan(tf.stack([mean, variance + tf.square(mean)]), own)
    sums = total(sums) / every
    mean, squares = tf.unstack(sums)
    variance = tf.maximum(squares - tf.square(mean), 0.0)
    results = []
    for op, tensor in zip(moments, (mean, variance), strict=True):
        tensor = tf.cast(tensor, op.outputs[0].dtype)
        results.append(tensor if op.get_attr("keep_dims") else tf.squeeze(tensor, axes))
    return results
