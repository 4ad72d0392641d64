"""`RandomGeometry`: every move of an image's pixels, in one step."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation import examples
from keras_multigpu.augmentation.arguments import plain, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Example, Shape
from keras_multigpu.augmentation.geometry import affine
from keras_multigpu.augmentation.geometry.geometry_arguments import (
    FLIPS,
    as_positive_range,
    as_size,
    drawn_ranges,
    require_fill_value,
    require_flip,
    require_one_window,
    zoom_ranges,
)
from keras_multigpu.augmentation.geometry.resampling import (
    FILL_MODES,
    INTERPOLATIONS,
    SHIFTS,
    resampled,
    shifted,
)
from keras_multigpu.augmentation.geometry.windows import (
    WindowSettings,
    drawn_window,
    floats,
    still_window,
)
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_choice

WINDOWS = {"crop_top", "crop_left", "crop_height", "crop_width"}
"""What can be drawn for a window."""

MOVES = (
    *("flip_horizontal", "flip_vertical", "rotation", "height_translation", "width_translation"),
    *("height_zoom", "width_zoom", "x_shear", "y_shear", *sorted(WINDOWS)),
)
"""All that can be drawn."""


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
        seed: Decides the draws in a model; in a pipeline, the seed of the `Batches` does.
        bounding_box_format: The format of boxes, as in Keras: `"xyxy"`, `"rel_xyxy"`, `"xywh"`, ...
        **kwargs: `name` and `dtype`.
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
        seed: int | None = None,
        bounding_box_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(seed=seed, bounding_box_format=bounding_box_format, **kwargs)
        require_flip(flip)
        require_choice("fill_mode", fill_mode, FILL_MODES)
        require_choice("interpolation", interpolation, INTERPOLATIONS)
        require_fill_value(fill_value)
        require_one_window(crop, crop_area, aspect_ratio)
        self.flip = flip
        moves = tuple(map(plain, (rotation, translation, zoom, shear)))
        self.rotation, self.translation, self.zoom, self.shear = moves
        self.aspect_ratio = as_positive_range("aspect_ratio", aspect_ratio, high=100)
        self.crop_area = as_positive_range("crop_area", crop_area, high=1)
        self.crop = as_size("crop", crop)
        self.size = as_size("size", size)
        self.fill_mode = fill_mode
        self.fill_value = plain(fill_value)
        self.interpolation = interpolation
        self._ranges = drawn_ranges(*moves)
        self._one_zoom = zoom_ranges(zoom)[1] is None

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws = Draws(seeds)
        drawn = {name: draws.happens(0.5) for name in FLIPS[self.flip]}
        for name, (low, high) in self._ranges.items():
            drawn[name] = draws.uniform(low, high)
        if self._one_zoom and "height_zoom" in drawn:
            drawn["width_zoom"] = drawn["height_zoom"]
        slants = [name for name in ("x_shear", "y_shear") if name in drawn]
        if slants:
            sign = tf.where(draws.happens(0.5), -1.0, 1.0)
            drawn |= {name: sign * drawn[name] for name in slants}
        window = drawn_window(draws, shape, self._result_size(shape), self._window_settings())
        return {**drawn, **window}

    def matrices(self, drawn: Drawn, shape: Shape, count: int | tf.Tensor) -> tf.Tensor:
        """Where each pixel of the results comes from, `float32[count, 2, 3]`."""
        height, width = floats(shape[:2])

        def value(name: str) -> tf.Tensor:
            return tf.cast(drawn[name], tf.float32) if name in drawn else tf.zeros([count])

        def has(*names: str) -> bool:
            return any(name in drawn for name in names)

        # In the order that the class promises: they cannot be exchanged.
        steps = []
        if has("flip_horizontal", "flip_vertical"):
            steps.append(
                affine.flip(value("flip_horizontal"), value("flip_vertical"), height, width)
            )
        if has("rotation"):
            steps.append(affine.rotation(value("rotation"), height, width))
        if has("height_translation", "width_translation"):
            right, down = value("width_translation") * width, value("height_translation") * height
            steps.append(affine.translation(right, down))
        if has("height_zoom", "width_zoom"):
            x, y = 1 + value("width_zoom"), 1 + value("height_zoom")
            steps.append(affine.zoom(x, y, height, width))
        if has("x_shear", "y_shear"):
            steps.append(affine.shear(value("x_shear"), value("y_shear")))
        if has(*WINDOWS) or self.size is not None:
            own_height, own_width = self.crop if has("crop_top") and self.crop else (height, width)
            sides = drawn.get("crop_height", own_height), drawn.get("crop_width", own_width)
            place = value("crop_left"), value("crop_top")
            steps.append(affine.window(*place, *sides, self._result_size(shape)))
        return affine.product(affine.identity(count), *steps)

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        require_draws(drawn, MOVES)
        return self._moved(images, drawn, self.interpolation)

    def change_masks(self, masks: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        masks = tf.convert_to_tensor(masks)
        moved = self._moved(tf.cast(masks, tf.float32), drawn, "nearest")
        return tf.cast(moved, masks.dtype)

    def change_boxes(self, boxes: tf.Tensor, drawn: Drawn, shape: Shape) -> tf.Tensor:
        return affine.moved_boxes(boxes, self.matrices(drawn, shape, tf.shape(boxes)[0]))

    def still(self, example: Example) -> Example:
        if self.size is None and self.crop is None:
            return example
        shape = examples.image_shape(example)
        window = still_window(shape, self._result_size(shape), self._window_settings())
        count = tf.shape(example["images"])[0]
        drawn = {name: tf.fill([count], tf.cast(one, tf.float32)) for name, one in window.items()}
        return self.change(example, drawn)

    def changed_shape(self, shape: Shape) -> Shape:
        return (*self._result_size(shape), shape[2])

    def _moved(self, pictures: tf.Tensor, drawn: Drawn, interpolation: str) -> tf.Tensor:
        shape = examples.image_shape({"images": pictures})
        if drawn.keys() <= SHIFTS.keys() and self.size in (None, self.crop):
            return shifted(pictures, drawn, self.crop)
        # Only these look beyond the image by more than the half pixel at its border, which a
        # fill value must not darken.
        beyond = drawn.keys() - SHIFTS.keys() - WINDOWS
        return resampled(
            pictures,
            self.matrices(drawn, shape, tf.shape(pictures)[0]),
            self._result_size(shape),
            interpolation=interpolation,
            fill_mode=self.fill_mode if beyond else "nearest",
            fill_value=self.fill_value,
        )

    def _result_size(self, shape: Shape) -> tuple[Any, Any]:
        return self.size or self.crop or (shape[0], shape[1])

    def _window_settings(self) -> WindowSettings:
        return WindowSettings(self.crop, self.crop_area, self.aspect_ratio)
