"""`RandomColor`: brightness, contrast, saturation, hue, channel shift and grayscale in one."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    Range,
    as_range,
    as_value_range,
    is_pair,
    plain,
    require_draws,
    require_probability,
)
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.color import (
    ColorMap,
    apply_matrices,
    away_from,
    blended_with_gray,
    change_hue_and_saturation,
    clipped_to,
    color_channels,
    mapped,
    mean_colors,
    shifted,
    then,
)
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.augmentation.random_numbers import Draws

CHANGES = ("brightness", "contrast", "saturation", "hue", "channel_shift", "grayscale")
"""What can be drawn."""


@keras.saving.register_keras_serializable("keras_multigpu")
class RandomColor(AugmentationLayer):
    """Brightness, contrast, saturation, hue, channel shift and grayscale, in this order.

    Arguments mean what the layers of these names mean in Keras, or in keras-cv for the channel
    shift. What you leave out costs nothing. Everything but hue and saturation is linear and becomes
    one matrix for each image, so every pixel is computed once. Values are clipped at the end, and
    before hue and saturation; Keras clips after every layer.

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
        channel_shift: From 0 to 1 (half the range of values), added to or subtracted from each
            channel by its own draw; one number x for 0 to x.
        grayscale: The probability of a gray image, which keeps its channels.
        value_range: The values of black and white in the images.
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
    """

    settings = (*CHANGES, "value_range")

    def __init__(
        self,
        *,
        brightness: float | Range = 0.0,
        contrast: float | Range = 0.0,
        saturation: float | Range | None = None,
        hue: float | Range = 0.0,
        channel_shift: float | Range = 0.0,
        grayscale: float = 0.0,
        value_range: Range = (0, 255),
        seed: int | None = None,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(seed=seed, bounding_box_format=bounding_box_format, **kwargs)
        require_probability("grayscale", grayscale)
        ranges = {
            "brightness": as_range("brightness", brightness, low=-1, high=1),
            "contrast": contrast_range(contrast),
            "hue": range_from_zero("hue", hue),
            "channel_shift": range_from_zero("channel_shift", channel_shift),
        }
        neutral = {"contrast": (1.0, 1.0)}
        self._ranges = {
            name: limits
            for name, limits in ranges.items()
            if limits != neutral.get(name, (0.0, 0.0))
        }
        if saturation is not None:
            self._ranges["saturation"] = range_from_zero("saturation", saturation)
        self.brightness = plain(brightness)
        self.contrast = plain(contrast)
        self.saturation = plain(saturation)
        self.hue = plain(hue)
        self.channel_shift = plain(channel_shift)
        self.grayscale = plain(grayscale)
        self.value_range = as_value_range(value_range)

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        """Draw `"brightness"`, `"contrast"` and so on, those in use.

        They are parts of the range of values to add, the factors of contrast and saturation, the
        part of the circle of hues, for the channel shift `float32[n, colours]`, and for
        grayscale whether it happens.
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
            drawn["hue"] = 0.5 * draws.uniform(*ranges["hue"]) * either_sign(draws)
        if "channel_shift" in ranges:
            shifts = [
                0.5 * draws.uniform(*ranges["channel_shift"]) * either_sign(draws)
                for _ in range(color_channels(shape[2]))
            ]
            drawn["channel_shift"] = tf.stack(shifts, axis=1)
        if self.grayscale:
            drawn["grayscale"] = draws.happens(self.grayscale)
        return drawn

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, CHANGES)
        before, after = self._maps(images, drawn)
        if "hue" not in drawn and "saturation" not in drawn:
            maps = [*before, *after]
        else:
            # Beyond the range of values there are no saturations from 0 to 1.
            inside = self._mapped(images, before)
            inside = inside if before else clipped_to(images, self.value_range)
            hue, saturation = drawn.get("hue"), drawn.get("saturation")
            black = self.value_range[0]
            images = change_hue_and_saturation(inside, hue, saturation, black)
            maps = after
        return self._mapped(images, maps)

    def _maps(self, images: tf.Tensor, drawn: Drawn) -> tuple[list[ColorMap], list[ColorMap]]:
        """What is linear, before hue and saturation and after them."""
        size = self.value_range[1] - self.value_range[0]
        before, after = [], []
        if "brightness" in drawn:
            before.append(shifted(drawn["brightness"][:, None] * size))
        if "contrast" in drawn:
            means = mean_colors(images)
            for earlier in before:
                means = mapped(earlier.matrices, means) + earlier.bias
            before.append(away_from(means, drawn["contrast"]))
        if "channel_shift" in drawn:
            after.append(shifted(drawn["channel_shift"] * size))
        # The weights of the channels sum to 0.9999, as in Keras; gray stays what it is.
        if "grayscale" in drawn and color_channels(images.shape[3]) == 3:
            after.append(blended_with_gray(tf.cast(drawn["grayscale"], tf.float32)))
        return before, after

    def _mapped(self, images: tf.Tensor, maps: list[ColorMap]) -> tf.Tensor:
        """Images through several maps, applied as one."""
        if not maps:
            return images
        together = maps[0]
        for following in maps[1:]:
            together = then(together, following)
        return apply_matrices(images, *together, self.value_range)


def either_sign(draws: Draws) -> tf.Tensor:
    return tf.where(draws.happens(0.5), -1.0, 1.0)


def range_from_zero(name: str, value: Any) -> Range:
    """A range of numbers from 0 to 1, where one number means all from 0 up to it."""
    return as_range(name, value, low=0, high=1, symmetric=False)


def contrast_range(contrast: Any) -> Range:
    """The factors of a contrast: one number for both directions, or how far down and how far up."""
    as_range("contrast", contrast, low=0, high=1)
    down, up = contrast if is_pair(contrast) else (contrast, contrast)
    return 1.0 - float(down), 1.0 + float(up)
