"""The random transforms of `ImageDataGenerator`, drawn from our own seeds.

Checked on Keras 3.10 and 3.15.
"""

import types
from typing import Any

import numpy as np
import tensorflow as tf


def legacy_images() -> Any:
    """The module of `ImageDataGenerator`, which `keras` itself no longer offers."""
    return tf.keras.preprocessing.image  # noqa: TID251


class NumpyWith:
    """NumPy with another `numpy.random`."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def drawn_transform(generator: Any, shape: tuple[int, ...], seeds: np.ndarray) -> dict[str, Any]:
    """What `get_random_transform` draws for an image of this shape, from these two seeds alone."""
    # It draws from NumPy's global state, which other threads and the user change too.
    drawing = legacy_images().ImageDataGenerator.get_random_transform
    # A `RandomState` takes 70 us to make, this 5.
    numpy = NumpyWith(np.random.Generator(np.random.Philox(key=seeds.astype(np.uint64))))
    drawing = types.FunctionType(drawing.__code__, {**drawing.__globals__, "np": numpy})
    drawn: dict[str, Any] = drawing(generator, shape, None)
    return drawn
