"""`RandomColor`: brightness, contrast, saturation, hue and grayscale in one."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    Range,
    as_number,
    as_range,
    as_value_range,
    is_pair,
    require_draws,
)
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.color import (
    change_hue_and_saturation,
    color_channels,
    mean_colors,
    recolor,
)
from keras_multigpu.augmentation.compilation import fuse
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.random_numbers import Draws

CHANGES = ("brightness", "contrast", "saturation", "hue", "grayscale")


@keras.saving.register_keras_serializable("keras_multigpu")
class RandomColor(AugmentationLayer):
    """Brightness, contrast, saturation, hue and grayscale, in this order.

    Arguments mean what the layers of these names mean in Keras. What you leave out costs nothing.
    Everything but hue and saturation is linear and becomes one change, so every pixel is computed
    once. Values are clipped at the end, and before hue and saturation; Keras clips after every
    layer.

    It differs where Keras 3.15 does not do what its documentation says. One number for `contrast`
    works in both directions; in Keras it never lowers the contrast. One number for `saturation`
    starts at 0; in Keras half of the draws are below 0 and make the image gray. Saturation ends at
    1 for any range of values; with (0, 255), Keras continues below black. Alpha is not a colour and
    stays as it is.

    Args:
        brightness: Part of the range of values to add, from -1 to 1; one number x for -x to x.
        contrast: A pair (a, b) multiplies each channel's distance from its mean by 1 - a to
            1 + b; one number x means (x, x).
        saturation: From 0 (gray) to 1 (the most possible); 0.5 changes nothing. One number x for 0
            to x.
        hue: From 0 to 1 (half the circle, which makes red cyan), in either direction; one number
            x for 0 to x.
        grayscale: The probability of a gray image, which keeps its channels.
        value_range: The values of black and white in the images.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    settings = (*CHANGES, "value_range")

    def __init__(
        self,
        *,
        brightness: float | Range = 0.0,
        contrast: float | Range = 0.0,
        saturation: float | Range | None = None,
        hue: float | Range = 0.0,
        grayscale: float = 0.0,
        value_range: Range = (0, 255),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.brightness = brightness
        self.contrast = contrast
        self.saturation = saturation
        self.hue = hue
        self.grayscale = as_number("grayscale", grayscale, low=0, high=1)
        self.value_range = as_value_range(value_range)
        as_range("contrast", contrast, low=0, high=1)
        down_and_up: Any = contrast if is_pair(contrast) else (contrast, contrast)
        down, up = down_and_up
        ranges = {
            "brightness": as_range("brightness", brightness, low=-1, high=1),
            "contrast": (1 - float(down), 1 + float(up)),
            "hue": as_range("hue", hue, low=0, high=1),
        }
        if saturation is not None:
            ranges["saturation"] = as_range("saturation", saturation, low=0, high=1)
        neutral = {"brightness": 0, "contrast": 1, "hue": 0}
        self._ranges = {
            name: limits for name, limits in ranges.items() if {*limits} != {neutral.get(name)}
        }

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw `"brightness"`, `"contrast"` and so on, those in use.

        Brightness is a part of the range of values, contrast and saturation are factors, hue is a
        part of its circle, and grayscale a bool.
        """
        draws = Draws(seeds)
        ranges = self._ranges
        drawn: Drawn = {}
        for name in ("brightness", "contrast"):
            if name in ranges:
                drawn[name] = draws.uniform(*ranges[name])
        if "saturation" in ranges:
            amount = draws.uniform(*ranges["saturation"])
            # Keras's formula: at 0.5 the factor is 1, and towards 1 it has no limit.
            drawn["saturation"] = amount / (1 - amount + keras.config.epsilon())
        if "hue" in ranges:
            # Half the circle in either direction is all of it.
            sign = tf.where(draws.happens(0.5), -1.0, 1.0)
            drawn["hue"] = 0.5 * draws.uniform(*ranges["hue"]) * sign
        if self.grayscale:
            drawn["grayscale"] = draws.happens(self.grayscale)
        return drawn

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, CHANGES)
        black, white = self.value_range
        factor = bias = gray = None
        if "brightness" in drawn:
            bias = drawn["brightness"][:, None] * (white - black)
        if "contrast" in drawn:
            factor = drawn["contrast"][:, None]
            means = mean_colors(images)
            bias = (1 - factor) * means if bias is None else bias + (1 - factor) * means
        if "hue" in drawn or "saturation" in drawn:
            # Saturations from 0 to 1 exist only inside the range of values.
            images = fuse(recolor, [images, factor, bias, None], self.value_range)
            hue, saturation = drawn.get("hue"), drawn.get("saturation")
            images = change_hue_and_saturation(images, hue, saturation, black)
            factor = bias = None
        if color_channels(images.shape[3]) == 3:
            # The weights of the channels sum to 0.9999, as in Keras; gray images stay as they are.
            gray = drawn.get("grayscale")
        if factor is None and bias is None and gray is None:
            return images
        return fuse(recolor, [images, factor, bias, gray], self.value_range)
