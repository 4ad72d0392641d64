"""`Policy`, which `RandAugment`, `TrivialAugment` and `AugMix` extend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_value_range, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Shape, image_shape
from keras_multigpu.augmentation.geometry import affine
from keras_multigpu.augmentation.geometry.resampling import INTERPOLATIONS, resampled
from keras_multigpu.augmentation.policies.draws import (
    OPERATIONS,
    Magnitudes,
    drawn_operation,
    operation_text,
)
from keras_multigpu.augmentation.policies.operations import (
    VALUE_OPERATIONS,
    Operation,
    as_levels,
    from_levels,
    geometric_matrices,
)
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_choice

# A function of some images and of their rows in the batch, `int32[m]`.
Change = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# The place of the first operation that moves pixels.
_MOVE = len(VALUE_OPERATIONS)

# The number of images to move is padded to a multiple of this.
_GROUP_SIZES = 8


class Policy(AugmentationLayer):
    """A layer that draws for each image which operations change it, and how much.

    It draws `"operation"`, places in `OPERATIONS`, and `"magnitude"`, in the operation's own unit:
    degrees, pixels, factors (1 changes nothing), a threshold among 256 levels, bits. Each
    operation runs only on the images that drew it.
    """

    # The names of the operations, by their number in `"operation"`.
    OPERATIONS = OPERATIONS

    # The level, from 0 to 255, of what is outside an image.
    fill = 0.0

    # The number of operations for each image.
    num_ops = 1

    settings: tuple[str, ...] = ("value_range", "interpolation")

    def __init__(
        self,
        *,
        value_range: tuple[float, float] = (0, 255),
        interpolation: str = "bilinear",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("interpolation", interpolation, INTERPOLATIONS)
        self.value_range = as_value_range(value_range)
        self.interpolation = interpolation
        # XLA needs all shapes beforehand, but how many images drew an operation is known only at
        # run time. Keras reads this attribute where `jit_compile` is "auto".
        self.supports_jit = False

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        """The operations that can be drawn, and their magnitudes."""
        raise NotImplementedError

    def strength(self, draws: Draws) -> tf.Tensor:
        """Draw the strength of an operation: 0 for its weakest, 1 for its strongest magnitude."""
        raise NotImplementedError

    def drawn_operations(
        self, draws: Draws, shape: Shape, count: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Draw `count` operations for each image, and their magnitudes, both `[n, count]`."""
        magnitudes = self.magnitudes(shape)
        drawn = [drawn_operation(draws, magnitudes, self.strength(draws)) for _ in range(count)]
        operation, magnitude = (tf.stack(one, axis=1) for one in zip(*drawn, strict=True))
        return operation, magnitude

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        operation, magnitude = self.drawn_operations(Draws(seeds), shape, self.num_ops)
        return {"operation": operation, "magnitude": magnitude}

    def drawn_text(self, drawn: Drawn) -> str:
        """Describe what was drawn for one image, such as `rotate 27, equalize`."""
        pairs = zip(np.ravel(drawn["operation"]), np.ravel(drawn["magnitude"]), strict=True)
        return ", ".join(operation_text(*pair) for pair in pairs)

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        levels, places = as_levels(images, self.value_range), tf.range(tf.shape(images)[0])
        for kind, magnitude in steps(drawn):
            levels, places = self.operated(levels, places, kind, magnitude)
        levels = tf.ensure_shape(tf.gather(levels, places), images.shape)
        return from_levels(levels, self.value_range)

    def change_masks(self, masks: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        moved = tf.cast(masks, tf.float32)
        for kind, magnitude in steps(drawn):
            move = moving(kind, magnitude, interpolation="nearest")
            moved = grouped(moved, tf.cast(kind >= _MOVE, tf.int32), [unchanged, move])
        return tf.cast(moved, masks.dtype)

    def change_boxes(self, boxes: tf.Tensor, drawn: Drawn, shape: Shape) -> tf.Tensor:
        maps = [geometric_matrices(kind - _MOVE, size, shape) for kind, size in steps(drawn)]
        return affine.moved_boxes(boxes, affine.product(*maps))

    def operated(
        self,
        levels: tf.Tensor,
        places: tf.Tensor,
        kind: tf.Tensor,
        magnitude: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Apply one operation to each image, in whole levels; see `regrouped`."""
        move = moving(kind, magnitude, interpolation=self.interpolation, fill_value=self.fill)
        changes = [with_magnitude(operation, magnitude) for operation in VALUE_OPERATIONS.values()]
        # All moves are one group, since resampling takes any affine map.
        group = tf.minimum(kind, _MOVE)
        changes.append(lambda *part: tf.floor(move(*part) + 0.5))
        return regrouped(levels, places, group, changes)


def steps(drawn: Drawn) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """The operations and magnitudes of each step."""
    names = ("operation", "magnitude")
    require_draws(drawn, names, needed=names)
    kinds, magnitudes = (tf.unstack(drawn[name], axis=1) for name in names)
    return zip(kinds, magnitudes, strict=True)


def unchanged(images: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return images


def with_magnitude(operation: Operation, magnitude: tf.Tensor) -> Change:
    return lambda levels, rows: operation(levels, tf.gather(magnitude, rows))


def moving(kind: tf.Tensor, magnitude: tf.Tensor, **settings: Any) -> Change:
    """All operations that move pixels, as one change; the settings go to `resampled`."""

    def change(images: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        shape = image_shape({"images": images})
        kinds, magnitudes = tf.gather(kind - _MOVE, rows), tf.gather(magnitude, rows)
        matrices = geometric_matrices(kinds, magnitudes, shape)
        # XLA compiles for each number of images, so let there be few of them.
        count = tf.shape(images)[0]
        extra = -count % _GROUP_SIZES
        images, matrices = (
            tf.pad(one, [[0, extra], *[[0, 0]] * (one.shape.rank - 1)])
            for one in (images, matrices)
        )
        moved = resampled(images, matrices, shape[:2], fill_mode="constant", **settings)
        return moved[:count]

    return change


def grouped(images: tf.Tensor, group: tf.Tensor, changes: Sequence[Change]) -> tf.Tensor:
    """Change each image by the function of its group, which sees no other images."""
    changed, places = regrouped(images, tf.range(tf.shape(images)[0]), group, changes)
    return tf.ensure_shape(tf.gather(changed, places), images.shape)


def regrouped(
    images: tf.Tensor, places: tf.Tensor, group: tf.Tensor, changes: Sequence[Change]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `grouped` does, but return images in the order of groups, and the place of each.

    Several `places` may name the same image.
    """
    # Restoring the order after each of several steps would cost one more copy.
    rows = [tf.cast(tf.where(group == number)[:, 0], tf.int32) for number in range(len(changes))]
    parts = [
        change(tf.gather(images, tf.gather(places, some)), some)
        for change, some in zip(changes, rows, strict=True)
    ]
    return tf.concat(parts, axis=0), tf.math.invert_permutation(tf.concat(rows, axis=0))
