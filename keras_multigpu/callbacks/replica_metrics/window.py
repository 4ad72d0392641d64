"""What each replica did in some steps, and who stays behind."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.callbacks.timing import Sums, Timing
from keras_multigpu.training.replica_group import ReplicaGroup

# A lag below this part of a step is not worth a word: on small steps it is noise.
NOTABLE_LAG = 0.05

WHERE = ("epoch", "step", "replica", "worker", "device")
"""What comes before the values in a row of a file."""


class Place(NamedTuple):
    """Where the replicas run: each one's process, by its index among the workers, and device."""

    workers: list[int]
    devices: list[str]

    @classmethod
    def of(cls, group: ReplicaGroup) -> "Place":
        replicas = range(group.count)
        return cls([*map(group.worker_of, replicas)], [*map(group.device_of, replicas)])


class Window(NamedTuple):
    """The values of each replica over some steps.

    Attributes:
        epoch: The epoch, from zero.
        step: How many of its steps were done.
        place: Where they run.
        values: By name, a value for each replica; NaN where there is none.
        compute: For each replica the seconds that a pass took.
    """

    epoch: int
    step: int
    place: Place
    values: dict[str, np.ndarray]

    @property
    def rows(self) -> list[dict[str, Any]]:
        place = self.place
        return [
            {
                "epoch": self.epoch,
                "step": self.step,
                "replica": index,
                "worker": worker,
                "device": device,
                **{name: plain(values[index]) for name, values in self.values.items()},
            }
            for index, (worker, device) in enumerate(zip(*place, strict=True))
        ]

    @property
    def extremes(self) -> dict[str, dict[str, float | None]]:
        """By name the minimum, the maximum and the spread over replicas that have a value."""
        found = {}
        for name, values in self.values.items():
            known = values[~np.isnan(values)]
            low, high = (known.min(), known.max()) if len(known) else (np.nan, np.nan)
            # Without a replica that diverged to infinity the spread would be NaN for no reason.
            spread = 0.0 if low == high else high - low
            found[name] = {"min": plain(low), "max": plain(high), "spread": plain(spread)}
        return found


def plain(value: Any) -> float | int | None:
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def window_of(
    epoch: int,
    step: int,
    place: Place,
    sums: Sums,
    scores: dict[str, np.ndarray],
    timings: Sequence[Timing],
) -> Window:
    """A window from what was added up in it, and from the timing of each replica's process."""
    timing = timings[0]
    present = sums.of_replicas("present")
    examples = sums.of_replicas("examples")
    steps = np.full(len(present), float(timing.steps))
    of_replicas = timing.sums.of_replicas
    # Where every step was compiled there is wall time, and no step it belongs to.
    wall = np.array([each.wall if timing.steps else 0.0 for each in timings])
    values = {
        "loss": ratio(sums.of_replicas("loss"), examples),
        **{name: np.where(examples > 0, value, np.nan) for name, value in scores.items()},
        "examples": examples,
        "examples_per_second": ratio(of_replicas("examples"), wall),
        "gradient_norm": ratio(sums.of_replicas("gradient_norm"), present),
        "compute_time": ratio(of_replicas("compute"), steps),
        "sync_time": ratio(of_replicas("sync"), steps),
        "step_time": ratio(wall, steps),
        "data_wait": ratio(np.array([each.data_wait for each in timings]), steps),
    }
    return Window(epoch, step, place, values)


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


class Slowest(NamedTuple):
    """A replica that stays behind.

    Attributes:
        replica: Its index.
        worker: The index of its worker.
        device: The name of its device.
        factor: How many times as long as the median of the others its passes take.
        windows: In how many windows in a row.
    """

    replica: int
    worker: int
    device: str
    factor: float
    windows: int


def behind(window: Window, factor: float, before: Slowest | None) -> Slowest | None:
    """The replica `factor` times slower than the others' median, by a notable part of a step."""
    times = window.values["compute_time"]
    if len(times) < 2 or np.isnan(times).any():
        return None
    index = int(np.argmax(times))
    others = float(np.median(np.delete(times, index)))
    if others <= 0 or times[index] <= factor * others:
        return None
    if times[index] - others < NOTABLE_LAG * window.values["step_time"][index]:
        return None
    streak = before.windows if before is not None and before.replica == index else 0
    slower = float(times[index]) / others
    workers, devices = window.place
    return Slowest(index, workers[index], devices[index], slower, streak + 1)
