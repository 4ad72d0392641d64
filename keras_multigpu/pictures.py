"""Shared by all pictures: colors, empty figures, and files written whole."""

import io
from pathlib import Path
from typing import Any

from keras_multigpu.checks import error_of, require_ending
from keras_multigpu.writing import whole, writes_here

INK, GREY, LIGHT = "#1d2730", "#6b7783", "#e3e7ea"


def checked_png(path: str | Path) -> Path:
    return require_ending(path, ".png", "The picture's file is not a PNG.")


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


def plain_axes(axes: Any) -> None:
    """Draw few lines, all of them light."""
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT)
