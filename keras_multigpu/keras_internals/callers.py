"""Whose code runs: a user's, whose line a message names, or that of Keras and TensorFlow."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import tensorflow as tf


def called_by_library(depth: int = 1) -> bool:
    """Whether an exchanged function was called by Keras or TensorFlow for ends of their own.

    Args:
        depth: How many calls ago: 1 if the replacement itself asks.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    # `keras.ops` only passes on what somebody else asks for.
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("keras.src.ops.", "keras.src.backend.")
    ):
        frame = frame.f_back
    # Metrics and optimizers take sums too, of what is theirs.
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith(("keras.", "tensorflow."))


def folder_of(module: Any, *parts: str) -> str:
    """The folder of a package, or one inside of it."""
    return os.path.join(os.path.dirname(module.__file__), *parts, "")


KERAS = folder_of(keras)
PASSED_THROUGH = (
    folder_of(tf),
    *(folder_of(keras, "src", name) for name in ("ops", "backend", "random", "utils")),
    os.path.join(Path(__file__).parents[1], ""),
    contextlib.__file__,
    functools.__file__,
)
"""Where code stands that does what others ask it to do."""


def user_line(operation: tf.Operation | None = None) -> str | None:
    """The line of a user's code that makes an operation now, or made it; None if it is Keras's."""
    frames = lines_now() if operation is None else lines_then(operation)
    for file, line in frames:
        if file.startswith(PASSED_THROUGH) or "__autograph_generated_file" in file:
            continue
        if file.startswith(KERAS):
            made_by_functional = file == folder_of(keras, "src", "models") + "functional.py"
            return "an operation of the functional model" if made_by_functional else None
        return f"{Path(file).name}:{line}"
    return None


def lines_now() -> Iterator[tuple[str, int]]:
    """The files and lines that run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def lines_then(operation: tf.Operation) -> Iterator[tuple[str, int]]:
    """Those that ran when an operation was made."""
    for frame in reversed(operation.traceback):
        yield frame.filename, frame.lineno
