"""The values of each replica over some steps, and which replica is slow."""

from typing import NamedTuple

import numpy as np

from keras_multigpu.callbacks.timing import Sums, Timing, of_replicas
from keras_multigpu.training.replica_group import ReplicaGroup

# A replica that lags by a smaller fraction of a step is noise.
NOTABLE_LAG = 0.05

# How many times as long as the median of the others a replica computes that is behind.
SLOW_FACTOR = 1.25
# In how many measurements in a row it is behind before a warning names it.
SLOW_WINDOWS = 3


class Window(NamedTuple):
    """The values of each replica over some steps.

    Attributes:
        epoch: The epoch, from zero.
        step: How many of its steps were done.
        workers: The index of each replica's worker.
        devices: The replicas' devices.
        values: By name, a value for each replica; NaN if there is none.
    """

    epoch: int
    step: int
    workers: list[int]
    devices: list[str]
    values: dict[str, np.ndarray]


def window_of(
    epoch: int,
    step: int,
    group: ReplicaGroup,
    sums: Sums,
    scores: dict[str, np.ndarray],
    timing: Timing,
) -> Window:
    """A window from its sums and the timing. Every process has to call it."""
    timings = of_replicas(timing, group)
    steps = np.full(len(timings), float(timing.steps))
    # An epoch whose steps were all compiled has wall time, but no steps.
    wall = np.array([each.wall if timing.steps else 0.0 for each in timings])
    values = {
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
    replicas = range(group.count)
    workers, devices = [*map(group.worker_of, replicas)], [*map(group.device_of, replicas)]
    return Window(epoch, step, workers, devices, values)


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


class Slowest(NamedTuple):
    """A replica that stays behind.

    Attributes:
        replica: Its index.
        worker: The index of its worker.
        device: The name of its device.
        factor: How long its passes take, relative to the median of the others.
        windows: For how many measurements in a row.
    """

    replica: int
    worker: int
    device: str
    factor: float
    windows: int


def behind(window: Window, before: Slowest | None) -> Slowest | None:
    """The replica that is this much slower than the others' median, by more than noise."""
    times = window.values["compute_time"]
    if len(times) < 2 or np.isnan(times).any():
        return None
    index = int(np.argmax(times))
    time, others = float(times[index]), float(np.median(np.delete(times, index)))
    lag = NOTABLE_LAG * window.values["step_time"][index]
    if others <= 0 or time <= SLOW_FACTOR * others or time - others < lag:
        return None
    streak = before.windows if before is not None and before.replica == index else 0
    worker, device = window.workers[index], window.devices[index]
    return Slowest(index, worker, device, time / others, streak + 1)
