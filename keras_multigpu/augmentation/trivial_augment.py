"""`TrivialAugment`: one random operation for each image, of any strength."""

from collections.abc import Mapping

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.policies.draws import Magnitudes, drawn_operation
from keras_multigpu.augmentation.policies.policy import Policy
from keras_multigpu.augmentation.random_numbers import Draws

STRENGTHS = 31
"""How many strengths there are, from the weakest to the strongest."""


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

    Each operation runs only on the images that drew it, which XLA cannot compile: with
    `jit_compile="auto"` Keras does not compile a model that contains this layer. In a pipeline the
    model is not affected.

    Args:
        value_range: The values of black and white in the images.
        interpolation: How to read between pixels, `"bilinear"` or `"nearest"`.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        factor = Magnitudes(1.0, 1.99, either_way=True)
        shear = Magnitudes(0.0, 0.99, either_way=True)
        shift = Magnitudes(0.0, 32.0, either_way=True)
        return {
            "identity": Magnitudes(),
            "auto_contrast": Magnitudes(),
            "equalize": Magnitudes(),
            "rotate": Magnitudes(0.0, 135.0, either_way=True),
            "solarize": Magnitudes(255.0, 0.0),
            "color": factor,
            "posterize": Magnitudes(8.0, 2.0),
            "contrast": factor,
            "brightness": factor,
            "sharpness": factor,
            "shear_x": shear,
            "shear_y": shear,
            "translate_x": shift,
            "translate_y": shift,
        }

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        strength = tf.cast(draws.integers(STRENGTHS), tf.float32) / (STRENGTHS - 1)
        operation, magnitude = drawn_operation(draws, self.magnitudes(shape), strength)
        return {"operation": operation[:, None], "magnitude": magnitude[:, None]}
