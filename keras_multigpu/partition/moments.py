"""Means and variances along the batch: both by one sum, where the general rules need two.

A variance is made of distances from the mean, so by the general rules the mean is summed first,
then the distances. MobileNetV2 has 52 such pairs, and each sum is a wait for the slowest replica.
So each replica takes its own mean and squared distances from that, and these are joined in double
precision: they are as good as those of one device, also where the mean is large, which the sums of
plain squares would not be.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.partition.facts import passed_on
from keras_multigpu.partition.layouts import Layout, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.plan import Facts, static_axes


class Moments(NamedTuple):
    """Operations that take the mean and the variance of a tensor.

    Args:
        mean: What takes the mean.
        distances: What takes the squared distances from it.
        variance: What takes their mean.
    """

    mean: tf.Operation
    distances: tf.Operation
    variance: tf.Operation


def moments_in(operations: Iterable[tf.Operation]) -> dict[str, Moments]:
    """All means and variances of the same tensor along the same axes, by the names of the means."""
    found = {}
    for op in operations:
        # As `tf.nn.moments` and `tf.math.reduce_variance` take them.
        squared = op.type == "SquaredDifference" or (
            op.type == "Square" and op.inputs[0].op.type == "Sub"
        )
        if not squared:
            continue
        whole, about = (op if op.type == "SquaredDifference" else op.inputs[0].op).inputs
        mean = passed_on(about).op
        if mean.type == "StopGradient":
            mean = mean.inputs[0].op
        if not is_mean(mean) or not mean.get_attr("keep_dims") or mean.inputs[0].name != whole.name:
            continue
        for variance in op.outputs[0].consumers():
            if is_mean(variance) and variance.inputs[0].name == op.outputs[0].name:
                found[mean.name] = Moments(mean, op, variance)
    return found


def is_mean(op: tf.Operation) -> bool:
    return op.type == "Mean" and op.outputs[0].dtype in (tf.float32, tf.float64)


def axes_of(moments: Moments, layout: Layout, facts: Facts) -> list[int] | None:
    """The axes along which moments are taken; None unless the rows' axis is among them."""
    dims = facts.dims(moments.mean.inputs[0])
    if dims is None or None in dims or not isinstance(layout, Rows):
        return None
    one, other = (
        static_axes(facts, op.inputs[1], len(dims)) for op in (moments.mean, moments.variance)
    )
    if one is None or other is None or set(one) != set(other) or layout.axis not in one:
        return None
    return sorted(set(one))


def joined_moments(
    local: tf.Tensor,
    axes: list[int],
    layout: Rows,
    total: Callable[[tf.Tensor], tf.Tensor],
    facts: Facts,
    moments: Moments,
    numbers: LocalNumbers,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and the variance of all replicas' rows.

    Args:
        local: A replica's rows.
        axes: The axes along which moments are taken.
        layout: How the rows lie.
        total: Sums a tensor over replicas.
        facts: What is known of the global graph.
        moments: The operations there.
        numbers: What the replica knows of its rows.
    """
    dims = facts.dims(moments.mean.inputs[0]) or []
    others = [dims[axis] for axis in axes if axis != layout.axis]
    own, every = (numbers.entries(layout.blocks, others, each) for each in (True, False))
    over = tf.constant(axes)
    mean = tf.reduce_mean(local, over, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(local, mean), over, keepdims=True)
    mean, variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    sums = tf.stack([mean, variance + tf.square(mean)]) * own
    # The mean of no rows is not a number.
    sums = total(tf.where(own > 0, sums, tf.zeros_like(sums))) / every
    mean, squares = tf.unstack(sums)
    variance = tf.maximum(squares - tf.square(mean), 0.0)
    result = []
    for op, tensor in ((moments.mean, mean), (moments.variance, variance)):
        tensor = tf.cast(tensor, op.outputs[0].dtype)
        result.append(tensor if op.get_attr("keep_dims") else tf.squeeze(tensor, axes))
    return result[0], result[1]
