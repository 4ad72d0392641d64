"""`RandAugment`: a few random operations for each image, all of one strength."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_number
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.policies.draws import Magnitudes, drawn_operation
from keras_multigpu.augmentation.policies.policy import Policy
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_positive_integer

AUTO_AUGMENT = 10
"""The magnitude that is as strong as the strongest of AutoAugment."""

MOST = 30
"""The largest magnitude that was tried in the paper."""


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
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
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
        seed: int | None = None,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            value_range=value_range,
            interpolation=interpolation,
            seed=seed,
            bounding_box_format=bounding_box_format,
            **kwargs,
        )
        require_positive_integer("num_ops", num_ops)
        self.num_ops = int(num_ops)
        self.magnitude = as_number("magnitude", magnitude, low=0, high=MOST)
        self.magnitude_std = as_number("magnitude_std", magnitude_std, low=0, high=MOST)

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        height, width = (tf.cast(side, tf.float32) for side in shape[:2])
        factor = Magnitudes(1.0, 1.9, either_way=True)
        return {
            "identity": Magnitudes(),
            "auto_contrast": Magnitudes(),
            "equalize": Magnitudes(),
            "rotate": Magnitudes(0.0, 30.0, either_way=True),
            "solarize": Magnitudes(256.0, 0.0),
            "color": factor,
            "posterize": Magnitudes(8.0, 4.0),
            "contrast": factor,
            "brightness": factor,
            "sharpness": factor,
            "shear_x": Magnitudes(0.0, 0.3, either_way=True),
            "shear_y": Magnitudes(0.0, 0.3, either_way=True),
            "translate_x": Magnitudes(0.0, width * 150 / 331, either_way=True),
            "translate_y": Magnitudes(0.0, height * 150 / 331, either_way=True),
        }

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        magnitudes = self.magnitudes(shape)
        drawn = [
            drawn_operation(draws, magnitudes, self._strength(draws)) for _ in range(self.num_ops)
        ]
        operation, magnitude = (tf.stack(one, axis=1) for one in zip(*drawn, strict=True))
        return {"operation": operation, "magnitude": magnitude}

    def _strength(self, draws: Draws) -> tf.Tensor:
        if not self.magnitude_std:
            return tf.constant(self.magnitude / AUTO_AUGMENT, tf.float32)
        magnitude = self.magnitude + self.magnitude_std * draws.normal()
        return tf.clip_by_value(magnitude, 0, MOST) / AUTO_AUGMENT
