"""The picture of a learning rate range test."""

from typing import Any

import numpy as np

from keras_multigpu.callbacks.learning_rate_finder.curve import RateCurve, Suggestion
from keras_multigpu.pictures import GREY, INK, new_figure, plain_axes, title

PALE, BLUE, RED = "#9aa5af", "#1f6fb2", "#c43c39"


def drawn(curve: RateCurve, found: Suggestion | None, exploded_at: float | None) -> Any:
    """A figure of the loss against the rate, and of the rate where the search stopped."""
    figure = new_figure((7.2, 4.4))
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.plot(curve.rates, curve.losses, color=PALE, linewidth=1, label="loss of each batch")
    axes.plot(curve.rates, curve.smoothed, color=BLUE, linewidth=2, label="smoothed")
    if found is not None:
        mark(axes, curve, found.steepest, f"suggested: {found.steepest:.2g}", "o", BLUE)
        mark(axes, curve, found.lowest, f"lowest loss: {found.lowest:.2g}", "s", INK)
    if exploded_at is not None:
        label = f"loss explodes: {exploded_at:.2g}"
        axes.axvline(exploded_at, color=RED, linewidth=1.2, linestyle="--", label=label)
    axes.set_ylim(*visible(curve))
    axes.set_xlabel("learning rate", color=GREY)
    axes.set_ylabel("loss of the next batch", color=GREY)
    plain_axes(axes)
    title(figure, "Learning rate range test", f"{len(curve.rates)} steps")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def mark(axes: Any, curve: RateCurve, rate: float, label: str, marker: str, color: str) -> None:
    loss = curve.smoothed[np.argmin(np.abs(curve.rates - rate))]
    style = {"markersize": 9, "markeredgecolor": "white", "linestyle": "none", "zorder": 5}
    axes.plot([rate], [loss], marker=marker, color=color, label=label, **style)


def visible(curve: RateCurve) -> tuple[float, float]:
    """The losses to show: all that training would ever see, and the beginning of an explosion."""
    start, least = float(curve.smoothed[0]), float(curve.losses.min())
    most = float(curve.losses[: int(np.argmin(curve.smoothed)) + 1].max())
    height = max(most, start) - least or abs(start) or 1.0
    return least - 0.08 * height, max(most, start) + 0.35 * height
