"""The picture of `ReplicaMetrics`: a curve for each replica."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu.callbacks.replica_metrics.window import Window
from keras_multigpu.pictures import GREY, INK, LIGHT, new_figure, plain_axes, title

COLORS = ("#0b6fb3", "#d9541e", "#1a9a6c", "#8a4fbf", "#c4a000", "#c2307a", "#4d8a8f", "#7a5a3a")

PANELS = (
    ("loss", "Loss", "mean of the replica's examples", 1.0),
    ("gradient_norm", "Gradient norm", "mean of the steps", 1.0),
    ("compute_time", "Compute time of a step", "milliseconds", 1e3),
    ("examples_per_second", "Speed", "examples a second", 1.0),
)
"""For each panel: the value, the title, the label of the axis, a factor."""


def replica_figure(windows: Sequence[Window], ends: Sequence[float]) -> Any:
    """A figure with a panel for each of the values that matter most; `ends` are in epochs."""
    figure = new_figure((9.5, 6.2))
    grid = figure.subplots(2, 2, sharex=True)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw_panel(axes, windows, ends, *panel)
    for axes in grid[1]:
        axes.set_xlabel("epoch", color=GREY)
    rows = windows[-1].rows
    title(figure, "Replica by replica", f"{len(rows)} replicas, {len(windows)} measurements")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False
    )
    return figure


def draw_panel(
    axes: Any,
    windows: Sequence[Window],
    ends: Sequence[float],
    name: str,
    heading: str,
    unit: str,
    factor: float,
) -> None:
    """One value of all replicas, and between them their spread."""
    values = np.stack([window.values[name] for window in windows]) * factor
    values = np.where(np.isfinite(values), values, np.nan)
    marker = "o" if len(windows) < 40 else None
    known = ~np.isnan(values).all(axis=1)
    if known.any() and values.shape[1] > 1:
        low, high = np.nanmin(values[known], axis=1), np.nanmax(values[known], axis=1)
        axes.fill_between(np.asarray(ends)[known], low, high, color=LIGHT, linewidth=0)
    for index, row in enumerate(windows[-1].rows):
        color, dashes = COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--"
        label = f"replica {row['replica']} ({row['device']})"
        axes.plot(
            ends, values[:, index], dashes, color=color, label=label, marker=marker, markersize=3
        )
    axes.set_title(heading, fontsize=10, color=INK, loc="left")
    axes.set_ylabel(unit, color=GREY)
    if known.any() and np.nanmin(values) >= 0 and name != "loss":
        axes.set_ylim(bottom=0)
    plain_axes(axes)
