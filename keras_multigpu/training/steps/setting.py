"""Where the steps of a model run."""

from typing import NamedTuple

from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.variables.placement import Placement


class Setting(NamedTuple):
    """Where the steps of a model run, and who looks into them.

    Attributes:
        group: The replicas.
        placement: Where the model's variables live.
        probes: What looks into steps of training.
        pieces: In how many pieces replicas take their shares.
        gathers_named: Of which gathers the user has been told.
        on_inexact: "one_device" or "error": what happens where a split step would give other
            numbers than one device.
        self_check: Whether it is tried before its first batch.
    """

    group: ReplicaGroup
    placement: Placement
    probes: tuple[Probe, ...]
    pieces: int
    gathers_named: set[str]
    on_inexact: str = "one_device"
    self_check: bool = False
