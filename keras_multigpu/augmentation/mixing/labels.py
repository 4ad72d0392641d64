"""The labels and sample weights of mixed images.

A mixture of a share s of image i and 1 - s of its partner j should cost
`s * w_i * loss(y_i) + (1 - s) * w_j * loss(y_j)`. For losses that are linear in the label, such as
cross-entropy, that is the loss of one label with one weight; those are computed here.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples import Example
from keras_multigpu.checks import value_error


def soft_labels(labels: Any, num_classes: int | None) -> Any:
    """Make labels that can be mixed: integers become one-hot vectors, floats stay."""
    labels = keras.tree.map_structure(tf.convert_to_tensor, labels)
    leaves = keras.tree.flatten(labels)
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


def can_be_classes(label: tf.Tensor, num_classes: int) -> bool:
    """Whether a label may be of classes: it is not of floats, or they can be one-hot."""
    rank = label.shape.rank
    if not label.dtype.is_floating or rank is None:
        return True
    return rank > 1 and label.shape[-1] in (None, num_classes)


def soft(labels: tf.Tensor, num_classes: int | None) -> tf.Tensor:
    if labels.dtype.is_floating:
        return labels
    if not (labels.dtype.is_integer or labels.dtype.is_bool) or num_classes is None:
        raise value_error(
            "These labels cannot be mixed as they are.",
            "Expected floats, such as one-hot labels, or integers and `num_classes`.",
            "Pass `num_classes=...` to the layer, and use a loss for one-hot labels, such as "
            "`categorical_crossentropy`.",
            labels=labels.dtype.name,
            num_classes=num_classes,
        )
    rank, size = labels.shape.rank, labels.shape[-1:]
    if rank == 2 and size == [num_classes]:
        return tf.cast(labels, tf.float32)
    if rank != 1 and not (rank == 2 and size == [1]):
        raise value_error(
            "The integer labels are neither class numbers nor one-hot.",
            "Expected (batch,), (batch, 1) or (batch, num_classes).",
            "Make them floats of the form that your loss expects.",
            shape=tuple(labels.shape),
            num_classes=num_classes,
        )
    numbers = tf.cast(labels if rank == 1 else labels[:, 0], tf.int64)
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
    return tf.one_hot(numbers, num_classes)


def both_count(weights: tf.Tensor | None, partners: tf.Tensor) -> tf.Tensor:
    """Whether a row and its partner are two examples with weight, `bool[n]`."""
    # A row of weight zero, such as padding, must not come into another.
    two = partners != tf.range(tf.shape(partners)[0])
    if weights is None:
        return two
    counts = tf.reduce_any(weights != 0, axis=list(range(1, weights.shape.rank)))
    return two & counts & tf.gather(counts, partners)


def mix_targets(
    labels: Any, weights: tf.Tensor | None, own: tf.Tensor, partners: tf.Tensor
) -> Example:
    """Mix labels and sample weights, if there are any; `own` is each image's own share."""
    changed: Example = {}
    if labels is not None:
        share = share_of_label(weights, own, partners)
        changed["labels"] = keras.tree.map_structure(
            lambda label: mix(label, share, partners), labels
        )
    if weights is not None:
        changed["sample_weights"] = mix(weights, own, partners)
    return changed


def mix(values: tf.Tensor, share: tf.Tensor, partners: tf.Tensor) -> tf.Tensor:
    share = align_axes(share, values)
    return share * values + (1 - share) * tf.gather(values, partners)


def share_of_label(weight: tf.Tensor | None, own: tf.Tensor, partners: tf.Tensor) -> tf.Tensor:
    """The share of an image's own label in the mixed label."""
    if weight is None:
        return own
    total = mix(weight, own, partners)
    own = align_axes(own, weight)
    # Where nothing counts no label matters, and none may become NaN.
    safe = tf.where(total == 0, tf.ones_like(total), total)
    return tf.where(total == 0, own, own * weight / safe)


def as_float(weights: Any) -> tf.Tensor | None:
    """Sample weights as floats."""
    if weights is None:
        return None
    if keras.tree.is_nested(weights):
        raise value_error(
            "Each label came with a sample weight of its own.",
            "Expected one for all labels of an image, which `Mix` mixes with them.",
            sample_weights=keras.tree.map_structure(lambda leaf: tuple(leaf.shape), weights),
        )
    weights = tf.convert_to_tensor(weights)
    return weights if weights.dtype.is_floating else tf.cast(weights, tf.float32)


def align_axes(share: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Shares in the type of the values they multiply, with as many axes."""
    share = tf.cast(share, values.dtype)
    while share.shape.rank < values.shape.rank:
        share = share[..., None]
    while share.shape.rank > values.shape.rank:
        share = tf.squeeze(share, axis=-1)
    return share
