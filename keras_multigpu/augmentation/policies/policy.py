"""`Policy`, which `RandAugment` and `TrivialAugment` extend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.augmentation.arguments import as_value_range, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Shape, image_shape
from keras_multigpu.augmentation.geometry import affine
from keras_multigpu.augmentation.geometry.resampling import resample_images
from keras_multigpu.augmentation.policies.operations import (
    GEOMETRIC_OPERATIONS,
    VALUE_OPERATIONS,
    Operation,
    as_levels,
    from_levels,
    geometric_matrices,
)
from keras_multigpu.augmentation.random_numbers import Draws

# The names of all operations. A draw is an operation's place in this list.
OPERATIONS = (*VALUE_OPERATIONS, *GEOMETRIC_OPERATIONS)

WITHOUT_MAGNITUDE = ("identity", "auto_contrast", "equalize")

# Below these magnitudes an operation would do something else, such as make a negative.
LOWEST = dict.fromkeys(("solarize", "color", "contrast", "brightness", "sharpness"), 0.0)
LOWEST["posterize"] = 1.0

# A function of some images and of their rows in the batch, `int32[m]`.
Change = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# The place of the first operation that moves pixels.
_MOVE = len(VALUE_OPERATIONS)

# The number of images to move is padded to a multiple of this.
_GROUP_SIZES = 8


class Magnitudes(NamedTuple):
    """An operation's magnitude at strength 0 and at 1; `either_way` negates half of the changes."""

    weakest: Any = 0.0
    strongest: Any = 0.0
    either_way: bool = False


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

    settings: tuple[str, ...] = ("value_range",)

    def __init__(self, *, value_range: tuple[float, float] = (0, 255), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value_range = as_value_range(value_range)
        # XLA needs all shapes beforehand, but how many images drew an operation is known only at
        # run time. Keras reads this attribute where `jit_compile` is "auto".
        self.supports_jit = False

    def magnitudes(self, shape: Shape) -> Mapping[str, Magnitudes]:
        """The operations that can be drawn, and their magnitudes."""
        raise NotImplementedError

    def strength(self, draws: Draws) -> tf.Tensor:
        """Draw the strength of an operation: 0 for its weakest, 1 for its strongest magnitude."""
        raise NotImplementedError

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        draws, magnitudes = Draws(seeds), self.magnitudes(shape)
        drawn = [
            draw_operation(draws, magnitudes, self.strength(draws)) for _ in range(self.num_ops)
        ]
        operation, magnitude = (tf.stack(one, axis=1) for one in zip(*drawn, strict=True))
        return {"operation": operation, "magnitude": magnitude}

    def change_images(self, images: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        levels = as_levels(images, self.value_range)
        places = tf.range(tf.shape(images)[0])
        for kind, magnitude in steps(drawn):
            levels, places = self.operate(levels, places, kind, magnitude)
        changed = tf.ensure_shape(tf.gather(levels, places), images.shape)
        return from_levels(changed, self.value_range)

    def change_masks(self, masks: tf.Tensor, drawn: Drawn) -> tf.Tensor:
        moved = tf.cast(masks, tf.float32)
        shape = image_shape({"images": moved})
        for kind, magnitude in steps(drawn):
            # Operations that move no pixels have the identity as their map.
            maps = geometric_matrices(kind - _MOVE, magnitude, shape)
            moved = resample_images(
                moved, maps, shape[:2], interpolation="nearest", fill_mode="constant"
            )
        return tf.cast(moved, masks.dtype)

    def change_boxes(self, boxes: tf.Tensor, drawn: Drawn, shape: Shape) -> tf.Tensor:
        maps = [geometric_matrices(kind - _MOVE, size, shape) for kind, size in steps(drawn)]
        return affine.move_boxes(boxes, affine.product(*maps))

    def operate(
        self,
        levels: tf.Tensor,
        places: tf.Tensor,
        kind: tf.Tensor,
        magnitude: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Apply one operation to each image, in whole levels; see `regroup`."""
        move = move_by(kind, magnitude, self.fill)
        changes = [with_magnitude(operation, magnitude) for operation in VALUE_OPERATIONS.values()]
        # All moves are one group, since resampling takes any affine map.
        group = tf.minimum(kind, _MOVE)
        changes.append(lambda *part: tf.floor(move(*part) + 0.5))
        return regroup(levels, places, group, changes)


def steps(drawn: Drawn) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """The operations and magnitudes of each step."""
    names = ("operation", "magnitude")
    require_draws(drawn, names, needed=names)
    kinds, magnitudes = (tf.unstack(drawn[name], axis=1) for name in names)
    return zip(kinds, magnitudes, strict=True)


def with_magnitude(operation: Operation, magnitude: tf.Tensor) -> Change:
    return lambda levels, rows: operation(levels, tf.gather(magnitude, rows))


def move_by(kind: tf.Tensor, magnitude: tf.Tensor, fill: float) -> Change:
    """All operations that move pixels, as one change."""

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
        outside: dict[str, Any] = {"fill_mode": "constant", "fill_value": fill}
        return resample_images(images, matrices, shape[:2], interpolation="bilinear", **outside)[
            :count
        ]

    return change


def regroup(
    images: tf.Tensor, places: tf.Tensor, group: tf.Tensor, changes: Sequence[Change]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Change each image by the function of its group, which sees no other images.

    Returns the images in the order of groups, and the place of each.
    """
    # Restoring the order after each of several steps would cost one more copy.
    rows = [tf.cast(tf.where(group == number)[:, 0], tf.int32) for number in range(len(changes))]
    parts = [
        change(tf.gather(images, tf.gather(places, some)), some)
        for change, some in zip(changes, rows, strict=True)
    ]
    return tf.concat(parts, axis=0), tf.math.invert_permutation(tf.concat(rows, axis=0))


def draw_operation(
    draws: Draws, magnitudes: Mapping[str, Magnitudes], strength: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw an operation for each image, all equally likely; return it and its magnitude.

    Args:
        magnitudes: The operations, by name.
        strength: From 0 to 1, a number or `float32[n]`.
    """
    choice, back = draws.integers(len(magnitudes)), draws.happens(0.5)

    def choose(values: Any, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.gather(tf.stack([tf.cast(value, dtype) for value in values]), choice)

    weakest, strongest, either_way = zip(*magnitudes.values(), strict=True)
    change = (choose(strongest) - choose(weakest)) * strength
    change = tf.where(back & choose(either_way, tf.bool), -change, change)
    magnitude = choose(weakest) + change
    # Posterizing keeps a whole number of bits.
    is_whole = choose([name == "posterize" for name in magnitudes], tf.bool)
    magnitude = tf.where(is_whole, tf.round(magnitude), magnitude)
    magnitude = tf.maximum(magnitude, choose([LOWEST.get(name, -1e9) for name in magnitudes]))
    return choose([OPERATIONS.index(name) for name in magnitudes], tf.int32), magnitude
