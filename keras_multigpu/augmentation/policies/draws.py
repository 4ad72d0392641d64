"""What policies draw: an operation for each image, and how much it changes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.augmentation.policies.operations import GEOMETRIC_OPERATIONS, VALUE_OPERATIONS
from keras_multigpu.augmentation.random_numbers import Draws

OPERATIONS = (*VALUE_OPERATIONS, *GEOMETRIC_OPERATIONS)
"""The names of all operations. Draws hold an operation's place in here."""

WITHOUT_MAGNITUDE = ("identity", "auto_contrast", "equalize")
"""The operations that have no strength."""

LOWEST = dict.fromkeys(("solarize", "color", "contrast", "brightness", "sharpness"), 0.0)
LOWEST["posterize"] = 1.0
"""Magnitudes below which an operation means something else, such as a negative."""

# How many numbers are tried; of those above 95 of 100 are accepted.
ATTEMPTS = 5

# Added where a logarithm of zero is possible.
_TINY = 1e-30


class Magnitudes(NamedTuple):
    """An operation's magnitude at strength 0 and at 1; half of the images may go the other way."""

    weakest: Any = 0.0
    strongest: Any = 0.0
    either_way: bool = False


def drawn_operation(
    draws: Draws, magnitudes: Mapping[str, Magnitudes], strength: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """For each image one operation, all equally likely, and its magnitude at strength 0 to 1."""
    choice, back = draws.integers(len(magnitudes)), draws.happens(0.5)

    def chosen(values: Any, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.gather(tf.stack([tf.cast(value, dtype) for value in values]), choice)

    weakest, strongest, either_way = zip(*magnitudes.values(), strict=True)
    change = (chosen(strongest) - chosen(weakest)) * strength
    change = tf.where(back & chosen(either_way, tf.bool), -change, change)
    magnitude = chosen(weakest) + change
    # Bits are whole.
    is_whole = chosen([name == "posterize" for name in magnitudes], tf.bool)
    magnitude = tf.where(is_whole, tf.round(magnitude), magnitude)
    magnitude = tf.maximum(magnitude, chosen([LOWEST.get(name, -1e9) for name in magnitudes]))
    return chosen([OPERATIONS.index(name) for name in magnitudes], tf.int32), magnitude


def operation_text(operation: Any, magnitude: Any) -> str:
    """An operation with its magnitude, such as `rotate 27`."""
    name = OPERATIONS[int(operation)]
    shown = name.replace("_", " ")
    return shown if name in WITHOUT_MAGNITUDE else f"{shown} {float(magnitude):.3g}"


def dirichlet(draws: Draws, alpha: float, count: int) -> tf.Tensor:
    """Shares of a whole, of the distribution Dirichlet(alpha, ..., alpha); `float32[n, count]`."""
    # Logarithms, as with a small alpha all but one of these numbers are too small for floats.
    logarithms = [log_gamma_distributed(draws, alpha) for _ in range(count)]
    return tf.nn.softmax(tf.stack(logarithms, axis=1), axis=1)


def log_gamma_distributed(draws: Draws, alpha: float) -> tf.Tensor:
    """Logarithms of numbers of the distribution Gamma(alpha, 1), `float32[n]`."""
    # The method is that of Marsaglia & Tsang 2000 (ACM Transactions on Mathematical Software 26),
    # with as many attempts as numbers can be drawn beforehand: all of them fail once in a million.
    if alpha == 1:
        return tf.math.log(-tf.math.log1p(-draws.numbers()) + _TINY)
    # The method needs a parameter of at least one; a power of one more number leads back.
    shape = (alpha + 1 if alpha < 1 else alpha) - 1 / 3
    result: Any = math.log(shape)
    for _ in range(ATTEMPTS):
        normal, number = draws.normal(), draws.numbers()
        cube = tf.maximum(1 + normal / (9 * shape) ** 0.5, _TINY) ** 3
        log_cube = tf.math.log(cube)
        accepted = tf.math.log(number + _TINY) < normal**2 / 2 + shape * (1 - cube + log_cube)
        result = tf.where(accepted, math.log(shape) + log_cube, result)
    if alpha < 1:
        result += tf.math.log(draws.numbers() + _TINY) / alpha
    return result
