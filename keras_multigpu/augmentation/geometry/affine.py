"""Affine maps, one for each image: where each pixel of a changed image comes from.

A map is a `float32[2, 3]` matrix that takes `(x, y, 1)` of a pixel of the result to the pixel of
the image it shows. The middle of the first pixel is at 0, not at 0.5. The maps are those of the
Keras layers of the same names, entry by entry.
"""

import math

import tensorflow as tf


def matrix(rows: tuple[tuple, tuple], count: int | tf.Tensor) -> tf.Tensor:
    """Make `float32[count, 2, 3]` of two rows of numbers or of `float32[count]`."""
    entries = [tf.broadcast_to(tf.cast(one, tf.float32), [count]) for row in rows for one in row]
    return tf.reshape(tf.stack(entries, axis=1), (-1, 2, 3))


def flip(horizontal: tf.Tensor, vertical: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Mirror images: left becomes right, top becomes bottom; `float32[n]`, 1 to flip."""
    rows = (
        (1 - 2 * horizontal, 0, horizontal * last(width)),
        (0, 1 - 2 * vertical, vertical * last(height)),
    )
    return matrix(rows, tf.shape(horizontal)[0])


def rotation(degrees: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Turn images about their middle by `float32[n]` degrees counterclockwise."""
    angle = degrees * (math.pi / 180)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    x, y = last(width) / 2, last(height) / 2
    rows = ((cosine, -sine, x - x * cosine + y * sine), (sine, cosine, y - x * sine - y * cosine))
    return matrix(rows, tf.shape(degrees)[0])


def translation(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Shift images to the right and down, by `float32[n]` pixels."""
    return matrix(((1, 0, -x), (0, 1, -y)), tf.shape(x)[0])


def zoom(x: tf.Tensor, y: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Show this part of width and height, `float32[n]`, about the middle; above 1 all shrinks."""
    rows = (x, 0, (1 - x) * (last(width) / 2)), (0, y, (1 - y) * (last(height) / 2))
    return matrix(rows, tf.shape(x)[0])


def shear(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Slant images about their upper left pixel.

    Each row moves `x` pixels further left than the one above, each column `y` further up.
    """
    return matrix(((1, x, 0), (y, 1, 0)), tf.shape(x)[0])


def window(
    left: tf.Tensor, top: tf.Tensor, height: tf.Tensor, width: tf.Tensor, size: tuple[int, int]
) -> tf.Tensor:
    """Cut a window out of images, in pixels, `float32[n]`, and resize it."""
    sides = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    y, x = (side / tf.cast(own, tf.float32) for side, own in zip(sides, size, strict=True))
    # The border of the window meets the border of the result, half a pixel from the middles of
    # the outermost pixels.
    rows = (x, 0, left + x / 2 - 0.5), (0, y, top + y / 2 - 0.5)
    return matrix(rows, tf.shape(left)[0])


def product(first: tf.Tensor, *later: tf.Tensor) -> tf.Tensor:
    """The map of several changes, made one after another."""
    for one in later:
        # Not `tf.matmul`, which rounds to ten bits on many GPUs.
        linear = tf.reduce_sum(first[:, :, :2, None] * one[:, None], axis=2)
        first = linear + tf.pad(first[:, :, 2:], ((0, 0), (0, 0), (2, 0)))
    return first


def inverse(matrices: tf.Tensor) -> tf.Tensor:
    """The maps from pixels of the images to pixels of the results; zeros where there is none."""
    (a, b, x), (c, d, y) = (tf.unstack(row, axis=1) for row in tf.unstack(matrices, axis=1))
    size = a * d - b * c
    a, b, c, d = (tf.math.divide_no_nan(one, size) for one in (d, -b, -c, a))
    return matrix(((a, b, -a * x - b * y), (c, d, -c * x - d * y)), tf.shape(x)[0])


def move_boxes(boxes: tf.Tensor, matrices: tf.Tensor) -> tf.Tensor:
    """Move boxes; each becomes the smallest that holds its moved corners."""
    left, top, right, bottom = tf.unstack(boxes, axis=2)
    # In boxes the first pixel extends from 0 to 1; in maps its middle is at 0.
    x = tf.stack([left, right, left, right], axis=2)[:, None] - 0.5
    y = tf.stack([top, top, bottom, bottom], axis=2)[:, None] - 0.5
    a, b, c = tf.unstack(inverse(matrices)[:, :, None, None], axis=4)
    corners = a * x + b * y + c + 0.5
    sides = tf.reduce_min(corners, axis=3), tf.reduce_max(corners, axis=3)
    return tf.reshape(tf.transpose(tf.stack(sides, axis=1), (0, 3, 1, 2)), tf.shape(boxes))


def last(size: int | tf.Tensor) -> tf.Tensor:
    return tf.cast(size, tf.float32) - 1
