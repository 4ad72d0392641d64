"""Which line of the user's code an operation of a graph comes from."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


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


def user_line(operation: tf.Operation) -> str | None:
    """The line of a user's code that made an operation, as `train.py:31`; None if it is Keras's."""
    for entry in reversed(operation.traceback):
        file = entry.filename
        if file.startswith(PASSED_THROUGH) or "__autograph_generated_file" in file:
            continue
        return None if file.startswith(KERAS) else f"{Path(file).name}:{entry.lineno}"
    return None
