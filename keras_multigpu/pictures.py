"""Shared by all pictures: colors, empty figures, and files written whole."""

import io
from pathlib import Path
from typing import Any

from keras_multigpu.checks import error_of, require_ending
from keras_multigpu.writing import require_writable, whole, writes_here

INK, GREY, PALE, LIGHT = "#1d2730", "#6b7783", "#b9c2c9", "#e3e7ea"
BLUE, ORANGE, PURPLE, RED = "#0b6fb3", "#d9541e", "#8a4fbf", "#c43c39"


def checked_png(path: str | Path) -> Path:
    return require_ending(path, ".png", "The picture's file is not a PNG.")


def picture_file(path: str | Path | None) -> Path | None:
    """The path of a picture, if one is wanted; an early error if it cannot be drawn there."""
    if path is None:
        return None
    path = checked_png(path)
    new_figure((1, 1))
    require_writable(path)
    return path


def new_figure(size: tuple[float, float], layout: Any = "constrained", dpi: int = 110) -> Any:
    """An empty figure, its size in inches; a helpful `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise error_of(
            ImportError,
            "The package matplotlib is not installed.",
            "Expected it for pictures; the rest of keras_multigpu does without.",
            "Run `pip install matplotlib`, or ask for no picture.",
            package="matplotlib",
        ) from error
    # The state and windows of pyplot belong to the user.
    return Figure(figsize=size, dpi=dpi, facecolor="white", layout=layout)


def narrow_figure(height: float) -> Any:
    """An empty figure whose text is readable on a phone, 400 pixels wide."""
    return new_figure((5.6, height), dpi=144)


def one_panel(height: float = 3.8) -> tuple[Any, Any]:
    """A narrow figure and its only axes."""
    figure = narrow_figure(height)
    axes = figure.add_subplot()
    plain_axes(axes)
    return figure, axes


def finished(figure: Any, path: Path | None) -> Any:
    """Write a figure to a file, if there is one, and let notebooks show it."""
    if path is not None:
        write_png(figure, path)
    figure._repr_png_ = lambda: png_of(figure)
    return figure


def png_of(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write_png(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all, by one of the processes that train together."""
    if not writes_here():
        return
    with whole(path) as partial:
        figure.savefig(partial, format="png")


def title(figure: Any, heading: str, line: str) -> None:
    figure.suptitle(heading, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    figure.text(0.99, 0.985, line, fontsize=8, color=GREY, ha="right", va="top", parse_math=False)


def plain_axes(axes: Any) -> None:
    """Draw few lines, all of them light."""
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT)
