"""Windows to cut out of images: their places and sizes in pixels."""

from typing import Any

import tensorflow as tf

from keras_multigpu.augmentation.examples import Drawn, Shape

# Height and width, numbers or tensors.
Sides = tuple[Any, Any]


def crop_window(shape: Shape, crop: tuple[int, int], top_left: list[Any]) -> Drawn:
    """Return a window of the size `crop` with a given corner.

    Smaller images give the largest window of this shape, in the middle. Where images are known to
    be large enough, `crop_height` and `crop_width` are left out.
    """
    top, left = floats(top_left)
    if all(
        isinstance(side, int) and own <= side for own, side in zip(crop, shape[:2], strict=True)
    ):
        return {"crop_top": top, "crop_left": left}
    # Whether images are smaller may be known only when the model runs.
    fits = tf.reduce_all([own <= side for own, side in zip(crop, shape[:2], strict=True)])
    largest = largest_window(shape, proportion(crop), 1.0)
    sides = [tf.where(fits, float(own), one) for own, one in zip(crop, largest, strict=True)]
    middle = [(side - own) / 2 for side, own in zip(floats(shape[:2]), sides, strict=True)]
    return {
        "crop_top": tf.where(fits, top, middle[0]),
        "crop_left": tf.where(fits, left, middle[1]),
        "crop_height": tf.broadcast_to(sides[0], tf.shape(top)),
        "crop_width": tf.broadcast_to(sides[1], tf.shape(top)),
    }


def largest_window(shape: Shape, ratio: Any, area: Any) -> Sides:
    """Height and width of a window of an aspect ratio with at most this part of an image's area."""
    height, width = floats(shape[:2])
    # Which part of the height and of the width: the product is the area.
    stretch = ratio * height / width
    # Neither part may exceed 1.
    area = tf.minimum(area, tf.minimum(stretch, 1 / stretch))
    return height * tf.sqrt(area / stretch), width * tf.sqrt(area * stretch)


def proportion(sides: Sides) -> tf.Tensor:
    height, width = floats(sides)
    return width / height


def floats(values: Any) -> list[tf.Tensor]:
    return [tf.cast(one, tf.float32) for one in values]
