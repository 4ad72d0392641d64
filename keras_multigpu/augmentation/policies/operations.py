"""The operations from which policies such as RandAugment draw.

They do what Pillow's functions of the same name do (`ImageOps`, `ImageEnhance`), on 256 levels:
each takes and returns whole numbers from 0 to 255, as floats. They agree with Pillow exactly, or
within one level where another order of arithmetic rounds differently. Alpha, the last of two or
four channels, keeps its values.
"""

from collections.abc import Callable

import tensorflow as tf

from keras_multigpu.augmentation.arguments import Range
from keras_multigpu.augmentation.color import clip_to, color_channels, scale_colors
from keras_multigpu.augmentation.examples import Shape
from keras_multigpu.augmentation.geometry import affine

# A function of levels `float32[n, height, width, channels]` and magnitudes `float32[n]`.
Operation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# Black and white.
LEVELS = (0.0, 255.0)

# The weights of red, green and blue in gray, in parts of 65536, as in Pillow (ITU-R BT.601).
_LUMA = (19595, 38470, 7471)

# Added before levels are truncated, so that 99.99999 counts as 100.
_JUST_ABOVE = 1.0 / 1024


def as_levels(images: tf.Tensor, value_range: Range) -> tf.Tensor:
    """Round images to the 256 levels of their range of values."""
    low, high = value_range
    if value_range != LEVELS:
        images = (images - low) * (255 / (high - low))
    return tf.floor(clip_to(images, LEVELS) + 0.5)


def from_levels(levels: tf.Tensor, value_range: Range) -> tf.Tensor:
    low, high = value_range
    return levels if value_range == LEVELS else levels * ((high - low) / 255) + low


