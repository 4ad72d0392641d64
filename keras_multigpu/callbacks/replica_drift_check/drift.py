"""What `ReplicaDriftCheck` finds: which copy of a variable differs, where, and by how much."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.replica_drift_check.checksums import Copied, odd_ones
from keras_multigpu.training.replica_group import ReplicaGroup


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
