"""Hue and saturation as hexagonal coordinates (HSV) have them; they are no matrices.

Both are changed in one pass. Hue goes round a circle of length 1. Saturation is a part of the
brightest channel, from 0 to 1.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.color_matrices import color_channels
from keras_multigpu.augmentation.opencv import opencv

_DEGREES = 360.0
"""The circle of hues, as OpenCV counts it for floats."""

_NO_LIMIT = float("inf")
"""For parts of a row that have none."""


def change_hue_and_saturation(
    images: tf.Tensor,
    shift: tf.Tensor | None,
    factor: tf.Tensor | None,
    black: float,
    on_host: bool = False,
) -> tf.Tensor:
    """Turn the hue and multiply the saturation. Gray images and alpha stay as they are.

    Args:
        images: `float32[n, height, width, channels]` with 1 to 4 channels, nothing below black.
        shift: `float32[n]`, a part of the circle from -1 to 1, or None.
        factor: `float32[n]`, at least 0, or None.
        black: The value of black.
        on_host: Whether Python may run, and with it OpenCV.
    """
    if color_channels(images.shape[3]) == 1 or (shift is None and factor is None):
        return images
    colors = images[..., :3] if images.shape[3] == 4 else images
    # The unit of the values does not matter, but black has to be 0.
    colors = colors - black if black else colors
    shift = None if shift is None else tf.math.floormod(shift, 1.0)
    changed = in_opencv if on_host and opencv() is not None else in_tensorflow
    colors = changed(colors, shift, factor)
    colors = colors + black if black else colors
    return tf.concat([colors, images[..., 3:]], axis=3) if images.shape[3] == 4 else colors


def in_tensorflow(
    images: tf.Tensor, shift: tf.Tensor | None, factor: tf.Tensor | None
) -> tf.Tensor:
    """The pass with TensorFlow's conversions; what lies between them is done in long rows."""
    count, height, width = (tf.shape(images)[axis] for axis in range(3))
    rows = tf.reshape(tf.image.rgb_to_hsv(images), [count, height, width * 3])
    if factor is not None:
        one = tf.ones_like(factor)
        rows *= tf.tile(tf.stack([one, factor, one], axis=1), [1, width])[:, None]
        rows = tf.minimum(rows, tf.tile(tf.constant([_NO_LIMIT, 1.0, _NO_LIMIT]), [width]))
    if shift is not None:
        none = tf.zeros_like(shift)
        rows += tf.tile(tf.stack([shift, none, none], axis=1), [1, width])[:, None]
        limits = tf.tile(tf.constant([1.0, _NO_LIMIT, _NO_LIMIT]), [width])
        rows = tf.where(rows > limits, rows - 1, rows)
    return tf.image.hsv_to_rgb(tf.reshape(rows, tf.shape(images)))


def in_opencv(images: tf.Tensor, shift: tf.Tensor | None, factor: tf.Tensor | None) -> tf.Tensor:
    """The pass with OpenCV, an image at a time, which stays in the processor's cache."""
    count = tf.shape(images)[0]
    degrees = tf.zeros([count]) if shift is None else shift * _DEGREES
    factor = tf.ones([count]) if factor is None else factor
    inputs = [images, degrees, factor]
    result = tf.numpy_function(converted_by_opencv, inputs, tf.float32, stateful=False)
    return tf.ensure_shape(result, images.shape)


def converted_by_opencv(images: Any, shift: Any, factor: Any) -> Any:
    """Images of another hue, shifted by degrees from 0 to 360, and another saturation."""
    cv2 = opencv()
    result = np.empty_like(images)
    for image, degrees, times, target in zip(images, shift, factor, result, strict=True):
        hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_RGB2HSV))
        if times != 1:
            saturation *= times
            np.minimum(saturation, 1, out=saturation)
        # OpenCV wraps what is above the circle; below it, it does not.
        hue += degrees
        cv2.cvtColor(cv2.merge([hue, saturation, value]), cv2.COLOR_HSV2RGB, target)
    return result
