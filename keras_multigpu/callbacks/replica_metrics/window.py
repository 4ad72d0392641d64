"""The values of each replica over some steps, which replica is slow, and a chart of both."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.callbacks.timing import Sums, Timing, of_replicas
from keras_multigpu.pictures import GREY, INK, LIGHT, narrow_figure, plain_axes, title
from keras_multigpu.training.replica_group import ReplicaGroup

# A replica that lags by a smaller fraction of a step is noise.
NOTABLE_LAG = 0.05

COLORS = ("#0b6fb3", "#d9541e", "#1a9a6c", "#8a4fbf", "#c4a000", "#c2307a", "#4d8a8f", "#7a5a3a")

PANELS = (
    ("loss", "loss", 1.0),
    ("gradient_norm", "gradient norm", 1.0),
    ("compute_time", "compute time of a step, ms", 1e3),
    ("examples_per_second", "examples a second", 1.0),
)
"""For each panel of the chart: the value, the title and a factor."""


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

    @property
    def rows(self) -> list[dict[str, Any]]:
        where = {"epoch": self.epoch, "step": self.step}
        places = enumerate(zip(self.workers, self.devices, strict=True))
        return [
            {
                **where,
                "replica": index,
                "worker": worker,
                "device": device,
                **{name: plain_number(values[index]) for name, values in self.values.items()},
            }
            for index, (worker, device) in places
        ]


def plain_number(value: Any) -> float | int | None:
    """A number as people write it: an integer if it is one, and None for NaN."""
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


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


def behind(window: Window, factor: float, before: Slowest | None) -> Slowest | None:
    """The replica that is `factor` times slower than the others' median, by more than noise."""
    times = window.values["compute_time"]
    if len(times) < 2 or np.isnan(times).any():
        return None
    index = int(np.argmax(times))
    time, others = float(times[index]), float(np.median(np.delete(times, index)))
    lag = NOTABLE_LAG * window.values["step_time"][index]
    if others <= 0 or time <= factor * others or time - others < lag:
        return None
    streak = before.windows if before is not None and before.replica == index else 0
    worker, device = window.workers[index], window.devices[index]
    return Slowest(index, worker, device, time / others, streak + 1)


def replica_figure(windows: Sequence[Window], ends: Sequence[float]) -> Any:
    """A figure with a panel for each of the most important values; `ends` are in epochs."""
    figure = narrow_figure(5.2)
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (name, heading, factor) in zip(grid.flat, PANELS, strict=True):
        values = np.stack([window.values[name] for window in windows]) * factor
        draw_panel(axes, windows, ends, np.where(np.isfinite(values), values, np.nan))
        axes.set_title(heading, fontsize=10, color=INK, loc="left")
        if name != "loss" and np.nanmin(values, initial=np.inf) >= 0:
            axes.set_ylim(bottom=0)
        plain_axes(axes)
    for axes in grid[1]:
        axes.set_xlabel("epoch", color=GREY)
        axes.locator_params(axis="x", integer=True)
    grid[1, 1].yaxis.set_major_formatter("{x:,.6g}")
    replicas = len(windows[-1].devices)
    title(figure, "Replica by replica", f"{replicas} replicas, {len(windows)} measurements")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    style = {"ncols": min(len(labels), 3), "frameon": False, "fontsize": 9}
    figure.legend(handles, labels, loc="outside lower center", **style)
    return figure


def draw_panel(
    axes: Any, windows: Sequence[Window], ends: Sequence[float], values: np.ndarray
) -> None:
    """Draw one value of all replicas, with the spread between them shaded."""
    known = ~np.isnan(values).all(axis=1)
    if known.any() and values.shape[1] > 1:
        low, high = np.nanmin(values[known], axis=1), np.nanmax(values[known], axis=1)
        axes.fill_between(np.asarray(ends)[known], low, high, color=LIGHT, linewidth=0)
    marker = "o" if len(windows) < 40 else None
    for index, device in enumerate(windows[-1].devices):
        style = {"color": COLORS[index % len(COLORS)], "marker": marker, "markersize": 3}
        dashes = "-" if index < len(COLORS) else "--"
        label = f"replica {index} ({device})"
        axes.plot(ends, values[:, index], dashes, label=label, **style)