def identity(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    return levels


def auto_contrast(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Stretch each channel until its darkest value is 0 and its lightest is 255."""
    count, _, width, channels = tf.unstack(tf.shape(levels))
    rows = in_rows(levels)
    lightest, darkest = tf.reduce_max(rows, axis=1), tf.reduce_min(rows, axis=1)
    high = tf.reduce_max(tf.reshape(lightest, [count, width, channels]), axis=1)
    low = tf.reduce_min(tf.reshape(darkest, [count, width, channels]), axis=1)
    # A channel of one level stays as it is, as in Pillow.
    flat = high <= low
    factors = tf.where(flat, 1.0, 255 / tf.where(flat, 1.0, high - low))
    colors = color_channels(levels.shape[3])
    bias = tf.where(flat, 0.0, -low * factors)
    return whole(scale_colors(levels, factors[:, :colors], bias[:, :colors] + _JUST_ABOVE))


def equalize(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Spread the values of each channel so that all levels are about equally frequent."""
    colors, alpha = without_alpha(levels)
    count, _, width, channels = tf.unstack(tf.shape(colors))
    # Each channel of each image has 256 places of its own.
    first = tf.reshape(tf.range(count * channels) * 256, [count, 1, channels])
    first = tf.tile(tf.cast(first, tf.float32), [1, 1, width])
    places = tf.cast(in_rows(colors) + first, tf.int32)
    size = count * channels * 256
    counts = tf.math.bincount(tf.reshape(places, [-1]), minlength=size, maxlength=size)
    tables = tf.cast(equalizing(tf.reshape(counts, [-1, 256])), tf.float32)
    # On CPUs `tf.gather` is slower where it gathers single numbers.
    equalized = tf.gather_nd(tf.reshape(tables, [-1]), places[..., None])
    return tf.concat([tf.reshape(equalized, tf.shape(colors)), *alpha], axis=3)


def equalizing(counts: tf.Tensor) -> tf.Tensor:
    """What each level becomes when the histogram `counts`, `int32[m, 256]`, is equalized."""
    levels = tf.range(256)
    lightest = tf.reduce_max(tf.where(counts > 0, levels, 0), axis=1, keepdims=True)
    below_lightest = tf.reduce_sum(tf.where(levels < lightest, counts, 0), axis=1, keepdims=True)
    # As in Pillow, the lightest level does not count.
    step = below_lightest // 255
    before = tf.cumsum(counts, axis=1, exclusive=True)
    table = (step // 2 + before) // tf.maximum(step, 1)
    # With no more pixels than levels there is nothing to spread.
    return tf.where(step == 0, levels, tf.minimum(table, 255))


def solarize(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Invert the values from a threshold on, the magnitude."""
    colors, alpha = without_alpha(levels)
    # The distance from 0 or from 255; a choice for each pixel takes twice as long.
    turned = tf.cast(colors >= magnitude[:, None, None, None], tf.float32)
    return tf.concat([tf.abs(colors - 255 * turned), *alpha], axis=3)


def posterize(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Keep only the highest bits of values; the magnitude is their number."""
    colors, alpha = without_alpha(levels)
    # A power of two, exactly: `tf.pow` may be off by a little.
    step = tf.cast(tf.bitwise.left_shift(1, 8 - tf.cast(magnitude, tf.int32)), tf.float32)
    step = step[:, None, None, None]
    return tf.concat([tf.floor(colors / step) * step, *alpha], axis=3)


def color(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Blend with the gray image: a factor of 0 gives that image, 1 changes nothing."""
    colors, alpha = without_alpha(levels)
    factor = magnitude[:, None, None, None]
    return tf.concat([away_from(gray(colors), colors, factor), *alpha], axis=3)


def contrast(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Blend with the mean gray: a factor of 0 gives that gray, 1 changes nothing."""
    colors, _ = without_alpha(levels)
    mean = tf.floor(tf.reduce_mean(gray(colors), [1, 2]) + 0.5)
    factor = magnitude[:, None]
    return whole(scale_colors(levels, factor, (1 - factor) * mean + _JUST_ABOVE))


def brightness(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Blend with black: a factor of 0 gives black, 1 changes nothing."""
    factor = magnitude[:, None]
    return whole(scale_colors(levels, factor, tf.zeros_like(factor) + _JUST_ABOVE))


def sharpness(levels: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Blend with a smoothed image: a factor of 0 gives that image, 1 changes nothing."""
    colors, alpha = without_alpha(levels)
    channels, rows = colors.shape[3], in_rows(colors)
    # Sums of shifted images: a convolution would be set up again for each number of images.
    wide = tf.pad(rows, [[0, 0], [0, 0], [channels, channels]])
    sums = wide[:, :, : -2 * channels] + rows + wide[:, :, 2 * channels :]
    high = tf.pad(sums, [[0, 0], [1, 1], [0, 0]])
    sums = high[:, :-2] + sums + high[:, 2:]
    # Pillow's filter SMOOTH: 5 in the middle and 1 around it, in parts of 13.
    smooth = tf.floor((sums + 4 * rows) / 13 + 0.5)
    sharpened = away_from(smooth, rows, magnitude[:, None, None])
    # Pillow leaves the outermost pixels as they are.
    last = rows[:, :, channels:][:, :, -channels:]
    across = [rows[:, :, :channels], sharpened[:, :, channels:-channels], last]
    down = [rows[:, :1], tf.concat(across, axis=2)[:, 1:-1], rows[:, 1:][:, -1:]]
    return tf.concat([tf.reshape(tf.concat(down, axis=1), tf.shape(colors)), *alpha], axis=3)


def away_from(origin: tf.Tensor, levels: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiply the distance from another image by a factor."""
    return whole(origin + factor * (levels - origin) + _JUST_ABOVE)


def in_rows(levels: tf.Tensor) -> tf.Tensor:
    """Put the channels side by side, `float32[n, height, width * channels]`."""
    # The same work over a few channels at a time takes several times as long.
    count, height, width, channels = tf.unstack(tf.shape(levels))
    return tf.reshape(levels, [count, height, width * channels])


def whole(levels: tf.Tensor) -> tf.Tensor:
    return tf.floor(clip_to(levels, LEVELS))


def gray(colors: tf.Tensor) -> tf.Tensor:
    """The gray of each pixel in whole levels, `float32[n, height, width, 1]`."""
    if colors.shape[3] == 1:
        return colors
    red, green, blue = tf.split(colors, 3, axis=3)
    total = red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]
    # The sum is below 2^24, so floats hold it exactly.
    return tf.floor((total + 2**15) / 2**16)


def without_alpha(levels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    colors = color_channels(levels.shape[3])
    if colors == levels.shape[3]:
        return levels, []
    return levels[..., :colors], [levels[..., colors:]]


# The operations that move no pixels, by name.
VALUE_OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        *(identity, auto_contrast, equalize, solarize, posterize),
        *(color, contrast, brightness, sharpness),
    )
}

# The operations that move pixels. Their magnitudes are degrees counterclockwise, shares of the
# other side, and pixels.
GEOMETRIC_OPERATIONS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def geometric_matrices(kind: tf.Tensor, magnitude: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Affine maps by places in `GEOMETRIC_OPERATIONS`; other numbers change nothing."""
    degrees, shear_x, shear_y, x, y = (
        tf.where(kind == place, magnitude, 0.0) for place in range(len(GEOMETRIC_OPERATIONS))
    )
    # Only one of the three changes anything, so their order does not matter. Pillow's shears keep
    # the image's corner in place, those of `affine` the middle of the corner pixel.
    return affine.product(
        affine.rotation(degrees, shape[0], shape[1]),
        affine.shear(shear_x, shear_y),
        affine.translation(x - shear_x / 2, y - shear_y / 2),
    )
