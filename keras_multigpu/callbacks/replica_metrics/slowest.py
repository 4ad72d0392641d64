"""The values of each replica in an epoch, and which replica is slow."""

from typing import NamedTuple

import numpy as np

from keras_multigpu.callbacks.timing import Sums, Timing, of_replicas
from keras_multigpu.training.replica_group import ReplicaGroup

# A replica that lags by a smaller fraction of a step is noise.
NOTABLE_LAG = 0.05

# How many times as long as the median of the others a replica computes that is behind.
SLOW_FACTOR = 1.25
# In how many epochs in a row it is behind before a warning names it.
SLOW_EPOCHS = 3


def measure(
    group: ReplicaGroup, sums: Sums, scores: dict[str, np.ndarray], timing: Timing
) -> dict[str, np.ndarray]:
    """By name a value for each replica; NaN if there is none. Every process has to call it."""
    timings = of_replicas(timing, group)
    steps = np.full(len(timings), float(timing.steps))
    # An epoch whose steps were all compiled has wall time, but no steps.
    wall = np.array([each.wall if timing.steps else 0.0 for each in timings])
    return {
        "loss": ratio(sums.loss, sums.examples),
        **{name: np.where(sums.examples > 0, value, np.nan) for name, value in scores.items()},
        "examples": sums.examples,
        "examples_per_second": ratio(timing.sums.examples, wall),
        "gradient_norm": ratio(sums.gradient_norm, sums.present),
        "compute_time": ratio(timing.sums.compute, steps),
        "sync_time": ratio(timing.sums.sync, steps),
        "step_time": ratio(wall, steps),
        "data_wait": ratio(np.array([each.data_wait for each in timings]), steps),
    }


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


class Slowest(NamedTuple):
    """A replica that stays behind.

    Attributes:
        replica: Its index.
        worker: The index of its worker.
        device: The name of its device.
        factor: How long its passes take, relative to the median of the others.
        epochs: For how many epochs in a row.
    """

    replica: int
    worker: int
    device: str
    factor: float
    epochs: int


def behind(
    measured: dict[str, np.ndarray], group: ReplicaGroup, before: Slowest | None
) -> Slowest | None:
    """The replica that is this much slower than the others' median, by more than noise."""
    times = measured["compute_time"]
    if len(times) < 2 or np.isnan(times).any():
        return None
    index = int(np.argmax(times))
    time, others = float(times[index]), float(np.median(np.delete(times, index)))
    lag = NOTABLE_LAG * measured["step_time"][index]
    if others <= 0 or time <= SLOW_FACTOR * others or time - others < lag:
        return None
    streak = before.epochs if before is not None and before.replica == index else 0
    worker, device = group.worker_of(index), group.device_of(index)
    return Slowest(index, worker, device, time / others, streak + 1)
