"""`TrivialAugment`: one random operation for each image, of any strength."""

from collections.abc import Mapping

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Shape
from keras_multigpu.augmentation.policies.draws import Magnitudes, fourteen_operations
from keras_multigpu.augmentation.policies.policy import Policy
from keras_multigpu.augmentation.random_numbers import Draws

# The number of strengths, from the weakest to the strongest.
STRENGTHS = 31


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
