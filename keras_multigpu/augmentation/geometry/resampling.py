"""Reads images through affine maps; flips and crops them, which copies pixels."""

from typing import Any

import tensorflow as tf

from keras_multigpu.augmentation.compilation import fuse, is_on_host, pays_to_compile
from keras_multigpu.augmentation.examples import Drawn

# Keras's ways to fill what is outside an image, and to read between pixels.
FILL_MODES = ("reflect", "constant", "wrap", "nearest")
INTERPOLATIONS = ("bilinear", "nearest")

# The draws of flips and crops, with their types here.
SHIFTS = {
    "flip_horizontal": tf.bool,
    "flip_vertical": tf.bool,
    "crop_top": tf.int32,
    "crop_left": tf.int32,
}


def resample_images(
    images: tf.Tensor,
    matrices: tf.Tensor,
    size: tuple[Any, Any],
    *,
    interpolation: str = "bilinear",
    fill_mode: str = "reflect",
    fill_value: float = 0.0,
) -> tf.Tensor:
    """Return images of a size, read through affine maps like Keras's `affine_transform`."""
    # Keras uses TensorFlow's ImageProjectiveTransformV3, which computes each map again for every
    # channel, and does not run under XLA. `read` gives the same pixels. Compiled, as it always is
    # on a CPU, it is three to four times as fast.
    at_once = is_on_host() or tf.executing_eagerly()
    if at_once and not pays_to_compile((*images.shape[1:], *size)):
        # There may be images of many sizes; compiling for each would take longer than it saves.
        result = tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            # It takes projective maps; those that end in two zeros are affine.
            transforms=tf.pad(tf.reshape(matrices, (-1, 6)), ((0, 0), (0, 2))),
            output_shape=tf.stack(size),
            fill_value=fill_value,
            interpolation=interpolation.upper(),
            fill_mode=fill_mode.upper(),
        )
    else:
        settings = tuple(size), interpolation, fill_mode, fill_value
        result = fuse(read, [images, matrices], *settings, sizes=size)
    known = [side if isinstance(side, int) else None for side in size]
    return tf.ensure_shape(result, [images.shape[0], *known, images.shape[3]])


def read(
    images: tf.Tensor,
    matrices: tf.Tensor,
    size: tuple[Any, Any],
    interpolation: str,
    fill_mode: str,
    fill_value: float,
) -> tf.Tensor:
    """Read images where the maps take the pixels of the result; see `resample_images`."""
    count, height, width = tf.unstack(tf.shape(images)[:3])
    pixels = tf.reshape(images, (count, height * width, -1))
    x = bring_inside(places(matrices[:, 0], size), width, fill_mode)
    y = bring_inside(places(matrices[:, 1], size), height, fill_mode)

    def pixel(row: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
        inner_row = tf.clip_by_value(row, 0, height - 1)
        inner_column = tf.clip_by_value(column, 0, width - 1)
        values = tf.gather(pixels, inner_row * width + inner_column, batch_dims=1)
        if fill_mode != "constant":
            return values
        inside = (row == inner_row) & (column == inner_column)
        return tf.where(inside[..., None], values, fill_value)

    if interpolation == "nearest":
        return pixel(round_away(y), round_away(x))
    left, top = tf.floor(x), tf.floor(y)
    right_share, bottom_share = (x - left)[..., None], (y - top)[..., None]
    column, row = tf.cast(left, tf.int32), tf.cast(top, tf.int32)
    upper = between(pixel(row, column), pixel(row, column + 1), right_share)
    lower = between(pixel(row + 1, column), pixel(row + 1, column + 1), right_share)
    return between(upper, lower, bottom_share)


def between(first: tf.Tensor, second: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    return first + share * (second - first)


def round_away(positions: tf.Tensor) -> tf.Tensor:
    """Round to integers, halves away from zero."""
    # Like C++'s `std::round` in TensorFlow's operation; `tf.round` rounds halves to even.
    away = tf.floor(tf.abs(positions) + 0.5)
    return tf.cast(tf.where(positions < 0, -away, away), tf.int32)


def places(row: tf.Tensor, size: tuple[Any, Any]) -> tf.Tensor:
    """Where the result's pixels come from on one axis, `float32[n, *size]`."""
    y, x = (tf.cast(tf.range(side), tf.float32) for side in size)
    a, b, c = tf.unstack(row[:, None, None], axis=-1)
    return a * x + b * y[:, None] + c


def bring_inside(positions: tf.Tensor, size: tf.Tensor, fill_mode: str) -> tf.Tensor:
    """Replace positions outside the image by those where the fill mode finds their values."""
    size = tf.cast(size, tf.float32)
    if fill_mode == "constant":
        # Just outside is as good as far away, and no integer overflows.
        return tf.clip_by_value(positions, -2.0, size + 1)
    if fill_mode == "reflect":
        # The image and its mirror image repeat; here a pixel's middle is at one half.
        turn = 2 * size
        positions = positions + 0.5
        positions = positions - turn * tf.floor(positions / turn)
        positions = tf.minimum(positions, turn - positions) - 0.5
    if fill_mode == "wrap":
        positions = wrap(positions, size)
    return tf.clip_by_value(positions, 0.0, size - 1)


def wrap(positions: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Positions in an image that repeats, as TensorFlow's operation counts the repetitions."""
    # It moves by whole sizes, but as often as the size minus one fits: with each repetition one
    # pixel more stays outside.
    last = size - 1
    left = positions + size * (tf.floor(tf.math.divide_no_nan(-positions, last)) + 1)
    right = positions - size * tf.floor(tf.math.divide_no_nan(positions, last))
    return tf.where(positions < 0, left, tf.where(positions > last, right, positions))


def shift_images(images: tf.Tensor, drawn: Drawn, crop: tuple[int, int] | None) -> tf.Tensor:
    """Flip and then crop images by those of the draws in `SHIFTS` that are there."""
    names = tuple(name for name in SHIFTS if name in drawn)
    if not names:
        return images
    values = [tf.cast(drawn[name], SHIFTS[name]) for name in names]
    result = fuse(shift, [images, *values], names, crop)
    sides = crop if "crop_top" in names and crop else images.shape[1:3]
    return tf.ensure_shape(result, [images.shape[0], *sides, images.shape[3]])


def shift(images: tf.Tensor, *arguments: Any) -> tf.Tensor:
    """Do what `shift_images` promises, given a tensor for each name, the names, and the crop."""
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
