"""`RandAugment`: a few random operations for each image, all of one strength."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_number
from keras_multigpu.augmentation.examples import Shape
from keras_multigpu.augmentation.policies.draws import Magnitudes, fourteen_operations
from keras_multigpu.augmentation.policies.policy import Policy
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_positive_integer

# The magnitude that is as strong as the strongest of AutoAugment.
AUTO_AUGMENT = 10

# The largest magnitude in the paper.
MOST = 30


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

    Each operation runs only on the images that drew it, which XLA cannot compile: with
    `jit_compile="auto"` Keras does not compile a model that contains this layer. In a pipeline the
    model is not affected.

    Args:
        num_ops: Integer, the number of operations for each image.
        magnitude: Their strength, from 0 to 30.
        magnitude_std: The standard deviation of the strengths of different images.
        value_range: The values of black and white in the images.
        interpolation: How to read between pixels, `"bilinear"` or `"nearest"`.
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
        interpolation: str = "bilinear",
        **kwargs: Any,
    ) -> None:
        super().__init__(value_range=value_range, interpolation=interpolation, **kwargs)
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
