"""`RandomGaussianBlur`: each image blurred by a strength of its own."""

import numbers
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    Range,
    as_probability,
    as_range,
    as_value_range,
    plain,
)
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.color.matrices import clipped_to
from keras_multigpu.augmentation.examples.forms import Drawn, Shape
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import value_error

# Added to a deviation, as in Keras: a kernel of deviation 0 keeps the pixel as it is.
_NO_WIDTH = 1e-6


@keras.saving.register_keras_serializable("keras_multigpu")
class RandomGaussianBlur(AugmentationLayer):
    """A Gaussian blur whose strength is drawn for each image, and for both axes.

    Keras draws it once for a batch. The kernel is that of Keras, and as there, what lies beyond
    the border counts as 0, which is why the border gets darker. One number for `factor` is the
    probability here; in Keras it is the upper end of a range of them, so that 1 blurs half of
    the images.

    Args:
        factor: The probability of a blur; a pair for one that is drawn between two.
        kernel_size: The side of the kernel in pixels, odd. About six times `sigma` is enough.
        sigma: The standard deviation in pixels, lowest and highest; one number x for 0 to x.
        value_range: The values of black and white in the images.
        seed: Integer, decides the draws in a model. In a pipeline the seed of the `Batches` does.
        bounding_box_format: How boxes come, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    settings = ("factor", "kernel_size", "sigma", "value_range")

    def __init__(
        self,
        factor: float | Range = 1.0,
        *,
        kernel_size: int = 3,
        sigma: float | Range = 1.0,
        value_range: Range = (0, 255),
        seed: int | None = None,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(seed=seed, bounding_box_format=bounding_box_format, **kwargs)
        require_odd(kernel_size)
        self.factor = plain(factor)
        self.kernel_size = int(kernel_size)
        self.sigma = as_range("sigma", sigma, low=0, high=1000, symmetric=False)
        self.value_range = as_value_range(value_range)
        self._probability = as_probability("factor", factor)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw `"sigma"`, `float32[n, 2]`: along rows and along columns; zeros for no blur."""
        draws = Draws(seeds)
        blurs = draws.happens(self._probability)
        sigma = tf.stack([draws.uniform(*self.sigma), draws.uniform(*self.sigma)], axis=1)
        return {"sigma": tf.where(blurs[:, None], sigma, 0.0)}

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        along_rows, along_columns = (
            gaussian_kernels(drawn["sigma"][:, axis], self.kernel_size) for axis in (0, 1)
        )
        images = blurred(images, along_rows, along_columns)
        return clipped_to(images, self.value_range)


def require_odd(kernel_size: object) -> None:
    whole = isinstance(kernel_size, numbers.Integral) and not isinstance(kernel_size, bool)
    if not whole or kernel_size < 1 or kernel_size % 2 == 0:  # type: ignore[operator]
        raise value_error(
            "`kernel_size` is not a positive odd number.",
            "Expected 1, 3, 5, ..., so that the kernel has a pixel in its middle.",
            "Pass for example `kernel_size=3`.",
            kernel_size=kernel_size,
        )


def gaussian_kernels(sigma: tf.Tensor, size: int) -> tf.Tensor:
    """Kernels that sum to 1, `float32[n, size]`, for deviations `float32[n]`."""
    distances = tf.range(size, dtype=tf.float32) - (size - 1) / 2
    weights = tf.exp(-0.5 * (distances / (sigma[:, None] + _NO_WIDTH)) ** 2)
    return weights / tf.reduce_sum(weights, axis=1, keepdims=True)


def blurred(images: tf.Tensor, along_rows: tf.Tensor, along_columns: tf.Tensor) -> tf.Tensor:
    """Images filtered along both axes, each with its own kernels, `float32[n, size]`."""
    # A convolution has one kernel for each channel, so the images become channels of one.
    count, height, width = (tf.shape(images)[axis] for axis in range(3))
    channels = images.shape[3]
    # A convolution without channels is refused, and so an empty batch gets one.
    several = tf.maximum(count, 1) if images.shape[0] in (None, 0) else count
    missing = [[0, several - count], [0, 0]]
    padded = images if several is count else tf.pad(images, [*missing, [0, 0], [0, 0]])
    folded = tf.reshape(tf.transpose(padded, [1, 2, 0, 3]), [1, height, width, several * channels])
    # One axis after the other: 30 products for a pixel of a kernel of 15 x 15, and not 225.
    for kernels, axis in ((along_rows, 0), (along_columns, 1)):
        if several is not count:
            kernels = tf.pad(kernels, missing)
        filters = tf.expand_dims(tf.repeat(tf.transpose(kernels), channels, axis=1), axis)
        folded = tf.nn.depthwise_conv2d(folded, filters[..., None], [1, 1, 1, 1], "SAME")
    unfolded = tf.reshape(folded, [height, width, several, channels])
    return tf.transpose(unfolded, [2, 0, 1, 3])[:count]
