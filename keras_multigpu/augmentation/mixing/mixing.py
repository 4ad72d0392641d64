"""`Mixing`: what `MixUp` and `CutMix` have in common.

A row's partner is its neighbour: rows 0 and 1, 2 and 3, and so on. So a pair stays together
however a batch is split into even shards, and as batches are shuffled, neighbours are as random as
any other two.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import is_number, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.compilation import fused
from keras_multigpu.augmentation.examples.forms import Drawn, Example, Shape, image_shape
from keras_multigpu.augmentation.mixing import mixed_targets
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.checks import require_positive_integer, value_error


class Mixing(AugmentationLayer):
    """A layer that mixes each image with its neighbour in the batch, and their labels.

    What it draws is `"share"`, the image's own share of a blend, or `"box"`, (left, top, right,
    bottom) in pixels, which is filled from the partner; or both.
    """

    unsupported: tuple[str, ...] = ("bounding_boxes", "segmentation_masks")
    settings: tuple[str, ...] = ("num_classes",)

    def __init__(
        self, *, num_classes: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(seed=seed, **kwargs)
        if num_classes is not None:
            require_positive_integer("num_classes", num_classes)
            num_classes = int(num_classes)
        self.num_classes = num_classes

    def still(self, example: Example) -> Example:
        if "labels" not in example:
            return example
        labels = mixed_targets.soft_labels(example["labels"], self.num_classes)
        return {**example, "labels": labels}

    def change(self, example: Example, drawn: Drawn) -> Example:
        require_draws(drawn, ("share", "box"))
        example = self.still(example)
        self._require_targets(example)
        images = example["images"]
        weights = example.get("sample_weights")
        partners = partners_of(images)
        can_mix = mixed_targets.can_mix(weights, partners)
        own = tf.ones_like(can_mix, tf.float32)
        changed = dict(example)
        if "share" in drawn:
            own = tf.where(can_mix, tf.cast(drawn["share"], tf.float32), 1.0)
            images = fused(blended, [images, partners, own])
        if "box" in drawn:
            box = tf.where(can_mix[:, None], tf.cast(drawn["box"], tf.int32), 0)
            images = fused(pasted, [images, partners, box])
            # By the pixels that were really replaced: the border may have cut the box.
            own = own * (1 - area(box, image_shape(example)))
            if "segmentation_masks" in example:
                changed["segmentation_masks"] = keras.tree.map_structure(
                    lambda masks: pasted(masks, partners, box), example["segmentation_masks"]
                )
        changed["images"] = images
        return {**changed, **mixed_targets.mixed(example, own, partners)}

    def _require_targets(self, example: Example) -> None:
        if any(kind in example for kind in ("labels", "segmentation_masks")):
            return
        raise value_error(
            f"{type(self).__name__} got images without labels, but mixing needs labels.",
            "Expected what is mixed into an image to be mixed into its label, too.",
            'In a model pass a dictionary with "images" and "labels"; in a pipeline use '
            "`Batches` with labels.",
            keys=sorted(example),
        )


def require_alpha(name: str, value: Any) -> float:
    """The parameter of a Beta distribution as a float; a `ValueError` unless it is positive."""
    if not is_number(value) or value <= 0:
        raise value_error(
            f"`{name}` is not a positive number.",
            "Expected the parameter of the distribution Beta(alpha, alpha).",
            f"Pass for example `{name}=0.2` for little mixing or `1.0` for a uniform distribution.",
            **{name: value},
        )
    return float(value)


def beta(draws: Draws, alpha: float) -> tf.Tensor:
    """Numbers of the distribution Beta(alpha, alpha), `float32[n]`."""
    # Exact and without rejection. A polar formula gives Student's t with 2 alpha degrees of freedom
    # (Bailey 1994, Mathematics of Computation 62), and `(1 + t / sqrt(2 alpha + t^2)) / 2` has this
    # distribution then. It is rearranged so that numbers close to zero keep their digits.
    logarithm = tf.math.log1p(-draws.numbers()) / alpha
    cosine = tf.cos(2 * np.pi * draws.numbers())
    power, rest = tf.exp(logarithm), -tf.math.expm1(logarithm)
    total = tf.maximum(power + cosine**2 * rest, np.finfo(np.float32).tiny)
    smaller = 0.5 * (power / total) / (1 + tf.abs(cosine) * tf.sqrt(rest / total))
    return tf.where(cosine < 0, smaller, 1 - smaller)


def drawn_box(draws: Draws, alpha: float, shape: Shape) -> tf.Tensor:
    """Boxes as CutMix draws them: centre anywhere, cut at the border; `int32[n, 4]`."""
    # The box has the image's proportions: of each side the root of its part of the area.
    half = tf.sqrt(1 - beta(draws, alpha)) / 2
    across, down = draws.numbers(), draws.numbers()
    height, width = tf.cast(shape[0], tf.float32), tf.cast(shape[1], tf.float32)
    sides = [
        tf.clip_by_value(tf.round(side * size), 0, size)
        for side, size in (
            (across - half, width),
            (down - half, height),
            (across + half, width),
            (down + half, height),
        )
    ]
    return tf.cast(tf.stack(sides, axis=1), tf.int32)


def partners_of(images: tf.Tensor) -> tf.Tensor:
    """The number of each row's partner, `int32[n]`; a row alone is its own."""
    count = images.shape[0]
    if count is None:
        rows = tf.range(tf.shape(images)[0])
        flipped = tf.bitwise.bitwise_xor(rows, 1)
        # The last of an odd number has no row after it, and takes the one before.
        return tf.where(flipped < tf.shape(images)[0], flipped, tf.maximum(rows - 1, 0))
    known = np.arange(count, dtype=np.int32)
    return tf.constant(np.where(known ^ 1 < count, known ^ 1, np.maximum(known - 1, 0)))


def blended(images: tf.Tensor, partners: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Images mixed with others, of which they keep a share, `float32[n]`."""
    # In this order shares of 1 are exact.
    return images + (1 - share)[:, None, None, None] * (tf.gather(images, partners) - images)


def pasted(images: tf.Tensor, partners: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    left, top, right, bottom = tf.unstack(box[:, :, None, None, None], axis=1)
    rows = tf.range(tf.shape(images)[1])[:, None, None]
    columns = tf.range(tf.shape(images)[2])[:, None]
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return tf.where(inside, tf.gather(images, partners), images)


def area(box: tf.Tensor, shape: Shape) -> tf.Tensor:
    covered = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    return tf.cast(covered, tf.float32) / tf.cast(shape[0] * shape[1], tf.float32)
