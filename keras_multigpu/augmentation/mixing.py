"""`Mixing`: what `MixUp` and `CutMix` have in common, from partners to labels and weights.

A row's partner is its neighbour: rows 0 and 1, 2 and 3, and so on. So a pair stays together
however a batch is split into even shards, and as batches are shuffled, neighbours are as random as
any other two.

An image that is to a share s like image i, and else like its partner j, should cost
`s * w_i * loss(y_i) + (1 - s) * w_j * loss(y_j)`. For losses that are linear in the label, such as
cross-entropy, this is the loss of one label with one weight; those are computed here.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation.arguments import is_number, require_draws
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.compilation import fused
from keras_multigpu.augmentation.examples import Drawn, Example, Shape, image_shape
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
        labels = soft_labels(example["labels"], self.num_classes)
        return {**example, "labels": labels}

    def change(self, example: Example, drawn: Drawn) -> Example:
        require_draws(drawn, ("share", "box"))
        if not {"labels", "segmentation_masks"} & example.keys():
            raise value_error(
                f"{type(self).__name__} got images without labels, but mixing needs labels.",
                "Expected what is mixed into an image to be mixed into its label, too.",
                'In a model pass a dictionary with "images" and "labels"; in a pipeline use '
                "`Batches` with labels.",
                keys=sorted(example),
            )
        example = self.still(example)
        images = example["images"]
        weights = example.get("sample_weights")
        partners = partners_of(images)
        mixes = can_mix(weights, partners)
        own = tf.ones_like(mixes, tf.float32)
        changed = dict(example)
        if "share" in drawn:
            own = tf.where(mixes, tf.cast(drawn["share"], tf.float32), 1.0)
            images = fused(blended, [images, partners, own])
        if "box" in drawn:
            box = tf.where(mixes[:, None], tf.cast(drawn["box"], tf.int32), 0)
            images = fused(pasted, [images, partners, box])
            # By the pixels that were really replaced: the border may have cut the box.
            own = own * (1 - area(box, image_shape(example)))
            if "segmentation_masks" in example:
                changed["segmentation_masks"] = keras.tree.map_structure(
                    lambda masks: pasted(masks, partners, box), example["segmentation_masks"]
                )
        changed["images"] = images
        return {**changed, **mixed(example, own, partners)}


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


def soft_labels(labels: Any, num_classes: int | None) -> Any:
    """Labels that can be mixed: integers become one-hot vectors, floats stay."""
    leaves = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(labels)]
    # Class numbers that are floats would be blended: half of class 0 and half of class 2 are not
    # class 1. Beside a label of classes, others may be those of a regression.
    if num_classes is not None and not any(can_be_classes(leaf, num_classes) for leaf in leaves):
        raise value_error(
            f"The float labels are not one-hot labels of {num_classes} classes.",
            "Expected integers, or floats with one value for each class in the last axis.",
            "Make class numbers integers, or leave `num_classes` out for a regression.",
            shapes=[tuple(leaf.shape) for leaf in leaves],
            num_classes=num_classes,
        )
    return keras.tree.map_structure(lambda leaf: soft(leaf, num_classes), labels)


def soft(labels: Any, num_classes: int | None) -> tf.Tensor:
    """One tensor of labels in a form that can be mixed."""
    labels = tf.convert_to_tensor(labels)
    if labels.dtype.is_floating:
        return labels
    require_classes(labels, num_classes)
    assert num_classes is not None
    # One-hot already, as integers.
    if labels.shape.rank == 2 and labels.shape[1] == num_classes:
        return tf.cast(labels, tf.float32)
    numbers = tf.cast(tf.reshape(labels, [tf.shape(labels)[0]]), tf.int64)
    numbers = tf.ensure_shape(numbers, labels.shape[:1])
    one_hot = tf.one_hot(numbers, num_classes)
    tf.debugging.Assert(
        tf.reduce_all((numbers >= 0) & (numbers < num_classes)),
        [
            f"Some labels are not classes. Expected numbers from 0 on, below `num_classes`, which "
            f"is {num_classes}. Pass a larger one, or number the classes from 0. Received, as the "
            "lowest and the highest label:",
            tf.reduce_min(numbers),
            tf.reduce_max(numbers),
        ],
    )
    return one_hot


def can_be_classes(label: tf.Tensor, num_classes: int) -> bool:
    """Whether a label has another form than those floats that are not classes."""
    rank = label.shape.rank
    if not label.dtype.is_floating or rank is None:
        return True
    return rank > 1 and label.shape[-1] in (None, num_classes)


def require_classes(labels: tf.Tensor, num_classes: int | None) -> None:
    if not (labels.dtype.is_integer or labels.dtype.is_bool) or num_classes is None:
        raise value_error(
            "These labels cannot be mixed as they are.",
            "Expected floats, such as one-hot labels, or integers and `num_classes`.",
            "Pass `num_classes=...` to the layer, and use a loss for one-hot labels, such as "
            "`categorical_crossentropy`.",
            labels=labels.dtype.name,
            num_classes=num_classes,
        )
    if labels.shape.rank == 1 or (labels.shape.rank == 2 and labels.shape[1] in (1, num_classes)):
        return
    raise value_error(
        "The integer labels are neither class numbers nor one-hot.",
        "Expected (batch,), (batch, 1) or (batch, num_classes).",
        "Make them floats of the form that your loss expects.",
        shape=tuple(labels.shape),
        num_classes=num_classes,
    )


def can_mix(weights: Any, partners: tf.Tensor) -> tf.Tensor:
    """Whether a row and its partner are two examples that count, `bool[n]`."""
    # A row of weight zero does not count, and must not come into another.
    two = partners != tf.range(tf.shape(partners)[0])
    leaves = [leaf for leaf in keras.tree.flatten(weights) if leaf is not None]
    if not leaves:
        return two
    counts = tf.reduce_any([tf.reduce_any(rows_of(leaf) != 0, axis=1) for leaf in leaves], axis=0)
    return two & counts & tf.gather(counts, partners)


def mixed(example: Example, own: tf.Tensor, partners: tf.Tensor) -> Example:
    """The labels and sample weights of mixed images; `own` is the share of each in its mixture."""
    changed: Example = {}
    weights = example.get("sample_weights")
    if "labels" in example:
        labels, found = keras.tree.flatten(example["labels"]), []
        for label, weight in zip(labels, weights_of(labels, weights), strict=True):
            share = share_of_label(weight, own, partners)
            share = aligned(tf.cast(share, label.dtype), label.shape.rank)
            found.append(share * label + (1 - share) * tf.gather(label, partners))
        changed["labels"] = keras.tree.pack_sequence_as(example["labels"], found)
    if weights is not None:
        changed["sample_weights"] = keras.tree.map_structure(
            lambda leaf: None if leaf is None else mixed_weight(leaf, own, partners), weights
        )
    return changed


def mixed_weight(weight: Any, own: tf.Tensor, partners: tf.Tensor) -> tf.Tensor:
    weight = as_float(weight)
    own = aligned(tf.cast(own, weight.dtype), weight.shape.rank)
    return own * weight + (1 - own) * tf.gather(weight, partners)


def share_of_label(weight: Any, own: tf.Tensor, partners: tf.Tensor) -> tf.Tensor:
    """The share that an image's own label has of the mixed label."""
    if weight is None:
        return own
    weight = as_float(weight)
    total = mixed_weight(weight, own, partners)
    own = aligned(tf.cast(own, weight.dtype), weight.shape.rank)
    # Where nothing counts no label matters, and none may become NaN.
    safe = tf.where(total == 0, tf.ones_like(total), total)
    return tf.where(total == 0, own, own * weight / safe)


