"""The picture of `GradientNoiseScale`: the noise scale over the steps, and the batch size used."""

from collections.abc import Sequence
from pathlib import Path

from keras_multigpu.pictures import GREY, new_figure, plain_axes, title, write_png

BLUE, ORANGE = "#1f6fb2", "#c8641b"


def draw(points: Sequence[tuple[int, float, int | None]], smoothing: float, path: Path) -> None:
    """Draw the curve of points, each of step, noise scale and batch size."""
    figure = new_figure((7.2, 3.9))
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.set_yscale("log", base=2)
    # On a logarithmic scale there is no place for a noise scale of zero.
    curve = [(step, scale) for step, scale, _ in points if scale > 0]
    used = [(step, size) for step, _, size in points if size is not None]
    if curve:
        label = f"noise scale, {curve[-1][1]:,.0f} examples at the end"
        axes.plot(*zip(*curve, strict=True), "-o", color=BLUE, markersize=3, label=label)
    if used:
        label = f"batch size used, {used[-1][1]:,} examples at the end"
        axes.step(*zip(*used, strict=True), color=ORANGE, where="pre", label=label)
    if drawn := [*curve, *used]:
        heights = [height for _, height in drawn]
        axes.set_xlim(0, max(step for step, _ in drawn))
        axes.set_ylim(min(heights) / 2**0.5, max(heights) * 2**0.5)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel("training step", color=GREY)
    axes.set_ylabel("examples", color=GREY)
    line = f"running means with smoothing {smoothing:g}" if drawn else "nothing was measured"
    title(figure, "Gradient noise scale", line)
    write_png(figure, path)
