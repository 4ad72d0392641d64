"""What the parts of a split step return, and how the step's outputs are made of it."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.layouts import Layout, Rows
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.shares import tensors_of
from keras_multigpu.training.watching.stopwatch import Stopwatch


class PartResults(NamedTuple):
    """What one part of the step returns; the barrier is there once the new values are."""

    outputs: list[Any]
    new: list[Any]
    barrier: Any
    seen: Any


class ReplicaResult(NamedTuple):
    """What one replica has of a step.

    Attributes:
        pieces: What the part returned for each piece of its share.
        values: The values of variables before the step.
        summed: All sums over replicas.
    """

    pieces: list[PartResults]
    values: Sequence[tf.Tensor] = ()
    rows: Any = None
    watch: Stopwatch | None = None
    measured: list[list[tf.Tensor]] = []
    summed: Sequence[tf.Tensor] = ()


def at_once(*tensors: Any) -> contextlib.AbstractContextManager[None]:
    """Assign each new value in this context as soon as it and these tensors are there."""
    known = tensors_of(tensors)
    return tf.control_dependencies([tf.group(*known)] if known else [])


def after(
    results: Sequence[ReplicaResult], *others: tf.Tensor | None
) -> contextlib.AbstractContextManager[None]:
    """Assign nothing before every replica has all its new values, and others are there."""
    done = [piece.barrier for result in results for piece in result.pieces]
    known = [each for each in (*done, *others) if each is not None]
    return tf.control_dependencies([tf.identity(each) for each in known])


def joined_outputs(
    group: ReplicaGroup, results: Sequence[ReplicaResult], layouts: Sequence[Layout]
) -> list[tf.Tensor]:
    """The outputs of the whole step: the rows of all parts, and other outputs of the first.

    Args:
        layouts: How the parts hold each output; none if one part has computed everything.
    """
    found = list(results[0].pieces[0].outputs)
    axes = {place: each.axis for place, each in enumerate(layouts) if isinstance(each, Rows)}
    if not axes:
        return found
    own = [
        [
            concatenated([with_axis_first(piece.outputs[place], axis) for piece in result.pieces])
            for place, axis in axes.items()
        ]
        for result in results
    ]
    wholes = own[0] if group.count == 1 else group.gather_on_first(own)
    for (place, axis), whole in zip(axes.items(), wholes, strict=True):
        found[place] = with_axis_first(whole, axis)
    return found


def concatenated(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def with_axis_first(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """The tensor with its first axis and this one swapped, so twice gives the tensor again."""
    if axis == 0:
        return tensor
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = axis, 0
    return tf.transpose(tensor, order)
