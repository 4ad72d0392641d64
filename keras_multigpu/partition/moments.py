"""Mean and variance along the batch with one sum over replicas, where the rules would take two.

A variance is the mean of squared distances from the mean, so by the rules replicas sum the mean
first and the distances next. MobileNetV2 has 52 such pairs, and at each sum all wait for the
slowest replica. Here each replica computes the mean of its own rows and their squared distances
from it, and replicas add these up in double precision. That is as precise as one device, even for a
large mean, for which sums of plain squares would not be.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.partition.axes import static_axes
from keras_multigpu.partition.facts import Facts
from keras_multigpu.partition.layouts import Layout, Rows
from keras_multigpu.partition.program import Operation, Program, passed_on
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


def joined_moments(
    moments: Moments,
    local: tf.Tensor,
    layout: Layout,
    facts: Facts,
    replica: Replica,
    total: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor] | None:
    """The mean and the variance of all replicas' rows; None unless they are taken along the rows.

    Args:
        moments: The operations of the global graph.
        local: This replica's part of the tensor.
        layout: The layout of the tensor.
        facts: The facts of the global graph.
        replica: This replica.
        total: Sums a tensor over replicas.
    """
    dims = [dim for dim in facts.dims(moments.mean.inputs[0]) or () if dim is not None]
    if not isinstance(layout, Rows) or len(dims) != moments.mean.inputs[0].shape.rank:
        return None
    axes, others = (static_axes(facts, op.inputs[1], moments.mean.inputs[0]) for op in moments)
    if axes is None or set(axes) != set(others or ()) or layout.axis not in axes:
        return None
    axes = sorted(set(axes))
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
    sums = tf.stack([mean, variance + tf.square(mean)]) * own
    # The mean of no rows is not a number.
    sums = total(tf.where(own > 0, sums, tf.zeros_like(sums))) / every
    mean, squares = tf.unstack(sums)
    variance = tf.maximum(squares - tf.square(mean), 0.0)
    results = []
    for op, tensor in zip(moments, (mean, variance), strict=True):
        tensor = tf.cast(tensor, op.outputs[0].dtype)
        results.append(tensor if op.get_attr("keep_dims") else tf.squeeze(tensor, axes))
    return results
