"""Windows to cut out of images: their places and sizes in pixels, at random or in the middle."""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.augmentation.arguments import Range
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.random_numbers import Draws

Sides = tuple[Any, Any]
"""Height and width, numbers or tensors."""


class WindowSettings(NamedTuple):
    """The windows wanted, `aspect_ratio` as a multiple of the result's; None for whole images."""

    crop: tuple[int, int] | None
    crop_area: Range | None
    aspect_ratio: Range | None


def drawn_window(draws: Draws, shape: Shape, result: Sides, settings: WindowSettings) -> Drawn:
    """Windows at random places: `crop_top`, `crop_left`, `crop_height` and `crop_width`.

    The last two are left out where every window has the size `crop`.
    """
    if settings.crop is not None:
        return drawn_crop(draws, shape, settings.crop)
    if settings == (None, None, None):
        return {}
    # Evenly in the logarithm: twice as wide is as likely as half as wide.
    low, high = (math.log(ratio) for ratio in settings.aspect_ratio or (1, 1))
    ratio = tf.exp(draws.uniform(low, high)) * proportion(result)
    area = draws.uniform(*(settings.crop_area or (1, 1)))
    height, width = largest_window(shape, ratio, area)
    image_height, image_width = floats(shape[:2])
    return {
        "crop_top": draws.uniform(0.0, image_height - height),
        "crop_left": draws.uniform(0.0, image_width - width),
        "crop_height": height,
        "crop_width": width,
    }


def drawn_crop(draws: Draws, shape: Shape, crop: tuple[int, int]) -> Drawn:
    """Windows of this size, or the largest of this shape in smaller images."""
    names = "crop_top", "crop_left"
    free = [side - own for side, own in zip(shape[:2], crop, strict=True)]
    steps = [draws.integers(tf.maximum(one, 0) + 1) for one in free]
    places = dict(zip(names, floats(steps), strict=True))
    if fits(crop, shape):
        return places
    # Smaller images are known only when the model runs, or are here: nothing to choose then.
    room = tf.reduce_all([one >= 0 for one in free])
    inner = largest_window(shape, proportion(crop), 1.0)
    sides = [tf.where(room, float(own), one) for own, one in zip(crop, inner, strict=True)]
    middle = [(side - own) / 2 for side, own in zip(floats(shape[:2]), sides, strict=True)]
    places = {
        name: tf.where(room, places[name], one) for name, one in zip(names, middle, strict=True)
    }
    count = tf.shape(places["crop_top"])
    return {
        **places,
        "crop_height": tf.broadcast_to(sides[0], count),
        "crop_width": tf.broadcast_to(sides[1], count),
    }


def still_window(shape: Shape, result: Sides, settings: WindowSettings) -> Drawn:
    """The window for inference, in the middle; scalars under the names of `drawn_window`."""
    height, width = floats(shape[:2])
    if settings == (None, None, None):
        return {}
    if settings.crop is not None and fits(settings.crop, shape):
        own_height, own_width = settings.crop
        return {"crop_top": (shape[0] - own_height) // 2, "crop_left": (shape[1] - own_width) // 2}
    own_height, own_width = largest_window(shape, proportion(settings.crop or result), 1.0)
    if settings.crop is not None:
        room = tf.reduce_all(
            [own <= side for own, side in zip(settings.crop, shape[:2], strict=True)]
        )
        own_height = tf.where(room, float(settings.crop[0]), own_height)
        own_width = tf.where(room, float(settings.crop[1]), own_width)
    return {
        # Whole pixels, so that a window of the result's size copies pixels.
        "crop_top": tf.floor((height - own_height) / 2),
        "crop_left": tf.floor((width - own_width) / 2),
        "crop_height": own_height,
        "crop_width": own_width,
    }


def largest_window(shape: Shape, ratio: Any, area: Any) -> Sides:
    """Height and width of a window in an image; smaller than asked for if it does not fit."""
    height, width = floats(shape[:2])
    # Which part of the height and of the width: the product is the area.
    stretch = ratio * height / width
    # Neither part may be more than all.
    area = tf.minimum(area, tf.minimum(stretch, 1 / stretch))
    return height * tf.sqrt(area / stretch), width * tf.sqrt(area * stretch)


def fits(crop: tuple[int, int], shape: Shape) -> bool:
    return all(
        isinstance(side, int) and own <= side for own, side in zip(crop, shape[:2], strict=True)
    )


def proportion(sides: Sides) -> tf.Tensor:
    height, width = floats(sides)
    return width / height


def floats(values: Any) -> list[tf.Tensor]:
    return [tf.cast(one, tf.float32) for one in values]
