"""Flips and crops, which copy pixels as they are."""

from typing import Any

import tensorflow as tf

from keras_multigpu.augmentation.compilation import fused
from keras_multigpu.augmentation.examples import Drawn

NAMES = {
    "flip_horizontal": tf.bool,
    "flip_vertical": tf.bool,
    "crop_top": tf.int32,
    "crop_left": tf.int32,
}
"""What can be drawn for flips and crops, with the types that they have here."""


def shifted(images: tf.Tensor, drawn: Drawn, crop: tuple[int, int] | None) -> tf.Tensor:
    """Images flipped, and then cut, by any of the draws in `NAMES`."""
    names = tuple(name for name in NAMES if name in drawn)
    if not names:
        return images
    values = [tf.cast(drawn[name], NAMES[name]) for name in names]
    result = fused(shift, [images, *values], names, crop)
    sides = crop if "crop_top" in names and crop else images.shape[1:3]
    return tf.ensure_shape(result, [images.shape[0], *sides, images.shape[3]])


def shift(images: tf.Tensor, *arguments: Any) -> tf.Tensor:
    """Images flipped, and then cut, by a tensor for each name, the names, and a window's sides."""
    *values, names, crop = arguments
    drawn = dict(zip(names, values, strict=True))
    for name, axis in (("flip_horizontal", 2), ("flip_vertical", 1)):
        if name in drawn:
            flips = drawn[name][:, None, None, None]
            images = tf.where(flips, tf.reverse(images, [axis]), images)
    if "crop_top" in drawn and crop is not None:
        for name, axis, size in (("crop_top", 1, crop[0]), ("crop_left", 2, crop[1])):
            pixels = drawn[name][:, None] + tf.range(size)
            images = tf.gather(images, pixels, axis=axis, batch_dims=1)
    return images
