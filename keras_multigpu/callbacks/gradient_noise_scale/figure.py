"""The picture of `GradientNoiseScale`: the noise scale over the steps, and the batch size used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.pictures import GREY
from keras_multigpu.pictures import INK
from keras_multigpu.pictures import new_figure
from keras_multigpu.pictures import write_png

BLUE, ORANGE = "#1f6fb2", "#c8641b"


def draw(points: Sequence[tuple[int, float, int | None]], smoothing: float, path: Path) -> None:
    """Draw the curve.

    Args:
        points: Step, noise scale and batch size of each point.
        smoothing: How much of the means each step has kept.
    """
    figure = new_figure((7.2, 3.9), layout=None)
    axes = figure.add_axes((0.1, 0.14, 0.7, 0.68))
    # On a logarithmic scale there is no place for a noise scale of zero.
    curve = [(step, scale) for step, scale, _ in points if scale > 0]
    used = [(step, size) for step, _, size in points if size is not None]
    axes.set_yscale("log", base=2)
    ends = []
    if curve:
        axes.plot(*zip(*curve, strict=True), color=BLUE, linewidth=1.8, marker="o", markersize=3)
        last = curve[-1][1]
        ends.append((last, f"noise scale\n{last:,.0f} examples", BLUE))
    if used:
        axes.step(*zip(*used, strict=True), color=ORANGE, linewidth=1.4, where="pre")
        last = used[-1][1]
        ends.append((last, f"batch size used\n{last:,} examples", ORANGE))
    for place, (height, text, color) in enumerate(sorted(ends)):
        # Lines that end close together have their labels below and above.
        label(axes, height, text, color, "bottom" if place else "top")
    decorate(figure, axes, smoothing, [*curve, *used])
    write_png(figure, path)


def label(axes: Any, height: float, text: str, color: str, side: str) -> None:
    """Write to the right of a line's end what it is."""
    axes.annotate(
        text,
        (1.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(7, -5 if side == "bottom" else 5),
        textcoords="offset points",
        color=color,
        fontsize=9,
        va=side,
        annotation_clip=False,
    )


def decorate(figure: Any, axes: Any, smoothing: float, drawn: Sequence[tuple[int, float]]) -> None:
    """Titles, axes and grid."""
    figure.text(0.1, 0.925, "Gradient noise scale", fontsize=13, fontweight="bold", color=INK)
    subtitle = f"Running means with smoothing {smoothing:g}" if drawn else "Nothing was measured"
    figure.text(0.1, 0.865, f"in examples. {subtitle}", fontsize=9, color=GREY)
    axes.set_xlabel("training step", fontsize=9, color=INK)
    if drawn:
        heights = [height for _, height in drawn]
        axes.set_xlim(0, max(step for step, _ in drawn))
        axes.set_ylim(min(heights) / 2**0.5, max(heights) * 2**0.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.tick_params(labelsize=8, colors=GREY)
    axes.grid(True, which="major", color="#e3e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
