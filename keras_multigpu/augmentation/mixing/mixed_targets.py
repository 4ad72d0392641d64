"""Labels and sample weights of images that were mixed in pairs.

An image that is to a share s like image i, and else like its partner j, should cost
`s * w_i * loss(y_i) + (1 - s) * w_j * loss(y_j)`. For losses that are linear in the label, such as
cross-entropy, this is the loss of one label with one weight; those are computed here.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.examples.forms import Example
from keras_multigpu.checks import value_error


def soft_labels(labels: Any, num_classes: int | None) -> Any:
    """Labels that can be mixed: integers become one-hot vectors, floats stay."""
    require_some_classes(labels, num_classes)
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


def require_some_classes(labels: Any, num_classes: int | None) -> None:
    """Raise a `ValueError` if there should be classes and all labels are other floats."""
    # Class numbers that are floats would be blended: half of class 0 and half of class 2 are not
    # class 1. Beside a label of classes, others may be those of a regression.
    leaves = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(labels)]
    if num_classes is None or any(can_be_classes(leaf, num_classes) for leaf in leaves):
        return
    raise value_error(
        f"The float labels are not one-hot labels of {num_classes} classes.",
        "Expected integers, or floats with one value for each class in the last axis.",
        "Make class numbers integers, or leave `num_classes` out for a regression.",
        shapes=[tuple(leaf.shape) for leaf in leaves],
        num_classes=num_classes,
    )


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
