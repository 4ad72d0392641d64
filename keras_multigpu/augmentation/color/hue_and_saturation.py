"""Hue and saturation as hexagonal coordinates (HSV) have them; they are not matrices.

Both are changed in one pass, without going there and back. Hue goes round a circle of length 1.
Saturation is a part of the brightest channel, from 0 to 1.
"""

import tensorflow as tf

from keras_multigpu.augmentation.color.matrices import color_channels
from keras_multigpu.augmentation.compilation import fused

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
