"""Which colors pixels get: linear changes of them, and hue and saturation, which are not linear.

A `ColorMap` says `matrix @ color + bias`. Maps are composed before any pixel is touched, so a
chain of them costs as much as one. Most of them multiply each channel by itself alone, which is
several times cheaper than a matrix; how many axes `matrices` has says which kind it is.

Hue and saturation, as hexagonal coordinates (HSV) have them, are both changed in one pass, without
going there and back. Hue goes round a circle of length 1. Saturation is a part of the brightest
channel, from 0 to 1.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import Range
from keras_multigpu.augmentation.compilation import fused
from keras_multigpu.checks import value_error

LUMA = (0.2989, 0.587, 0.114)
"""What red, green and blue add to the brightness that eyes see, as in ITU-R BT.601."""


class ColorMap(NamedTuple):
    """A linear change of colours for each image of a batch.

    Args:
        matrices: None to change nothing, `float32[n, 1]` or `[n, 3]` to multiply channels, or
            `[n, 3, 3]`, whose rows make the new red, green and blue.
        bias: `float32[n, 1]` or `[n, 3]`, added in the end.
    """

    matrices: tf.Tensor | None
    bias: tf.Tensor


def shifted(shift: tf.Tensor) -> ColorMap:
    """Something added, in the units of the images: brightness, or a shift of each channel."""
    return ColorMap(None, shift)


def away_from(color: tf.Tensor, factor: tf.Tensor) -> ColorMap:
    """The distance of each colour from one, `float32[n, 1]` or `[n, 3]`, times a factor.

    From the mean this is contrast, from black it scales the values, and from the middle of the
    range of values a factor of -1 inverts the image.
    """
    return ColorMap(factor[:, None], (1 - factor[:, None]) * color)


def blended_with_gray(amount: tf.Tensor) -> ColorMap:
    """Colours on their way (0 to 1) to the gray of their luminance; below 0 away from it."""
    gray = tf.tile(tf.constant([LUMA], tf.float32), [3, 1])
    amount = amount[:, None, None]
    return ColorMap((1 - amount) * tf.eye(3) + amount * gray, tf.zeros_like(amount[:, :, 0]))


def then(first: ColorMap, second: ColorMap) -> ColorMap:
    """Two maps as one, without a clip between them."""
    if first.matrices is None:
        return ColorMap(second.matrices, mapped(second.matrices, first.bias) + second.bias)
    if second.matrices is None:
        return ColorMap(first.matrices, first.bias + second.bias)
    bias = mapped(second.matrices, first.bias) + second.bias
    if first.matrices.shape.rank == second.matrices.shape.rank == 2:
        return ColorMap(second.matrices * first.matrices, bias)
    return ColorMap(tf.matmul(full(second.matrices), full(first.matrices)), bias)


def mapped(matrices: tf.Tensor | None, colors: tf.Tensor) -> tf.Tensor:
    """One colour for each image, `float32[n, 1]` or `[n, 3]`, through matrices."""
    if matrices is None:
        return colors
    if matrices.shape.rank == 2:
        return matrices * colors
    # Both cases of one colour: gray is the same in all three channels.
    return tf.reduce_sum(matrices * colors[:, None, :], axis=2)


def full(matrices: tf.Tensor) -> tf.Tensor:
    """Matrices with all their nine numbers, `float32[n, 3, 3]`."""
    if matrices.shape.rank == 3:
        return matrices
    return matrices[:, :, None] * tf.eye(3)


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
    # Long rows first: to sum over pixels of a few numbers each takes three times as long.
    rows = tf.reduce_mean(tf.reshape(images, [count, height, width * channels]), axis=1)
    means = tf.reduce_mean(tf.reshape(rows, [count, width, channels]), axis=1)
    return means[:, : color_channels(channels)]


def clipped_to(images: tf.Tensor, value_range: Range) -> tf.Tensor:
    """Images with every value inside the range, in one pass over them."""
    low, high = (tf.constant(value, images.dtype) for value in value_range)
    return tf.raw_ops.ClipByValue(t=images, clip_value_min=low, clip_value_max=high)


def apply_matrices(
    images: tf.Tensor,
    matrices: tf.Tensor | None,
    bias: tf.Tensor,
    value_range: Range,
) -> tf.Tensor:
    """Change the colors of images by a `ColorMap` and clip them. Alpha stays as it is."""
    channels = images.shape[3]
    if color_channels(channels) == 1:
        if matrices is not None:
            # Gray has the same number in all channels, so the sum of a row is its factor.
            matrices = tf.reduce_sum(full(matrices)[:, :1], axis=2)
        bias = bias[:, :1]
    return fused(clipped_colors, [images, matrices, bias], value_range)


def clipped_colors(
    images: tf.Tensor, matrices: tf.Tensor | None, bias: tf.Tensor, value_range: Range
) -> tf.Tensor:
    if matrices is None or matrices.shape.rank == 2:
        return clipped_to(scaled(images, matrices, bias), value_range)
    matrices, bias = with_alpha(matrices, bias, images.shape[3])
    # Not a matrix product, which graphics cards round to eleven bits.
    result = bias[:, None, None]
    for channel in range(images.shape[3]):
        result += images[..., channel, None] * matrices[:, None, None, :, channel]
    return clipped_to(result, value_range)


def with_alpha(matrices: tf.Tensor, bias: tf.Tensor, channels: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Matrices and their bias for images that may have a fourth channel, which stays."""
    count = tf.shape(matrices)[0]
    bias = tf.broadcast_to(bias, [count, 3])
    if channels == 4:
        matrices = tf.pad(matrices, [[0, 0], [0, 1], [0, 1]])
        matrices += tf.constant(np.diag([0, 0, 0, 1]), tf.float32)
        bias = tf.pad(bias, [[0, 0], [0, 1]])
    return matrices, bias


