"""`RandomErasing`: a rectangle of each image covered by one value or by noise."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    Range,
    as_number,
    as_range,
    as_value_range,
    is_number,
    require,
)
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.compilation import fuse
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.seeded_layers import fold_seeds, hash_words

# How many bits of a hash become noise: a float32 holds no more.
_BITS = 24


@keras.saving.register_keras_serializable("keras_multigpu")
class RandomErasing(AugmentationLayer):
    """Erases a rectangle of some images; the defaults are those of Zhong et al. (2020).

    "Random Erasing Data Augmentation", AAAI 2020: half of the images lose 2 to 40 percent of their
    area, in a rectangle 0.3 to 1 / 0.3 times as high as wide, and get noise instead. A side longer
    than the image is cut to it. Boxes, masks and alpha stay as they are.

    `factor` is the probability; in Keras it is the upper end of a range of probabilities, so 1
    erases half of the images. Noise is uniform, as in the paper; Keras's is
    normal and clipped, so half of it is black.

    Args:
        factor: The probability of erasing.
        scale: The part of the image's area to erase, lowest and highest.
        aspect_ratio: Height over width of the rectangle, lowest and highest.
        fill_value: A number, or `"random"` for noise.
        value_range: The values of black and white, which the noise stays between.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    settings = ("factor", "scale", "aspect_ratio", "fill_value", "value_range")

    def __init__(
        self,
        factor: float = 0.5,
        *,
        scale: Range = (0.02, 0.4),
        aspect_ratio: Range = (0.3, 1 / 0.3),
        fill_value: Any = "random",
        value_range: Range = (0, 255),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.factor = as_number("factor", factor, low=0, high=1)
        self.scale = as_range("scale", scale, low=0, high=1)
        self.aspect_ratio = as_range(
            "aspect_ratio", aspect_ratio, low=0, high=100, open_low=True, pair_only=True
        )
        is_random = isinstance(fill_value, str) and fill_value == "random"
        fits = is_random or is_number(fill_value)
        require(fits, "fill_value", fill_value, "a number or 'random'")
        self.fill_value = fill_value
        self.value_range = as_value_range(value_range)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw `"erased"`, `int32[n, 4]`: left, top, right, bottom in pixels; zeros for nothing.

        For noise also `"noise"`, `int32[n, 2]`: the seeds from which it comes.
        """
        draws = Draws(seeds)
        erases = draws.happens(self.factor)
        height, width = (tf.cast(side, tf.float32) for side in shape[:2])
        area = draws.uniform(*self.scale) * height * width
        ratio = draws.uniform(*self.aspect_ratio)
        high = tf.minimum(tf.round(tf.sqrt(area * ratio)), height)
        wide = tf.minimum(tf.round(tf.sqrt(area / ratio)), width)
        top = draws.integers(height - high + 1)
        left = draws.integers(width - wide + 1)
        right, bottom = left + tf.cast(wide, tf.int32), top + tf.cast(high, tf.int32)
        box = tf.stack([left, top, right, bottom], axis=1)
        drawn = {"erased": tf.where(erases[:, None], box, 0)}
        if isinstance(self.fill_value, str):
            # Not the noise itself, which would be as large as the images.
            drawn["noise"] = fold_seeds(seeds, 0)
        return drawn

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        noise = drawn.get("noise")
        value = None if noise is not None else float(self.fill_value)
        return fuse(erase_boxes, [images, drawn["erased"], noise], self.value_range, value)


def count_colors(channels: int) -> int:
    return channels - 1 if channels in (2, 4) else channels


def erase_boxes(
    images: tf.Tensor,
    boxes: tf.Tensor,
    noise: tf.Tensor | None,
    value_range: Range,
    value: float | None,
) -> tf.Tensor:
    """Fill a box of each image with noise from the seeds `noise`, or with a value."""
    count, height, width = (tf.shape(images)[axis] for axis in range(3))
    channels = images.shape[3]
    flat = tf.reshape(images, [count, height, width * channels])
    filling = value
    if noise is not None:
        filling = noise_from(noise, height, width * channels, value_range)
    inside = inside_boxes(boxes, height, width, channels)
    return tf.reshape(tf.where(inside, filling, flat), tf.shape(images))


def inside_boxes(boxes: tf.Tensor, height: Any, width: Any, channels: int) -> tf.Tensor:
    """Which colours of flat rows are inside the boxes, `bool[n, height, width * channels]`."""
    left, top, right, bottom = (boxes[:, side, None] for side in range(4))
    row = tf.range(height)[None]
    place = tf.range(width * channels)[None]
    column, channel = place // channels, place % channels
    in_columns = (column >= left) & (column < right) & (channel < count_colors(channels))
    in_rows = (row >= top) & (row < bottom)
    return in_rows[:, :, None] & in_columns[:, None, :]


def noise_from(seeds: tf.Tensor, rows: Any, columns: Any, value_range: Range) -> tf.Tensor:
    """Uniform noise from seeds, `float32[n, rows, columns]`."""
    # Hashing each place would take ten times as long. The product of two random integers modulo
    # 2^32, one of them odd, is a hash in its high bits (Dietzfelbinger et al., "A Reliable
    # Randomized Algorithm for the Closest-Pair Problem", 1997).
    hashes = hash_words(seeds, tf.range(rows + columns)[None])
    of_rows = tf.bitwise.bitwise_or(hashes[:, :rows], tf.constant(1, tf.uint32))
    products = of_rows[:, :, None] * hashes[:, None, rows:]
    bits = tf.bitwise.right_shift(products, tf.constant(32 - _BITS, tf.uint32))
    low, high = value_range
    # Signed integers become floats twice as fast.
    noise = tf.cast(tf.bitcast(bits, tf.int32), tf.float32) * ((high - low) * 2.0**-_BITS)
    return noise + low if low != 0 else noise
