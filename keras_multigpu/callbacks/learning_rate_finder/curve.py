"""The curve of a learning rate range test, and what it suggests, and its picture.

SciPy has a Gaussian filter; twenty lines of NumPy save a dependency.
"""

from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.pictures import BLUE, GREY, INK, PALE, RED, one_panel, title

# A loss that falls by a smaller part of itself says nothing about rates.
FLAT = 0.01


class RateCurve(NamedTuple):
    """The loss of the next batch after a step with each rate, and the same without the noise."""

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray


class Suggestion(NamedTuple):
    """The rates where the smoothed loss falls fastest, and where it is lowest."""

    steepest: float
    lowest: float


def moving_mean(losses: np.ndarray, kept: float) -> np.ndarray:
    """The exponential moving mean, where the first values weigh no more than they should."""
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total = kept * total + (1 - kept) * loss
        weight = kept * weight + (1 - kept)
        means.append(total / weight)
    return np.array(means)


def smoothed(losses: np.ndarray, smoothing: float) -> np.ndarray:
    """The mean of the losses on both sides, the nearer the heavier."""
    # Not a moving mean, which lies too far to the right, and whose long tail carries the noise of
    # some batches into the slope.
    steps = np.arange(len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / smoothing) ** 2)
    return np.asarray(weights @ losses / weights.sum(axis=1))


def explodes(losses: list[float], first: float, smoothing: float, stop_at: float) -> bool:
    """Whether the last loss, by a mean over about `smoothing` of them, shows too large a rate."""
    if not np.isfinite(losses[-1]):
        return True
    means = moving_mean(np.array([first, *losses]), 1 - 1 / smoothing)
    best = means.min()
    # Also right for losses that are negative, or that come close to zero.
    return bool(means[-1] > best + (stop_at - 1) * max(abs(best), first - best))


def suggestion(curve: RateCurve) -> Suggestion | None:
    """The rate where the loss falls fastest; None where it does not. All losses are finite."""
    if len(curve.rates) < 3:
        return None
    lowest = int(np.argmin(curve.smoothed))
    noise = float(np.std((curve.losses - curve.smoothed)[: lowest + 1]))
    fall = float(curve.smoothed[0] - curve.smoothed[lowest])
    if fall <= max(noise, FLAT * abs(float(curve.smoothed[0]))):
        return None
    slopes = np.gradient(curve.smoothed, np.log(curve.rates))
    steepest = int(np.argmin(slopes[: lowest + 1]))
    return Suggestion(float(curve.rates[steepest]), float(curve.rates[lowest]))


def drawn(curve: RateCurve, found: Suggestion | None, exploded_at: float | None) -> Any:
    """A figure of the loss against the rate, and of the rate where the search stopped."""
    figure, axes = one_panel()
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
