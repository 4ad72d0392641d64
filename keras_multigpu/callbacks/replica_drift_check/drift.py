"""Checksums of the variables on each replica, computed on its own device, and what they tell.

    sum over all positions i of  mix(bits[i] + i * C)   modulo 2^32

The bits are taken as they are, so NaN equals NaN and 0.0 is not -0.0. For each position `mix`
is one to one: if a single 32-bit word differs, so does the sum. Changes of several words, such as
two that have changed places, are missed once in four thousand million times.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.training.exchange.stages import traced
from keras_multigpu.training.replica_group import ReplicaGroup, copies_in
from keras_multigpu.training.variables.model_state import name_of, storage_of, variables_of

# Odd, so that each of 2**32 positions has a multiple of its own.
STRIDE = 0x9E3779B1
# The finalizer of MurmurHash3: shifts and odd factors that spread each bit over all others.
ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))


class Copied(NamedTuple):
    """A variable with a copy on each replica of this process; forward passes change statistics."""

    name: str
    copies: tuple[tf.Variable, ...]
    is_statistic: bool


def copied_variables(model: keras.Model, group: ReplicaGroup) -> list[Copied]:
    """The variables that have a copy on each replica: weights, seeds, those of optimizers."""
    found: dict[str, Copied] = {}
    statistics = {id(v) for v in model.non_trainable_variables if "float" in str(v.dtype)}
    for variable in variables_of(model).values():
        storage = storage_of(variable)
        if storage is None:
            continue
        parts = copies_in(storage)
        # Of several processes each has a copy of every variable.
        if group.is_spread and len(parts) == 1:
            parts *= len(group.replicas)
        if len(parts) > 1 or group.is_spread:
            name = unused(name_of(variable), found)
            found[name] = Copied(name, parts, id(variable) in statistics)
    return list(found.values())


def unused(path: str, names: Any) -> str:
    """A path, with a number behind it where two variables have the same."""
    number, name = 1, path
    while name in names:
        number += 1
        name = f"{path} ({number})"
    return name


class Checksums:
    """Computes the checksums of some variables; compiled once."""

    def __init__(self, variables: Sequence[Copied]) -> None:
        self._copies = [variable.copies for variable in variables]
        specs = tuple(tf.TensorSpec(parts[0].shape, parts[0].dtype) for parts in self._copies)
        # XLA computes each sum in one pass over the words, without a second copy in memory.
        self._checksums: Callable[..., tf.Tensor] = traced(checksums, specs, jit_compile=True)

    def fits(self, variables: Sequence[Copied]) -> bool:
        known = [parts[0] for parts in self._copies]
        return len(known) == len(variables) and all(
            one is variable.copies[0] for one, variable in zip(known, variables, strict=True)
        )

    def by_replica(self) -> np.ndarray:
        """A row for each replica of this process with a checksum of each variable."""
        results = []
        for replica, part in enumerate(self._copies[0]):
            with tf.device(part.device):
                values = [parts[replica].read_value() for parts in self._copies]
                results.append(self._checksums(*values))
        # All devices have begun before the first one is waited for.
        return np.stack([result.numpy() for result in results])


def checksums(*values: tf.Tensor) -> tf.Tensor:
    return tf.stack([checksum(value) for value in values])


def checksum(value: tf.Tensor) -> tf.Tensor:
    words = words_of(value)
    positions = tf.cast(tf.range(tf.size(words)), tf.uint32)
    mixed = words + positions * tf.constant(STRIDE, tf.uint32)
    for shift, factor in ROUNDS:
        shifted = tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32))
        mixed = tf.bitwise.bitwise_xor(mixed, shifted) * tf.constant(factor, tf.uint32)
    return tf.reduce_sum(mixed)


def words_of(value: tf.Tensor) -> tf.Tensor:
    """A tensor's bits as words of 32; of smaller types a word for each element."""
    value = tf.reshape(value, [-1])
    if value.dtype == tf.bool:
        return tf.cast(value, tf.uint32)
    if value.dtype.size >= 4:
        return tf.reshape(tf.bitcast(value, tf.uint32), [-1])
    same_size = tf.uint16 if value.dtype.size == 2 else tf.uint8
    return tf.cast(tf.bitcast(value, same_size), tf.uint32)


