"""The operations of policies that move pixels, as one affine map for each image.

They mean what Pillow's `rotate` and `transform` mean.
"""

import tensorflow as tf

from keras_multigpu.augmentation.examples.forms import Shape
from keras_multigpu.augmentation.geometry import affine

GEOMETRIC_OPERATIONS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
"""Their names. Magnitudes are degrees counterclockwise, shares of the other side, and pixels."""


def geometric_matrices(kind: tf.Tensor, magnitude: tf.Tensor, shape: Shape) -> tf.Tensor:
    """The maps of operations, `float32[n, 2, 3]`, as `affine.py` writes them.

    Args:
        kind: Places in `GEOMETRIC_OPERATIONS`, `int32[n]`; any other number is not an operation.
    """
    degrees, shear_x, shear_y, x, y = (
        tf.where(kind == place, magnitude, 0.0) for place in range(len(GEOMETRIC_OPERATIONS))
    )
    # Of the three only one changes anything, so their order does not matter. Pillow's shears
    # keep the image's corner, those of `affine` the middle of the pixel in it.
    return affine.product(
        affine.rotation(degrees, shape[0], shape[1]),
        affine.shear(shear_x, shear_y),
        affine.translation(x - shear_x / 2, y - shear_y / 2),
    )