def scaled(images: tf.Tensor, factors: tf.Tensor | None, bias: tf.Tensor) -> tf.Tensor:
    channels = images.shape[3]
    one = bias.shape[1] == 1 and (factors is None or factors.shape[1] == 1)
    if one and channels in (1, 3):
        # One number for the whole image is the cheapest of all.
        if factors is not None:
            images = images * factors[:, None, None]
        return images + bias[:, None, None]
    count, height, width = (tf.shape(images)[axis] for axis in range(3))

    def in_rows(values: tf.Tensor, for_alpha: float) -> tf.Tensor:
        colors = color_channels(channels)
        values = tf.broadcast_to(values, [count, colors])
        values = tf.pad(values, [[0, 0], [0, channels - colors]], constant_values=for_alpha)
        return tf.tile(values, [1, width])[:, None]

    # Over three numbers at a time, the same takes four times as long as over a row.
    rows = tf.reshape(images, [count, height, width * channels])
    if factors is not None:
        rows = rows * in_rows(factors, 1.0)
    return tf.reshape(rows + in_rows(bias, 0.0), tf.shape(images))


SIXTHS = (5.0, 3.0, 1.0)
"""How far red, green and blue lie from where they are weakest, in sixths of the circle."""


def change_hue_and_saturation(
    images: tf.Tensor,
    shift: tf.Tensor | None,
    factor: tf.Tensor | None,
    black: float,
) -> tf.Tensor:
    """Turn the hue by a part of the circle and multiply the saturation; gray and alpha stay."""
    if color_channels(images.shape[3]) == 1 or (shift is None and factor is None):
        return images
    count = tf.shape(images)[:1]
    shift = tf.zeros(count) if shift is None else shift
    factor = tf.ones(count) if factor is None else factor
    return fused(turned, [images, shift, factor], black)


def turned(images: tf.Tensor, shift: tf.Tensor, factor: tf.Tensor, black: float) -> tf.Tensor:
    """Images of another hue and saturation; the arguments are those above."""
    shift, factor = shift[:, None, None], factor[:, None, None]
    red, green, blue, *alpha = tf.unstack(images, axis=3)
    lightest = tf.maximum(tf.maximum(red, green), blue)
    spread = lightest - tf.minimum(tf.minimum(red, green), blue)
    # Gray has no hue, and any will do.
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
        # The way back from HSV without cases, V - V S max(0, min(k, 4 - k, 1)); the spread is V S.
        return lightest - spread * tf.clip_by_value(tf.minimum(place, 4 - place), 0.0, 1.0)

    return tf.stack([*(channel(sixths) for sixths in SIXTHS), *alpha], axis=3)
