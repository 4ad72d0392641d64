"""Storages in parts: variables whose rows the replicas of a process divide.

An optimizer's slot, such as Adam's average of a weight's gradients, is as large as its weight. Both
may be divided; whether they are depends on their shapes alone. Whoever reads one outside of a split
step gets all of it, so checkpoints, files and callbacks do not know about parts.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import runtime_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.keras_internals.optimizer_internals import AT_ONCE, SMALL
from keras_multigpu.keras_internals.variable_internals import VariableInParts
from keras_multigpu.partition.layouts import REPLICATED, Block, Layout, Rows, Shard
from keras_multigpu.training.replica_group import HOST, copies_in


def can_be_divided(variable: Any, replicas: int) -> bool:
    """Whether each replica gets a part of a variable of this shape and type."""
    # Small ones are updated together with others.
    if math.prod(variable.shape) < SMALL or not tf.as_dtype(variable.dtype).is_floating:
        return False
    shard = shard_of(variable.shape)
    return -(-shard.length // shard.unit) >= replicas


def are_parts(storage: Any, devices: Sequence[str]) -> bool:
    """Whether a storage has its parts on these devices."""
    if not isinstance(storage, VariableInParts):
        return False
    return [part.device for part in storage.parts] == list(devices)


def shard_of(shape: Sequence[int]) -> Shard:
    """How the longest axis of a variable is divided."""
    longest = max(shape)
    # A processor handles several numbers at once and a remainder one by one, which may round
    # otherwise. In parts of such multiples, an update has the same bits as in one.
    return Shard(longest, AT_ONCE // math.gcd(AT_ONCE, math.prod(shape) // longest))


def in_parts(
    value: Any, name: str, devices: Sequence[str], trainable: bool = False
) -> VariableInParts:
    """A storage with this value, whose parts are on these devices."""
    whole, parts = np.asarray(value), []
    axis, shard = whole.shape.index(max(whole.shape)), shard_of(whole.shape)
    with tf.init_scope(), graph_internals.single_device():
        for place, device in enumerate(devices):
            rows = slice(*shard.bounds(place, len(devices)))
            with tf.device(device):
                # A copy: TensorFlow may keep what it is given.
                own = np.array(whole[(*[slice(None)] * axis, rows)])
                parts.append(tf.Variable(own, dtype=own.dtype, trainable=trainable, name=name))
        return VariableInParts(parts, axis, refuse_other_loops)


def for_one_device(storage: Any) -> tf.Variable:
    """The variable that a graph of one device has in place of a storage."""
    if isinstance(storage, VariableInParts):
        return storage.stand_in
    return copies_in(storage)[0]


def layout_of(storage: Any) -> Layout:
    """The layout in which replicas have a variable."""
    if not isinstance(storage, VariableInParts):
        return REPLICATED
    return Rows(storage.axis, (Block(shard_of(storage.shape.as_list())),))


@contextlib.contextmanager
def whole_values(storages: Sequence[Any]) -> Iterator[None]:
    """Let graphs of one device read and assign these storages, in parts or not."""
    found = [storage for storage in storages if isinstance(storage, VariableInParts)]
    with tf.device(HOST):
        for storage in found:
            storage.stand_in.assign(storage)
    try:
        yield
    finally:
        with tf.device(HOST):
            for storage in found:
                storage.assign(storage.stand_in)
                storage.stand_in.empty()


def refuse_other_loops() -> None:
    raise runtime_error(
        "Replicas of a loop assigned a variable that is sharded: each has a part of it.",
        "Expected `fit`, `train_on_batch`, a `train_step`, or a step under `kmg.function`.",
        "Put `@kmg.function` on the step of your loop, or leave `shard` out.",
    )
