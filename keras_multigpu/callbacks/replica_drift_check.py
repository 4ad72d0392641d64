"""`ReplicaDriftCheck`: checks by checksums that all replicas hold the same weights.

Each replica computes the checksums of its copies on its own device:

    sum over all positions i of  mix(bits[i] + i * C)   modulo 2^32

It compares bits, so NaN equals NaN and 0.0 differs from -0.0. `mix` is one-to-one: if a single
32-bit word differs, so does the sum. Changes of several words, such as a swap, are missed with a
probability of 2^-32.
"""

import fnmatch
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import (
    problem,
    require_choice,
    require_positive_integer,
    value_error,
    warn,
)
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replica_group import ReplicaGroup, copies_in
from keras_multigpu.training.variables.model_state import name_of, storage_of, variables_of
from keras_multigpu.training.variables.placement import home_device
from keras_multigpu.writing import writes_here

NAMED = 5
"""How many variables a message names."""

# Odd, so that the multiples of all 2**32 positions differ.
STRIDE = 0x9E3779B1
# The finalizer of MurmurHash3: shifts and odd factors that spread each bit over all others.
ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))

logger = logging.getLogger("keras_multigpu")


class Drift(NamedTuple):
    """One variable whose copies differ.

    Attributes:
        variable: Its path.
        devices: The devices whose copies differ from the believed one.
        believed: The device of the believed copy: that of the most replicas, or the first one.
        is_majority: Whether more replicas agree with it than with any other.
        elements: How many elements differ, on the device with the most.
        size: How many elements the variable has.
        largest: The largest difference; NaN if a value is not finite.
        epoch: The epoch, from zero.
        step: How many of its steps were done.
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


class ReplicaDriftCheck(RunCallback):
    """Checks that all replicas hold the same weights, bit for bit.

    After every `every_steps` steps of an epoch and at its end, each replica computes a checksum of
    its copy of every variable on its own device, and only the checksums are exchanged. Copies drift
    apart if memory is faulty, if code assigns to one replica only, or if a kernel adds in a
    different order on one device.

    It works with any `train_step`, even in Keras's own `fit` under a `MirroredStrategy`.

    Args:
        every_steps: The number of steps between two checks.
        action: `"raise"` stops training with an error. `"warn"` warns at each check that finds
            something.
        ignore: Patterns of variable paths that are not compared, such as `["*/moving_mean"]`.

    Attributes:
        checks: How many checks were made in this `fit`.
        drifts: What they found: `variable`, `devices`, `believed`, `is_majority`, `elements`,
            `size`, `largest`, `epoch` and `step`.
    """

    def __init__(
        self, every_steps: int = 1000, *, action: str = "raise", ignore: Sequence[str] = ()
    ) -> None:
        super().__init__()
        require_positive_integer("every_steps", every_steps)
        require_choice("action", action, ("raise", "warn"))
        if isinstance(ignore, str) or not all(isinstance(one, str) for one in ignore):
            raise value_error(
                "`ignore` is not a list of patterns.",
                "Expected patterns of variable paths, in a list.",
                'Write for example `ignore=["*/moving_mean"]`.',
                ignore=ignore,
            )
        self.every_steps = every_steps
        self.action = action
        self.ignore = list(ignore)
        self.checks = 0
        self.drifts: list[Drift] = []
        self._group: ReplicaGroup | None = None
        self._checksums: Checksums | None = None
        self._epoch = self._step = self._checked_at = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.checks, self.drifts = 0, []
        strategy = self.model.distribute_strategy
        # Central storage has one copy, on one device.
        compares = strategy.num_replicas_in_sync > 1 and home_device(strategy) is None
        self._group = ReplicaGroup(strategy) if compares else None
        if not compares:
            logger.warning(
                "ReplicaDriftCheck: there is only one copy of the variables, so there is nothing "
                "to compare."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        run = self.run_or_none
        self._epoch = epoch
        self._step = self._checked_at = 0 if run is None else run.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self.every(self.every_steps, batch):
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._step > self._checked_at:
            self._check()

    def _check(self) -> None:
        self._checked_at = self._step
        group = self._group
        variables = [] if group is None else self._compared(group)
        if group is None or not variables:
            return
        if self._checksums is None or not self._checksums.fits(variables):
            self._checksums = Checksums(variables)
        own = self._checksums.by_replica()
        everyones = group.exchange_numbers([int(check) for check in own.ravel()])
        # Every process has the same table, so all of them raise, or none.
        checks = np.reshape(everyones, [group.count, -1])
        self.checks += 1
        different = np.flatnonzero((checks != checks[0]).any(axis=0))
        if not len(different):
            return
        where = self._epoch, self._step
        odd = [variables[index] for index in different]
        columns = checks.T[different].tolist()
        found = [drift_of(*each, group, *where) for each in zip(odd, columns, strict=True)]
        self.drifts += found
        text = self._describe(found, all(variable.is_statistic for variable in odd))
        if self.action == "raise":
            raise RuntimeError(text)
        if writes_here():
            warn(text, stacklevel=2)

    def _compared(self, group: ReplicaGroup) -> list["Copied"]:
        variables = copied_variables(self.model, group)
        names = [variable.name for variable in variables]
        for pattern in self.ignore:
            if not fnmatch.filter(names, pattern):
                raise value_error(
                    "A pattern in `ignore` does not match any variable.",
                    f"Expected paths such as {names[0] if names else 'dense/kernel'!r}.",
                    "Correct the pattern, or leave it out.",
                    pattern=pattern,
                )
        return [
            variable
            for variable in variables
            if not any(fnmatch.fnmatchcase(variable.name, pattern) for pattern in self.ignore)
        ]

    def _describe(self, found: list[Drift], only_statistics: bool) -> str:
        shown = "; ".join(str(drift) for drift in found[:NAMED])
        more = f"; and {len(found) - NAMED} more variables" if len(found) > NAMED else ""
        fix = (
            "Resume from an earlier checkpoint and test the memory of the device; make sure that "
            "no code assigns to a single copy."
        )
        if only_statistics and not isinstance(self.model, DistributedModel):
            fix = (
                "In Keras's own `fit` each replica keeps its own moving statistics: use "
                "`keras_multigpu.distribute`, which computes them over the whole batch, or "
                'leave them out, `ignore=["*/moving_mean", "*/moving_variance"]`.'
            )
        return problem(
            f"The replicas do not hold the same values: {shown}{more}.",
            "Expected every bit to be equal on all replicas.",
            fix,
            epoch=self._epoch,
            step=self._step,
            devices=sorted({device for drift in found for device in drift.devices}),
            variables=len(found),
        )


class Copied(NamedTuple):
    """A variable and its copies on the replicas of this process."""

    name: str
    copies: tuple[tf.Variable, ...]
    is_statistic: bool


def copied_variables(model: keras.Model, group: ReplicaGroup) -> list[Copied]:
    """The variables that have a copy on each replica: of layers, seeds and optimizers."""
    found = []
    statistics = {id(v) for v in model.non_trainable_variables if "float" in str(v.dtype)}
    for variable in variables_of(model).values():
        storage = storage_of(variable)
        if storage is None:
            continue
        parts = copies_in(storage)
        # Each of several processes has a copy of every variable.
        if group.is_spread and len(parts) == 1:
            parts *= len(group.replicas)
        if len(parts) > 1 or group.is_spread:
            found.append(Copied(name_of(variable), parts, id(variable) in statistics))
    return found


class Checksums:
    """Computes the checksums of some variables with one compiled function."""

    def __init__(self, variables: Sequence[Copied]) -> None:
        self._copies = [variable.copies for variable in variables]
        specs = tuple(tf.TensorSpec(parts[0].shape, parts[0].dtype) for parts in self._copies)
        # XLA computes each sum in one pass, without a second copy in memory.
        self._checksums: Callable[..., tf.Tensor] = tf.function(
            checksums, autograph=False, jit_compile=True
        ).get_concrete_function(*specs)

    def fits(self, variables: Sequence[Copied]) -> bool:
        present = [variable.copies for variable in variables]
        return len(present) == len(self._copies) and all(
            own[0] is other[0] for own, other in zip(self._copies, present, strict=True)
        )

    def by_replica(self) -> np.ndarray:
        """The checksum of each variable, with a row for each replica of this process."""
        results = []
        for replica, part in enumerate(self._copies[0]):
            with tf.device(part.device):
                values = [parts[replica].read_value() for parts in self._copies]
                results.append(self._checksums(*values))
        # Wait only after all devices have started.
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
    """A tensor's bits as 32-bit words; smaller types have a word for each element."""
    value = tf.reshape(value, [-1])
    if value.dtype == tf.bool:
        return tf.cast(value, tf.uint32)
    if value.dtype.size >= 4:
        return tf.reshape(tf.bitcast(value, tf.uint32), [-1])
    same_size = tf.uint16 if value.dtype.size == 2 else tf.uint8
    return tf.cast(tf.bitcast(value, same_size), tf.uint32)