def weights_of(labels: list, weights: Any) -> list:
    """The weights of each label: one for all of them, or one for each."""
    if isinstance(weights, dict) and "labels" in weights:
        weights = weights["labels"]
    leaves = [None] if weights is None else keras.tree.flatten(weights)
    if len(leaves) == 1:
        return leaves * len(labels)
    if len(leaves) == len(labels):
        return leaves
    raise value_error(
        f"{len(labels)} labels came with {len(leaves)} sample weights.",
        "Expected one for all labels, or one for each.",
        "Pass weights of the same structure as the labels.",
        sample_weights=keras.tree.map_structure(lambda leaf: tuple(leaf.shape), weights),
    )


def as_float(weight: Any) -> tf.Tensor:
    weight = tf.convert_to_tensor(weight)
    return weight if weight.dtype.is_floating else tf.cast(weight, tf.float32)


def rows_of(leaf: Any) -> tf.Tensor:
    """A tensor as `[n, values]`, also if it is empty."""
    leaf = as_float(leaf)
    sizes = tf.shape(leaf)
    return tf.reshape(leaf, [sizes[0], tf.reduce_prod(sizes[1:])])


def aligned(share: tf.Tensor, rank: int) -> tf.Tensor:
    """Shares with as many axes as what they are multiplied with."""
    for _ in range(rank - share.shape.rank):
        share = share[..., None]
    for _ in range(share.shape.rank - rank):
        share = tf.squeeze(share, axis=-1)
    return share
