"""`ReplicaDriftCheck`: proves that all replicas hold the same weights."""

import fnmatch
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.replica_drift_check.drift import (
    Checksums,
    Copied,
    Drift,
    copied_variables,
    drift_of,
    repair,
    values_of,
)
from keras_multigpu.checks import (
    problem,
    require_choice,
    require_positive_integer,
    value_error,
    warn,
)
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.variables.placement import home_device
from keras_multigpu.writing import writes_here

NAMED = 5
"""How many variables a message names."""

logger = logging.getLogger("keras_multigpu")


class ReplicaDriftCheck(keras.callbacks.Callback):
    """Proves every n steps that all replicas hold the same weights, bit for bit.

    Each replica computes a checksum of its copy of every variable on its own device; only the
    checksums travel. Compared are weights, statistics, seeds and the variables of optimizers.
    A single copy changes when memory is faulty, when code assigns to one replica only, or when
    a kernel adds in another order on one device. Training then goes on without an error, and the
    replicas drift apart.

    Checks happen after each `every_steps` steps of an epoch and when an epoch ends; in between
    nothing is computed. It works with `keras_multigpu.distribute` and also in Keras's own `fit`
    under a `MirroredStrategy`, with any `train_step`. There each replica keeps moving
    statistics of its own, which is found and said: see `ignore`.

    Args:
        every_steps: The number of steps between two checks.
        action: `"raise"` stops training with an error. `"warn"` warns and goes on. `"repair"`
            warns and gives the copies that differ the value that most replicas have, or, where
            there is no majority, as with two replicas, the first replica's.
        ignore: Patterns of variable paths that are not compared, such as
            `["*/moving_mean", "*/moving_variance"]`.

    Attributes:
        checks: How many checks were made in this `fit`.
        drifts: What they found.
    """

    def __init__(
        self, every_steps: int = 1000, *, action: str = "raise", ignore: Sequence[str] = ()
    ) -> None:
        super().__init__()
        require_positive_integer("every_steps", every_steps)
        require_choice("action", action, ("raise", "warn", "repair"))
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
        self.checks, self.drifts = 0, []
        strategy = self.model.distribute_strategy
        # Of central storage there is one copy, which is on one device.
        compares = strategy.num_replicas_in_sync > 1 and home_device(strategy) is None
        self._group = ReplicaGroup(strategy) if compares else None
        if not compares:
            logger.warning(
                "ReplicaDriftCheck: there is one copy of the variables, so there is nothing to "
                "compare."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        run = getattr(self.model, "training_run", None)
        self._epoch = epoch
        self._step = self._checked_at = 0 if run is None else run.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self._step // self.every_steps > self._checked_at // self.every_steps:
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
        everyones = group.of_processes([int(check) for check in own.ravel()])
        # The same table in every process, so that all of them raise, or none.
        checks = np.reshape(everyones, [group.count, -1])
        self.checks += 1
        if (checks == checks[0]).all():
            return
        different = np.flatnonzero((checks != checks[0]).any(axis=0))
        found = []
        for index in different:
            variable, of_variable = variables[index], checks[:, index].tolist()
            values = values_of(variable, group)
            where = self._epoch, self._step
            found.append(drift_of(variable, values, of_variable, group, *where))
            if self.action == "repair":
                repair(variable, values, of_variable, group)
        self.drifts += found
        text = self._text(found, all(variables[index].is_statistic for index in different))
        if self.action == "raise":
            raise RuntimeError(text)
        if writes_here():
            warn(text, stacklevel=2)

    def _compared(self, group: ReplicaGroup) -> list[Copied]:
        variables = copied_variables(self.model, group)
        names = [variable.name for variable in variables]
        for pattern in self.ignore:
            if not fnmatch.filter(names, pattern):
                raise value_error(
                    "A pattern of `ignore` does not match any variable.",
                    f"Expected paths such as {names[0] if names else 'dense/kernel'!r}.",
                    "Correct the pattern, or leave it out.",
                    pattern=pattern,
                )
        return [
            variable
            for variable in variables
            if not any(fnmatch.fnmatchcase(variable.name, pattern) for pattern in self.ignore)
        ]

    def _text(self, found: list[Drift], only_statistics: bool) -> str:
        shown = "; ".join(str(drift) for drift in found[:NAMED])
        more = f"; and {len(found) - NAMED} more variables" if len(found) > NAMED else ""
        return problem(
            f"The replicas do not hold the same values: {shown}{more}.",
            "Expected every bit to be equal on all replicas.",
            self._fix(only_statistics),
            epoch=self._epoch,
            step=self._step,
            devices=sorted({device for drift in found for device in drift.devices}),
            variables=len(found),
        )

    def _fix(self, only_statistics: bool) -> str:
        if only_statistics and not isinstance(self.model, DistributedModel):
            return (
                "In Keras's own `fit` each replica keeps moving statistics of its own: use "
                "`keras_multigpu.distribute`, which averages them in every step, or "
                'leave them out, `ignore=["*/moving_mean", "*/moving_variance"]`.'
            )
        if self.action == "repair":
            return "The copies that differ are overwritten; look after the device if it recurs."
        return (
            "Go on from an earlier checkpoint and test the memory of the device; see that no code "
            'assigns to a single copy; or let `action="repair"` overwrite the copies that differ.'
        )
