"""Writes pictures: whole, and to a file that is what it says."""

import io
import os
from pathlib import Path
from typing import Any

from keras_multigpu.checks import problem


def checked_png(path: str | Path) -> Path:
    """The file for a picture; a `ValueError` if it is no PNG."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(
            problem(
                "The picture's file is no PNG.",
                "Expected a path that ends in .png.",
                "Change the ending.",
                path=str(path),
            )
        )
    return path


def finished(figure: Any, path: Path | None) -> Any:
    """A figure that notebooks show, written to a file if there is one.

    Args:
        figure: A figure of matplotlib, made without pyplot, which would show it by itself.
        path: The file, or None.
    """
    if path is not None:
        write_png(figure, path)
    figure._repr_png_ = lambda: png_of(figure)
    return figure


def png_of(figure: Any) -> bytes:
    """The content of a PNG file of a figure."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write_png(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all: a reader never sees half a picture.

    Args:
        figure: A figure of matplotlib.
        path: The file. Folders that do not exist are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
