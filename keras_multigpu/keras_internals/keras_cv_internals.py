"""Random numbers for layers of keras-cv 0.9.0, its last version, which is not imported here.

The layers draw from `tf.random.Generator` objects, and from factor samplers on TensorFlow's global
stream. Neither takes a seed per call, so both are replaced during a call.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals


class SeededNumbers:
    """Replaces a `tf.random.Generator` by one that depends on a seed, `int32[2]`, alone."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed
        self._calls = 0

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32
    ) -> tf.Tensor:
        return tf.random.stateless_uniform(shape, self._next_seed(), minval, maxval, dtype)

    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32
    ) -> tf.Tensor:
        return tf.random.stateless_normal(shape, self._next_seed(), mean, stddev, dtype)

    def _next_seed(self) -> tf.Tensor:
        self._calls += 1
        return tf.random.fold_in(self._seed, self._calls)


@contextlib.contextmanager
def seeded_keras_cv(layer: keras.Layer, seed: tf.Tensor) -> Iterator[None]:
    """Let a keras-cv layer and its sublayers draw from a seed, `int32[2]`."""
    numbers = SeededNumbers(seed)
    with contextlib.ExitStack() as restored:
        for part in model_internals.layers_of(layer):
            attributes = vars(part)
            for name, value in list(attributes.items()):
                replacement = stand_in(name, value, numbers)
                if replacement is not None:
                    restored.callback(attributes.__setitem__, name, value)
                    attributes[name] = replacement
        yield


def stand_in(name: str, value: Any, numbers: SeededNumbers) -> Any:
    """The replacement of a layer's attribute that draws; None for any other attribute."""
    if name == "_random_generator":
        return numbers
    kind = type(value).__name__ if type(value).__module__.startswith("keras_cv.") else ""
    if kind == "UniformFactorSampler":
        return lambda shape=(), dtype="float32": numbers.uniform(
            shape, value.lower, value.upper, dtype
        )
    if kind == "NormalFactorSampler":
        return lambda shape=(), dtype="float32": tf.clip_by_value(
            numbers.normal(shape, value.mean, value.stddev, dtype), value.min_value, value.max_value
        )
    return None
