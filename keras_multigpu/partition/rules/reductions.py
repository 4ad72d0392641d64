"""Reductions along some axes."""

import math
from dataclasses import replace

import tensorflow as tf

from keras_multigpu.partition.facts.axes import REDUCTIONS, static_axes
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import PARTIAL, Layout, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules.axes import along_axis
from keras_multigpu.partition.rules.plan import Emit, Plan, only, rows_of
from keras_multigpu.partition.rules.registration import rows_rule
from keras_multigpu.partition.rules.sums import FLOATS


@rows_rule(*REDUCTIONS)
def reduction(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, axes = rows_of(ins, 0), static_axes(facts, op.inputs[1], op.inputs[0])
    if axes is None or found is None:
        return None
    if op.type == "Mean" and found.axis in axes:
        emit = part_of_mean(op, found, sorted(set(axes)), facts)
        is_float = op.outputs[0].dtype in FLOATS
        return Plan(only({0: found}, 2), (PARTIAL,), emit) if is_float else None

    def along_known_axes(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        # For a batch of one row TensorFlow may compute other axes than the known ones: those of the
        # sum that gives a gradient the shape of what was broadcast.
        is_one = op.inputs[1].shape.rank == 0
        over = tf.constant(axes[0] if is_one else axes, inputs[1].dtype)
        return replica.run(op, [inputs[0], over])

    plan = along_axis(op, ins, facts)
    return None if plan is None else replace(plan, emit=along_known_axes)


def part_of_mean(op: Operation, found: Rows, axes: list[int], facts: Facts) -> Emit:
    """The sum of a replica's rows, divided by the number of entries of all replicas."""
    dims = facts.dims(op.inputs[0]) or [None] * (max(axes) + 1)
    lengths = [facts.length(found.blocks) if axis == found.axis else dims[axis] for axis in axes]

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        value = inputs[0]
        # Like TensorFlow, sum small floats in larger ones.
        wide = value.dtype if value.dtype.size > 2 else tf.float32
        sum_ = tf.reduce_sum(tf.cast(value, wide), axes, keepdims=op.get_attr("keep_dims"))
        # The product of several lengths may be larger than an int32.
        count = float(math.prod(length for length in lengths if isinstance(length, int)))
        for axis, length in zip(axes, lengths, strict=True):
            if not isinstance(length, int):
                unknown = tf.cast(tf.shape(value)[axis], tf.float64)
                count *= unknown if length is None else replica.scalar(length, tf.float64)
        return [tf.cast(sum_ / tf.cast(count, wide), value.dtype)]

    return emit
