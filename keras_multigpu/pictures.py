"""Writes pictures: whole, and to a file that is what it says."""

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