def odd_ones(checks: list[int]) -> tuple[int, list[int]]:
    """The first replica of the largest group that agrees, and the replicas that differ from it."""
    # Of groups of the same size, the one with the first replica.
    believed = max(checks, key=checks.count)
    return checks.index(believed), [i for i, check in enumerate(checks) if check != believed]


def gather_values(variable: Copied, group: ReplicaGroup) -> list[np.ndarray]:
    """The value of each replica's copy, in the order of replicas. Every process has to call it."""
    own = [part.numpy() for part in variable.copies]
    dtype, shape = own[0].dtype, own[0].shape
    # As bytes: processes exchange numbers by sums, which would turn -0.0 into 0.0.
    sent = [[tf.constant(np.frombuffer(value.tobytes(), np.uint8))] for value in own]
    everyones = [
        np.frombuffer(got.numpy().tobytes(), dtype) for (got,) in group.gather_values(sent)
    ]
    return [value.reshape(shape) for value in everyones]


def drift_of(
    variable: Copied, checks: list[int], group: ReplicaGroup, epoch: int, step: int
) -> Drift:
    """Describe a variable whose checksums differ. Every process has to call it."""
    values = gather_values(variable, group)
    believed, odd = odd_ones(checks)
    differences = [difference(values[believed], values[replica]) for replica in odd]
    return Drift(
        variable.name,
        [group.name_of(replica) for replica in odd],
        group.name_of(believed),
        max(checks.count(checks[replica]) for replica in odd) < checks.count(checks[believed]),
        max(elements for elements, _ in differences),
        int(values[believed].size),
        float(np.max([largest for _, largest in differences])),
        epoch,
        step,
    )


def difference(one: np.ndarray, other: np.ndarray) -> tuple[int, float]:
    """How many elements differ in their bits, and the largest difference."""
    one, other = (np.ascontiguousarray(value).reshape(-1) for value in (one, other))
    bits = [value.view(np.uint8).reshape(len(value), -1) for value in (one, other)]
    elements = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    with np.errstate(invalid="ignore"):
        apart = np.abs(one[elements].astype(np.float64) - other[elements].astype(np.float64))
    return len(elements), float(apart.max()) if len(elements) else 0.0
