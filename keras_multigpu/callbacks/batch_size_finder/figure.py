"""The picture of a search for the batch size: speed and memory against the size."""

from collections.abc import Sequence
from typing import Any

from keras_multigpu.callbacks.batch_size_finder.search import Try
from keras_multigpu.pictures import BLUE, GREY, INK, PURPLE, RED, one_panel, plain_axes, title

ROOM = 1.08
"""How far the axes go above the highest point."""


def size_figure(tries: Sequence[Try], replicas: int, chosen: int) -> Any:
    """A figure of what larger replica batches bring and need; `chosen` need not be one of them."""
    figure, axes = one_panel()
    tries = sorted(tries, key=lambda one: one.replica_batch_size)
    fitted = [one for one in tries if one.fits]
    draw_speed(axes, fitted, replicas)
    draw_limits(axes, [one.replica_batch_size for one in tries if not one.fits], chosen)
    draw_sizes(axes, [chosen, *(one.replica_batch_size for one in tries)])
    lines = [*axes.lines, *draw_memory(axes, fitted)]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    together = "1 replica" if replicas == 1 else f"{replicas} replicas together"
    title(figure, "Batch size search", together)
    return figure


def draw_speed(axes: Any, fitted: Sequence[Try], replicas: int) -> None:
    points = [
        (one.replica_batch_size, replicas * one.replica_batch_size / one.seconds)
        for one in fitted
        if one.seconds
    ]
    label = "examples a second"
    style = {"color": BLUE, "markersize": 5, "clip_on": False, "zorder": 3, "label": label}
    axes.plot(*zip(*points, strict=True), "-o", **style)
    axes.set_ylim(0, ROOM * max(speed for _, speed in points))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_ylabel(label, color=GREY)


def draw_limits(axes: Any, failed: Sequence[int], chosen: int) -> None:
    """The sizes that did not fit, on the axis, and a line at the one that was chosen."""
    across = axes.get_xaxis_transform()
    if failed:
        style = {"color": RED, "markersize": 8, "markeredgewidth": 2, "clip_on": False, "zorder": 5}
        axes.plot(failed, [0] * len(failed), "x", label="did not fit", transform=across, **style)
    axes.axvline(chosen, color=INK, linewidth=1.2, linestyle="--", label="chosen")
    style = {"ha": "center", "va": "bottom", "fontsize": 9, "fontweight": "bold", "color": INK}
    axes.text(chosen, 1.01, f"{chosen:,}", transform=across, **style)


def draw_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """A logarithmic axis, on which a doubling always has the same width."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 2**0.5, max(sizes) * 2**0.5)
    axes.xaxis.get_major_locator().set_params(numticks=16)
    # Below the crosses.
    axes.tick_params(axis="x", pad=7)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("examples on each replica", color=GREY)


def draw_memory(axes: Any, fitted: Sequence[Try]) -> list[Any]:
    """On an axis of its own the most that a GPU held; the line, if that is known."""
    from matplotlib.ticker import EngFormatter

    known = [(one.replica_batch_size, one.peak_bytes) for one in fitted if one.peak_bytes]
    if not known:
        return []
    memory = axes.twinx()
    plain_axes(memory)
    memory.grid(visible=False)
    memory.spines[["left", "bottom"]].set_visible(False)
    label = "peak memory of a GPU"
    style = {"color": PURPLE, "linewidth": 1.2, "markersize": 4, "label": label}
    lines = memory.plot(*zip(*known, strict=True), "-s", **style)
    memory.set_ylim(0, ROOM * max(peak for _, peak in known))
    memory.yaxis.set_major_formatter(EngFormatter(unit="B"))
    memory.set_ylabel(label, color=GREY)
    return list(lines)
