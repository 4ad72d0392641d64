"""`RandomGeometry`: every move of an image's pixels, in one step."""

import math
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import (
    Range,
    as_range,
    as_size,
    as_two_ranges,
    is_number,
    is_pair,
    require,
    require_draws,
)
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, image_shape
from keras_multigpu.augmentation.geometry import affine
from keras_multigpu.augmentation.geometry.resampling import (
    FILL_MODES,
    INTERPOLATIONS,
    SHIFTS,
    resample_images,
    shift_images,
)
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_choice, value_error

# Height and width, numbers or tensors.
Sides = tuple[Any, Any]

# The names of the draws for each value of `flip`.
FLIPS: dict[str | None, tuple[str, ...]] = {
    None: (),
    "horizontal": ("flip_horizontal",),
    "vertical": ("flip_vertical",),
    "horizontal_and_vertical": ("flip_horizontal", "flip_vertical"),
}

# The names of the draws that make a window.
WINDOWS = ("crop_top", "crop_left", "crop_height", "crop_width")

# The names of all draws.
MOVES = (
    *("flip_horizontal", "flip_vertical", "rotation", "height_translation", "width_translation"),
    *("height_zoom", "width_zoom", "x_shear", "y_shear", *WINDOWS),
)


@keras.saving.register_keras_serializable("keras_multigpu")
class RandomGeometry(AugmentationLayer):
    """Flips, rotates, shifts, zooms, shears and crops images, in one step.

    Gives what the Keras layers `RandomFlip`, `RandomRotation`, `RandomTranslation`, `RandomZoom`
    and `RandomShear` give one after another, in this order, and then crops. But it interpolates
    pixels only once, which is faster and keeps images sharp, and loses nothing that a later step
    moves back into the picture.

    A flip, and a crop without `size`, copy pixels unchanged. XLA can compile this layer, unlike
    those, and the model around it. When images become much smaller, some pixels are skipped, as in
    `keras.layers.Resizing`.

    With `horizontal_and_vertical` each direction is drawn independently; Keras draws one for both.
    Segmentation masks are read without interpolation and filled as the images are, as in Keras.
    A moved bounding box is the smallest that holds all corners of the old one.

    Args:
        flip: None, `"horizontal"`, `"vertical"` or `"horizontal_and_vertical"`; with probability
            1/2.
        rotation: As fractions of a full turn, counterclockwise: 0.1 for -36 to 36 degrees, or a
            (low, high) pair.
        translation: As fractions of the size. One number for both axes, or a pair for down and
            right, each a number or a (low, high) pair.
        zoom: 0.1 shows 90 % to 110 % of the height and as much of the width; negative numbers
            make things larger. Or a pair for height and width, each a number or a (low, high)
            pair; None for the width lets it follow the height.
        shear: Moves rows by this part of their distance from the top, and columns likewise. One
            number for both, or a pair for rows and columns, each a number or a (low, high) pair
            from 0 to 1. Half of the images are slanted the other way.
        aspect_ratio: (low, high): how many times wider than the result, for its height, the cut-out
            window is. 1 does not distort. Drawn evenly in its logarithm.
        crop_area: (low, high): the window's part of the area. A window that does not fit becomes
            the largest of its shape. With `(0.08, 1)` and an aspect ratio of `(3 / 4, 4 / 3)` these
            are the crops of Szegedy et al., "Going deeper with convolutions", 2015.
        crop: Height and width in pixels of a window, cut out anywhere. Smaller images give the
            largest window of this shape.
        size: Height and width of the result; by default those of `crop`, or of the image. Inference
            gives this size, too: from the whole image, or with `crop`, `crop_area` or
            `aspect_ratio` from the middle.
        fill_mode: How to fill what is outside the image: `"reflect"`, `"constant"`, `"wrap"` or
            `"nearest"`.
        fill_value: Number, for `"constant"`.
        interpolation: `"bilinear"` or `"nearest"`.
        **kwargs: `seed`, `bounding_box_format`, `name` and `dtype`.
    """

    settings = (
        *("flip", "rotation", "translation", "zoom", "shear", "aspect_ratio", "crop_area"),
        *("crop", "size", "fill_mode", "fill_value", "interpolation"),
    )

    def __init__(
        self,
        *,
        flip: str | None = None,
        rotation: Any = 0.0,
        translation: Any = 0.0,
        zoom: Any = 0.0,
        shear: Any = 0.0,
        aspect_ratio: tuple[float, float] | None = None,
        crop_area: tuple[float, float] | None = None,
        crop: tuple[int, int] | None = None,
        size: tuple[int, int] | None = None,
        fill_mode: str = "reflect",
        fill_value: float = 0.0,
        interpolation: str = "bilinear",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("flip", flip, FLIPS)
        require_choice("fill_mode", fill_mode, FILL_MODES)
        require_choice("interpolation", interpolation, INTERPOLATIONS)
        require(is_number(fill_value), "fill_value", fill_value, "a number")
        if crop is not None and not (crop_area is None and aspect_ratio is None):
            raise value_error(
                "The window to cut out has a fixed size and a random one.",
                "Expected either `crop`, or `crop_area` and `aspect_ratio`.",
                crop=crop,
                crop_area=crop_area,
                aspect_ratio=aspect_ratio,
            )
        self.flip = flip
        self.rotation = rotation
        self.translation = translation
        self.zoom = zoom
        self.shear = shear
        self.aspect_ratio = as_positive_range("aspect_ratio", aspect_ratio, high=100)
        self.crop_area = as_positive_range("crop_area", crop_area, high=1)
        self.crop = as_size("crop", crop)
        self.size = as_size("size", size)
        self.fill_mode = fill_mode
        self.fill_value = fill_value
        self.interpolation = interpolation
        turns = as_range("rotation", rotation, low=-1, high=1)
        height_shift, width_shift = as_two_ranges("translation", translation, low=-1, high=1)
        x_shear, y_shear = as_two_ranges("shear", shear, low=0, high=1)
        height_zoom, width_zoom = zoom_ranges(zoom)
        ranges = {
            "rotation": (turns[0] * 360, turns[1] * 360),
            "height_translation": height_shift,
            "width_translation": width_shift,
            "height_zoom": height_zoom,
            "x_shear": x_shear,
            "y_shear": y_shear,
            "width_zoom": width_zoom or (0.0, 0.0),
        }
        self._ranges = {name: drawn for name, drawn in ranges.items() if drawn != (0, 0)}
        self._one_zoom = width_zoom is None

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        drawn = {name: draws.happens(0.5) for name in FLIPS[self.flip]}
        drawn |= {name: draws.uniform(*limits) for name, limits in self._ranges.items()}
        if self._one_zoom and "height_zoom" in drawn:
            drawn["width_zoom"] = drawn["height_zoom"]
        slants = [name for name in ("x_shear", "y_shear") if name in drawn]
        if slants:
            sign = tf.where(draws.happens(0.5), -1.0, 1.0)
            drawn |= {name: sign * drawn[name] for name in slants}
        return {**drawn, **self._window(shape, draws)}

    def _window(self, shape: Shape, draws: Draws | None) -> Drawn:
        """Return windows at random places, or without draws one in the middle, for inference."""
        if self.crop is not None:
            free = [side - own for side, own in zip(shape[:2], self.crop, strict=True)]
            corner = [
                one // 2 if draws is None else draws.integers(tf.maximum(one, 0) + 1)
                for one in free
            ]
            return crop_window(shape, self.crop, corner)
        if self.crop_area is None and self.aspect_ratio is None:
            return {}
        ratio, area = proportion(self._result_size(shape)), 1.0
        if draws is not None:
            # Evenly in the logarithm: twice as wide is as likely as half as wide.
            low, high = (math.log(ratio) for ratio in self.aspect_ratio or (1, 1))
            ratio = tf.exp(draws.uniform(low, high)) * ratio
            area = draws.uniform(*(self.crop_area or (1, 1)))
        sides = largest_window(shape, ratio, area)
        free = [side - own for side, own in zip(floats(shape[:2]), sides, strict=True)]
        # The middle is in whole pixels, so that a window of the result's size copies pixels.
        corner = [tf.floor(one / 2) if draws is None else draws.uniform(0.0, one) for one in free]
        return dict(zip(WINDOWS, (*corner, *sides), strict=True))

    def matrices(self, drawn: Drawn, shape: Shape, count: int | tf.Tensor) -> tf.Tensor:
        """Where each pixel of the results comes from, `float32[count, 2, 3]`."""
        height, width = floats(shape[:2])

        def value(name: str) -> tf.Tensor:
            return tf.cast(drawn[name], tf.float32) if name in drawn else tf.zeros([count])

        crop = self.crop if "crop_top" in drawn and self.crop else (height, width)
        sides = drawn.get("crop_height", crop[0]), drawn.get("crop_width", crop[1])
        # The class promises this order.
        return affine.product(
            affine.flip(value("flip_horizontal"), value("flip_vertical"), height, width),
            affine.rotation(value("rotation"), height, width),
            affine.translation(
                value("width_translation") * width, value("height_translation") * height
            ),
            affine.zoom(1 + value("width_zoom"), 1 + value("height_zoom"), height, width),
            affine.shear(value("x_shear"), value("y_shear")),
            affine.window(value("crop_left"), value("crop_top"), *sides, self._result_size(shape)),
        )

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, MOVES)
        return self._move(images, drawn, self.interpolation)

    def change_masks(self, masks: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        masks = tf.convert_to_tensor(masks)
        moved = self._move(tf.cast(masks, tf.float32), drawn, "nearest")
        return tf.cast(moved, masks.dtype)

    def change_boxes(self, boxes: tf.Tensor, drawn: Drawn, shape: Shape) -> tf.Tensor:
        return affine.move_boxes(boxes, self.matrices(drawn, shape, tf.shape(boxes)[0]))

    def at_inference(self, example: Example) -> Example:
        if self.size is None and self.crop is None:
            return example
        shape = image_shape(example)
        count = tf.shape(example["images"])[0]
        drawn = {
            name: tf.fill([count], tf.cast(one, tf.float32))
            for name, one in self._window(shape, None).items()
        }
        return self.change(example, drawn)

    def changed_shape(self, shape: Shape) -> Shape:
        return (*self._result_size(shape), shape[2])

    def _move(self, pictures: tf.Tensor, drawn: Drawn, interpolation: str) -> tf.Tensor:
        shape = image_shape({"images": pictures})
        if drawn.keys() <= SHIFTS.keys() and self.size in (None, self.crop):
            return shift_images(pictures, drawn, self.crop)
        # Only these look beyond the image by more than the half pixel at its border, which a
        # fill value must not darken.
        beyond = drawn.keys() - SHIFTS.keys() - {*WINDOWS}
        return resample_images(
            pictures,
            self.matrices(drawn, shape, tf.shape(pictures)[0]),
            self._result_size(shape),
            interpolation=interpolation,
            fill_mode=self.fill_mode if beyond else "nearest",
            fill_value=self.fill_value,
        )

    def _result_size(self, shape: Shape) -> Sides:
        return self.size or self.crop or shape[:2]


def zoom_ranges(zoom: Any) -> tuple[Range, Range | None]:
    """Return ranges for the height and the width, or None for a width that follows the height."""
    both = (zoom, None) if is_number(zoom) else zoom
    limits: dict[str, Any] = {"low": -1, "high": 1, "open_low": True}
    if is_pair(both) and both[1] is None:
        return as_range("zoom", both[0], **limits), None
    return as_two_ranges("zoom", both, **limits)


def as_positive_range(name: str, value: Any, high: float) -> Range | None:
    if value is None:
        return None
    return as_range(name, value, low=0, high=high, open_low=True, pair_only=True)


def crop_window(shape: Shape, crop: tuple[int, int], top_left: list[Any]) -> Drawn:
    """Return a window of the size `crop` with a given corner.

    Smaller images give the largest window of this shape, in the middle. Where images are known to
    be large enough, `crop_height` and `crop_width` are left out.
    """
    top, left = floats(top_left)
    if all(
        isinstance(side, int) and own <= side for own, side in zip(crop, shape[:2], strict=True)
    ):
        return {"crop_top": top, "crop_left": left}
    # Whether images are smaller may be known only when the model runs.
    fits = tf.reduce_all([own <= side for own, side in zip(crop, shape[:2], strict=True)])
    largest = largest_window(shape, proportion(crop), 1.0)
    sides = [tf.where(fits, float(own), one) for own, one in zip(crop, largest, strict=True)]
    middle = [(side - own) / 2 for side, own in zip(floats(shape[:2]), sides, strict=True)]
    return {
        "crop_top": tf.where(fits, top, middle[0]),
        "crop_left": tf.where(fits, left, middle[1]),
        "crop_height": tf.broadcast_to(sides[0], tf.shape(top)),
        "crop_width": tf.broadcast_to(sides[1], tf.shape(top)),
    }


def largest_window(shape: Shape, ratio: Any, area: Any) -> Sides:
    """Height and width of a window of an aspect ratio with at most this part of an image's area."""
    height, width = floats(shape[:2])
    # Which part of the height and of the width: the product is the area.
    stretch = ratio * height / width
    # Neither part may exceed 1.
    area = tf.minimum(area, tf.minimum(stretch, 1 / stretch))
    return height * tf.sqrt(area / stretch), width * tf.sqrt(area * stretch)


def proportion(sides: Sides) -> tf.Tensor:
    height, width = floats(sides)
    return width / height


def floats(values: Any) -> list[tf.Tensor]:
    return [tf.cast(one, tf.float32) for one in values]
