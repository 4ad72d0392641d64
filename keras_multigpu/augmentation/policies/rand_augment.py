"""`RandAugment` and `TrivialAugment`, which draw from the same 14 operations."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_number
from keras_multigpu.augmentation.examples import Shape
from keras_multigpu.augmentation.policies.policy import Magnitudes, Policy
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_positive_integer

# The magnitude that is as strong as the strongest of AutoAugment.
AUTO_AUGMENT = 10

# The largest magnitude in the paper of RandAugment.
MOST = 30

# The number of strengths of TrivialAugment, from the weakest to the strongest.
STRENGTHS = 31


@keras.saving.register_keras_serializable("keras_multigpu")
class RandAugment(Policy):
    """Changes each image by a few random operations, all of one strength.

    The method, its 14 operations and its scale are those of Cubuk et al. 2020 (arXiv:1909.13719):
    a magnitude of 10 is the strongest of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501), larger
    ones continue at the same pace up to 30, and there is one magnitude for all operations. The
    default is the paper's choice for ResNet-50 on ImageNet. At magnitude M an operation changes

    | Operations | by |
    | --- | --- |
    | `rotate` | 3 M degrees, either way |
    | `shear_x`, `shear_y` | 0.03 M, either way |
    | `translate_x`, `translate_y` | 0.0453 M of the side (150 of 331 pixels at 10), either way |
    | `color`, `contrast`, `brightness`, `sharpness` | a factor of 1 + 0.09 M or 1 - 0.09 M |
    | `solarize` | from level 256 - 25.6 M on |
    | `posterize` | to 8 - 0.4 M bits, rounded |
    | `identity`, `auto_contrast`, `equalize` | (no strength) |

    Solarizing and posterizing grow with the magnitude; in the first published code they shrank.
    Pixels from outside the image are gray, level 128, as in that code. Operations are Pillow's, on
    256 levels, to which images are rounded.

    XLA cannot compile it: with `jit_compile="auto"` Keras does not compile a model around it.

    Args:
        num_ops: Integer, the number of operations for each image.
        magnitude: Their strength, from 0 to 30.
        magnitude_std: The standard deviation of the strengths of different images.
        value_range: The values of black and white in the images.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    settings = ("num_ops", "magnitude", "magnitude_std")
    fill = 128.0

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: float = 9,
        *,
        magnitude_std: float = 0.0,
        value_range: tuple[float, float] = (0, 255),
        **kwargs: Any,
    ) -> None:
        super().__init__(value_range=value_range, **kwargs)
        require_positive_integer("num_ops", num_ops)
        self.num_ops = num_ops
        self.magnitude = as_number("magnitude", magnitude, low=0, high=MOST)
        self.magnitude_std = as_number("magnitude_std", magnitude_std, low=0, high=MOST)

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        height, width = (tf.cast(side, tf.float32) for side in shape[:2])
        return fourteen_operations(
            rotate=30.0,
            shear=0.3,
            translate_x=width * 150 / 331,
            translate_y=height * 150 / 331,
            factor=1.9,
            solarize=256.0,
            posterize=4.0,
        )

    def strength(self, draws: Draws) -> tf.Tensor:
        if not self.magnitude_std:
            return tf.constant(self.magnitude / AUTO_AUGMENT, tf.float32)
        magnitude = self.magnitude + self.magnitude_std * draws.normal()
        return tf.clip_by_value(magnitude, 0, MOST) / AUTO_AUGMENT


@keras.saving.register_keras_serializable("keras_multigpu")
class TrivialAugment(Policy):
    """Changes each image by one random operation of random strength.

    There is nothing to tune. The method, its 14 operations, its 31 strengths and its magnitudes
    are those of Müller & Hutter 2021 (arXiv:2103.10158), in the version "wide":

    | Operations | up to |
    | --- | --- |
    | `rotate` | 135 degrees, either way |
    | `shear_x`, `shear_y` | 0.99, either way |
    | `translate_x`, `translate_y` | 32 pixels, either way |
    | `color`, `contrast`, `brightness`, `sharpness` | a factor of 1.99 or 0.01 |
    | `solarize` | from level 0 on, at least from 255 on |
    | `posterize` | to 2 bits |
    | `identity`, `auto_contrast`, `equalize` | (no strength) |

    Pixels from outside the image are black, as in the authors' code. Operations are Pillow's, on
    256 levels, to which images are rounded.

    XLA cannot compile it: with `jit_compile="auto"` Keras does not compile a model around it.

    Args:
        value_range: The values of black and white in the images.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        return fourteen_operations(
            rotate=135.0,
            shear=0.99,
            translate_x=32.0,
            translate_y=32.0,
            factor=1.99,
            solarize=255.0,
            posterize=2.0,
        )

    def strength(self, draws: Draws) -> tf.Tensor:
        return tf.cast(draws.integers(STRENGTHS), tf.float32) / (STRENGTHS - 1)


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
