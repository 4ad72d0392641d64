"""What policies draw: an operation for each image, and how much it changes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.augmentation.policies.operations import GEOMETRIC_OPERATIONS, VALUE_OPERATIONS
from keras_multigpu.augmentation.random_numbers import Draws

# The names of all operations. A draw is an operation's place in this list.
OPERATIONS = (*VALUE_OPERATIONS, *GEOMETRIC_OPERATIONS)

WITHOUT_MAGNITUDE = ("identity", "auto_contrast", "equalize")

# Below these magnitudes an operation would do something else, such as make a negative.
LOWEST = dict.fromkeys(("solarize", "color", "contrast", "brightness", "sharpness"), 0.0)
LOWEST["posterize"] = 1.0


class Magnitudes(NamedTuple):
    """An operation's magnitude at strength 0 and at 1; `either_way` negates half of the changes."""

    weakest: Any = 0.0
    strongest: Any = 0.0
    either_way: bool = False


def fourteen_operations(
    *,
    rotate: float,
    shear: float,
    translate_x: Any,
    translate_y: Any,
    factor: float,
    solarize: float,
    posterize: float,
) -> dict[str, Magnitudes]:
    """The operations of RandAugment and TrivialAugment.

    Args:
        rotate: The strongest rotation, in degrees; likewise `shear` and `translate_*`.
        factor: The strongest factor of `color`, `contrast`, `brightness` and `sharpness`.
        solarize: The level from which the weakest solarization starts.
        posterize: The bits that the strongest posterization keeps.
    """
    enhanced = Magnitudes(1.0, factor, either_way=True)
    sheared = Magnitudes(0.0, shear, either_way=True)
    return {
        "identity": Magnitudes(),
        "auto_contrast": Magnitudes(),
        "equalize": Magnitudes(),
        "rotate": Magnitudes(0.0, rotate, either_way=True),
        "solarize": Magnitudes(solarize, 0.0),
        "color": enhanced,
        "posterize": Magnitudes(8.0, posterize),
        "contrast": enhanced,
        "brightness": enhanced,
        "sharpness": enhanced,
        "shear_x": sheared,
        "shear_y": sheared,
        "translate_x": Magnitudes(0.0, translate_x, either_way=True),
        "translate_y": Magnitudes(0.0, translate_y, either_way=True),
    }


def drawn_operation(
    draws: Draws, magnitudes: Mapping[str, Magnitudes], strength: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw an operation for each image, all equally likely; return it and its magnitude.

    Args:
        magnitudes: The operations, by name.
        strength: From 0 to 1, a number or `float32[n]`.
    """
    choice, back = draws.integers(len(magnitudes)), draws.happens(0.5)

    def chosen(values: Any, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.gather(tf.stack([tf.cast(value, dtype) for value in values]), choice)

    weakest, strongest, either_way = zip(*magnitudes.values(), strict=True)
    change = (chosen(strongest) - chosen(weakest)) * strength
    change = tf.where(back & chosen(either_way, tf.bool), -change, change)
    magnitude = chosen(weakest) + change
    # Posterizing keeps a whole number of bits.
    is_whole = chosen([name == "posterize" for name in magnitudes], tf.bool)
    magnitude = tf.where(is_whole, tf.round(magnitude), magnitude)
    magnitude = tf.maximum(magnitude, chosen([LOWEST.get(name, -1e9) for name in magnitudes]))
    return chosen([OPERATIONS.index(name) for name in magnitudes], tf.int32), magnitude


def operation_text(operation: Any, magnitude: Any) -> str:
    """An operation with its magnitude, such as `rotate 27`."""
    name = OPERATIONS[int(operation)]
    shown = name.replace("_", " ")
    return shown if name in WITHOUT_MAGNITUDE else f"{shown} {float(magnitude):.3g}"
