"""How pixels get other colours: by linear changes, and by changes of hue and saturation.

A linear change is `matrix @ color + bias`. Several of them become one before any pixel is touched,
so they cost as much as one. Those that multiply each channel by itself need no matrix, which is
several times cheaper.

Hue and saturation, as hexagonal coordinates (HSV) have them, change together in one pass, without
a conversion there and back. Hue goes round a circle of length 1. Saturation is relative to the
brightest channel, from 0 to 1.
"""

import tensorflow as tf

from keras_multigpu.augmentation.arguments import Range
from keras_multigpu.augmentation.compilation import fuse
from keras_multigpu.checks import value_error

# The weights of red, green and blue in the brightness that eyes see, as in ITU-R BT.601.
LUMA = (0.2989, 0.587, 0.114)


def color_channels(channels: int) -> int:
    """How many of the channels are colours; the rest is alpha."""
    if channels not in (1, 2, 3, 4):
        raise value_error(
            "It is not known which channels of the images are colors.",
            "Expected one channel (gray) or three (red, green, blue), and perhaps alpha.",
            "Change the colours before other channels are added.",
            channels=channels,
        )
    return 1 if channels < 3 else 3


def mean_colors(images: tf.Tensor) -> tf.Tensor:
    """The mean of each colour channel, `float32[n, 1]` or `[n, 3]`."""
    count, height, width = (tf.shape(images)[axis] for axis in range(3))
    channels = images.shape[3]
    # Long rows first: summing over pixels of a few numbers each takes three times as long.
    rows = tf.reduce_mean(tf.reshape(images, [count, height, width * channels]), axis=1)
    means = tf.reduce_mean(tf.reshape(rows, [count, width, channels]), axis=1)
    return means[:, : color_channels(channels)]


def clip_to(images: tf.Tensor, value_range: Range) -> tf.Tensor:
    """Clip images to a range, in one pass over them."""
    low, high = (tf.constant(value, images.dtype) for value in value_range)
    return tf.raw_ops.ClipByValue(t=images, clip_value_min=low, clip_value_max=high)


def recolor(
    images: tf.Tensor,
    factor: tf.Tensor | None,
    bias: tf.Tensor | None,
    gray: tf.Tensor | None,
    value_range: Range,
) -> tf.Tensor:
    """Multiply colours, add to them, turn some images gray, and clip. Alpha stays as it is.

    Args:
        images: `float32[n, height, width, channels]`.
        factor: `float32[n, 1]`, or None for 1.
        bias: `float32[n, 1]` or `[n, 3]`, or None for 0.
        gray: `bool[n]`, or None for no image.
        value_range: The values of black and white.
    """
    images = scale_colors(images, factor, bias)
    if gray is not None:
        red, green, blue, *alpha = tf.unstack(images, axis=3)
        # Not a matrix product, which graphics cards round to eleven bits.
        luminance = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
        grays = tf.stack([luminance, luminance, luminance, *alpha], axis=3)
        images = tf.where(gray[:, None, None, None], grays, images)
    return clip_to(images, value_range)


def scale_colors(images: tf.Tensor, factor: tf.Tensor | None, bias: tf.Tensor | None) -> tf.Tensor:
    """Multiply colours and add to them; both arguments are `float32[n, 1]` or `[n, 3]`."""
    channels = images.shape[3]
    given = [values for values in (factor, bias) if values is not None]
    if channels in (1, 3) and all(values.shape[1] == 1 for values in given):
        # One number for the whole image is the cheapest of all.
        images = images if factor is None else images * factor[:, None, None]
        return images if bias is None else images + bias[:, None, None]
    count, height, width = (tf.shape(images)[axis] for axis in range(3))

    def in_rows(values: tf.Tensor, for_alpha: float) -> tf.Tensor:
        colors = color_channels(channels)
        values = tf.broadcast_to(values, [count, colors])
        values = tf.pad(values, [[0, 0], [0, channels - colors]], constant_values=for_alpha)
        return tf.tile(values, [1, width])[:, None]

    # Over three numbers at a time, the same takes four times as long as over a row.
    rows = tf.reshape(images, [count, height, width * channels])
    rows = rows if factor is None else rows * in_rows(factor, 1.0)
    rows = rows if bias is None else rows + in_rows(bias, 0.0)
    return tf.reshape(rows, tf.shape(images))


# How far red, green and blue are from the hue where they are weakest, in sixths of the circle.
SIXTHS = (5.0, 3.0, 1.0)


def change_hue_and_saturation(
    images: tf.Tensor,
    shift: tf.Tensor | None,
    factor: tf.Tensor | None,
    black: float,
) -> tf.Tensor:
    """Shift the hue by a part of the circle and multiply the saturation; gray and alpha stay."""
    if color_channels(images.shape[3]) == 1:
        return images
    count = tf.shape(images)[:1]
    shift = tf.zeros(count) if shift is None else shift
    factor = tf.ones(count) if factor is None else factor
    return fuse(turn, [images, shift, factor], black)


def turn(images: tf.Tensor, shift: tf.Tensor, factor: tf.Tensor, black: float) -> tf.Tensor:
    shift, factor = shift[:, None, None], factor[:, None, None]
    red, green, blue, *alpha = tf.unstack(images, axis=3)
    lightest = tf.maximum(tf.maximum(red, green), blue)
    spread = lightest - tf.minimum(tf.minimum(red, green), blue)
    # Gray has no hue; any will do.
    whole = 6 * tf.where(spread > 0, spread, 1.0)
    hue = tf.where(
        lightest == red,
        (green - blue) / whole,
        tf.where(lightest == green, (blue - red) / whole + 1 / 3, (red - green) / whole + 2 / 3),
    )
    # No channel gets darker than black.
    spread = tf.minimum(spread * factor, lightest - black)

    def channel(sixths: float) -> tf.Tensor:
        place = 6 * (hue + shift) + sixths
        place -= 6 * tf.floor(place / 6)
        # From HSV without cases: V - V S max(0, min(k, 4 - k, 1)), where V S is the spread.
        return lightest - spread * tf.clip_by_value(tf.minimum(place, 4 - place), 0.0, 1.0)

    return tf.stack([*(channel(sixths) for sixths in SIXTHS), *alpha], axis=3)
