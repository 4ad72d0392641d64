"""`StepRequest`: what to make a step of."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.shares import Batch, Groups
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.variables.placement import Placement

logger = logging.getLogger("keras_multigpu")

NO_SPEC: Batch = (None, None, None)


class StepRequest(NamedTuple):
    """A step to make: what one device would run, for which batches, and where it runs.

    Attributes:
        model: The model, or the `Parts` that a custom training loop uses.
        function: The step as one device runs it, given a batch: `model.train_step`, say.
        probes: What callbacks measure in steps of training.
        pieces: In how many pieces a replica takes its share.
        warned_of: The warnings that the user has seen.
        on_inexact: "one_device" or "error": what happens where a split step would give other
            numbers than one device.
        self_check: Whether it is tried before its first batch.
        trains: Whether `fit` runs it, which counts its changes of the model.
        may_stop: Whether workers ask each other in it who wants to stop.
        shards: Whether each replica of this process keeps a part of the optimizer's state.
        at_once: Whether it assigns each variable as soon as the new value is there, and not once
            all are. A step that fails may then have assigned some.
        spec: The specs of the batches.
        groups: Which leaves have equally many rows, see `shares`.
    """

    model: Any
    function: Callable[[Any], Any]
    group: ReplicaGroup
    placement: Placement
    probes: tuple[Probe, ...]
    pieces: int
    warned_of: set[str]
    on_inexact: str
    self_check: bool
    trains: bool
    may_stop: bool = False
    shards: bool = False
    at_once: bool = False
    spec: Batch = NO_SPEC
    groups: Groups = ()

    @property
    def name(self) -> str:
        """The name of the step, for messages."""
        return getattr(self.function, "__name__", "the step")

    def warn_of_one_replica(self, reason: object, step: str = "") -> None:
        """Warn once that one replica takes whole batches, and why."""
        whole = f", and not in {self.pieces} micro-batches" if self.pieces > 1 else ""
        self.warn(
            f"One replica computes the whole of {step or self.name}{whole}: {reason}. The results "
            "are those of one device, and the step is no faster."
        )

    def warn(self, text: str, key: str | None = None) -> None:
        """Log a warning, once for each text, or each key."""
        if (key or text) not in self.warned_of:
            self.warned_of.add(key or text)
            logger.warning(text)
