"""Where the steps of a model run."""

import logging
from typing import NamedTuple

from keras_multigpu.training.lengths import Groups
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.variables.placement import Placement

logger = logging.getLogger("keras_multigpu")


class Setting(NamedTuple):
    """Where the steps of a model run, and who looks into them.

    Attributes:
        group: The replicas.
        placement: Where the model's variables live.
        probes: What looks into steps of training.
        pieces: In how many pieces replicas take their shares.
        told: What the user has been told.
        on_inexact: "one_device" or "error": what happens where a split step would give other
            numbers than one device.
        self_check: Whether it is tried before its first batch.
        groups: Which leaves of the batches have equally many rows, see `lengths`.
    """

    group: ReplicaGroup
    placement: Placement
    probes: tuple[Probe, ...]
    pieces: int
    told: set[str]
    on_inexact: str = "one_device"
    self_check: bool = False
    groups: Groups = ()

    def say_alone(self, step: str, pieces: int, reason: str) -> None:
        """Say once that one replica takes whole batches in a step, not in pieces, and why."""
        at_once = f", and not in {pieces} micro-batches" if pieces > 1 else ""
        said = (
            f"One replica computes the whole of {step}{at_once}: {reason}. The results are those "
            "of one device, and the step is no faster."
        )
        if said not in self.told:
            self.told.add(said)
            logger.warning(said)
