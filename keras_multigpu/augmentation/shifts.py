"""Flips and crops, which copy pixels as they are."""

import functools
from collections.abc import Callable

import tensorflow as tf

from keras_multigpu.augmentation.compilation import pays_to_compile
from keras_multigpu.augmentation.examples import Drawn

NAMES = {
    "flip_horizontal": tf.bool,
    "flip_vertical": tf.bool,
    "crop_top": tf.int32,
    "crop_left": tf.int32,
}
"""What can be drawn for flips and crops, with the types that they have here."""


def shifted(
    images: tf.Tensor, drawn: Drawn, crop: tuple[int, int] | None, on_host: bool
) -> tf.Tensor:
    """Images flipped, and then cut.

    Args:
        images: `float32[n, height, width, channels]`.
        drawn: Any of `NAMES`; a crop needs both of its places.
        crop: Height and width of the window at that place.
        on_host: Whether this is a pipeline on the CPU.
    """
    names = tuple(name for name in NAMES if name in drawn)
    if not names:
        return images
    values = [tf.cast(drawn[name], NAMES[name]) for name in names]
    if pays_to_compile(images.shape[1:], on_host):
        result = compiled_shift(names, crop)(images, *values)
    else:
        result = shift(names, crop, images, *values)
    sides = crop if "crop_top" in names and crop else images.shape[1:3]
    return tf.ensure_shape(result, [images.shape[0], *sides, images.shape[3]])


@functools.cache
def compiled_shift(names: tuple[str, ...], crop: tuple[int, int] | None) -> Callable:
    """`shift` with these names and this window, compiled by XLA."""
    specs = [tf.TensorSpec([None], NAMES[name]) for name in names]

    def shift_all(images: tf.Tensor, *values: tf.Tensor) -> tf.Tensor:
        return shift(names, crop, images, *values)

    return tf.function(
        shift_all,
        input_signature=[tf.TensorSpec([None] * 4), *specs],
        jit_compile=True,
        autograph=False,
    )


def shift(
    names: tuple[str, ...], crop: tuple[int, int] | None, images: tf.Tensor, *values: tf.Tensor
) -> tf.Tensor:
    """Images flipped, and then cut.

    Args:
        names: Which of `NAMES` the values are.
        crop: Height and width of the window.
        images: `float32[n, height, width, channels]`.
        *values: A tensor for each name.
    """
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