def odd_ones(checks: Sequence[int]) -> tuple[int, list[int]]:
    """A replica that agrees with the most others, and those that differ from it."""
    groups = collections.Counter(checks)
    # Where two groups are of one size, the one with the first replica is believed.
    believed = max(groups, key=lambda check: (groups[check], -list(checks).index(check)))
    return list(checks).index(believed), [i for i, c in enumerate(checks) if c != believed]


class Drift(NamedTuple):
    """One variable whose copies differ.

    Attributes:
        variable: Its path.
        devices: The devices whose copies differ from the one that is believed.
        believed: The device of that one: in the majority, or else the first replica's.
        is_majority: Whether more replicas agree with it than with any other.
        elements: How many elements differ, on the device where most do.
        size: How many elements the variable has.
        largest: The largest difference; NaN where a value is not finite.
        epoch: The epoch, from zero.
        step: How many steps of it were done.
    """

    variable: str
    devices: list[str]
    believed: str
    is_majority: bool
    elements: int
    size: int
    largest: float
    epoch: int
    step: int

    def __str__(self) -> str:
        against = f"{self.believed} and most others" if self.is_majority else self.believed
        amount = f"by up to {self.largest:.3g}" if np.isfinite(self.largest) else "not finite"
        return (
            f"{self.variable} on {', '.join(self.devices)} differs from {against} in "
            f"{self.elements} of {self.size} values, {amount}"
        )


def values_of(variable: Copied, group: ReplicaGroup) -> list[np.ndarray]:
    """What each replica's copy holds, in the order of their ids; every process has to ask."""
    own = [part.numpy() for part in variable.copies]
    dtype, shape = own[0].dtype, own[0].shape
    # As bytes: sums, by which processes send numbers, would make 0.0 of -0.0.
    sent = [[tf.constant(np.frombuffer(value.tobytes(), np.uint8))] for value in own]
    everyones = [np.frombuffer(got.numpy().tobytes(), dtype) for (got,) in group.everyones(sent)]
    return [value.reshape(shape) for value in everyones]


def drift_of(
    variable: Copied,
    values: Sequence[np.ndarray],
    checks: Sequence[int],
    group: ReplicaGroup,
    epoch: int,
    step: int,
) -> Drift:
    """What has happened to a variable whose checksums differ."""
    believed, odd = odd_ones(checks)
    compared = [difference(values[believed], values[replica]) for replica in odd]
    most = len(checks) - len(odd)
    return Drift(
        variable.name,
        [group.name_of(replica) for replica in odd],
        group.name_of(believed),
        max(list(checks).count(checks[replica]) for replica in odd) < most,
        max(elements for elements, _ in compared),
        int(values[believed].size),
        float(np.max([largest for _, largest in compared])),
        epoch,
        step,
    )


def difference(right: np.ndarray, other: np.ndarray) -> tuple[int, float]:
    """How many elements differ in their bits, and by how much at most."""
    right, other = (np.ascontiguousarray(value).reshape(-1) for value in (right, other))
    width = right.dtype.itemsize
    bits = [value.view(np.uint8).reshape(-1, width) for value in (right, other)]
    elements = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    with np.errstate(invalid="ignore"):
        apart = np.abs(right[elements].astype(np.float64) - other[elements].astype(np.float64))
    return len(elements), float(apart.max()) if len(elements) else 0.0


def repair(
    variable: Copied, values: Sequence[np.ndarray], checks: Sequence[int], group: ReplicaGroup
) -> None:
    """Give the copies that differ the value of the one that is believed."""
    believed, odd = odd_ones(checks)
    for replica, copy in zip(group.replicas, variable.copies, strict=True):
        if replica.id in odd:
            with tf.device(copy.device):
                copy.assign(values[believed])
