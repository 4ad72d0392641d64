"""Applies augmentation in the pipeline, with draws that depend on the example alone."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.sequence import as_layer
from keras_multigpu.checks import value_error
from keras_multigpu.seeded_layers import (
    fold_seeds,
    in_a_row,
    parameters,
    preserve_random_state,
    require_instance,
)

Batch = tuple[Any, Any, Any]
"""Inputs, targets and weights; the last two may be None."""

Augment = Callable[[Any, Any, Any, tf.Tensor], Batch]
"""A function of inputs, targets, weights and `int32[n, 2]` seeds."""


def augmentation(augment: Any, training: bool) -> Augment | None:
    """`Batches(augment=...)` as a function of a batch and its seeds."""
    if augment is None:
        return None
    # A layer around one of Keras's draws a seed, which no draw here depends on.
    with preserve_random_state():
        steps = [batch_step(one, training) for one in flatten_layers(augment)]
    makes_seeds = getattr(augment, "makes_seeds", False)

    def apply(x: Any, y: Any, weight: Any, seeds: tf.Tensor) -> Batch:
        for place, step in enumerate(steps):
            # The same seeds as in a `Sequence`, so that a list of layers draws the same.
            own = seeds if makes_seeds else fold_seeds(seeds, place)
            x, y, weight = step(x, y, weight, own)
        require_rows((x, y, weight), seeds)
        return x, y, weight

    return apply


def flatten_layers(augment: Any) -> list[Any]:
    """All layers and functions, including those within a `keras.Sequential` or `Pipeline`."""
    parts = augment if isinstance(augment, list | tuple) else in_a_row(augment)
    return [augment] if parts is None else [one for part in parts for one in flatten_layers(part)]


def batch_step(augment: Any, training: bool) -> Augment:
    """A layer as it changes images and targets, or a function of the inputs as they are."""
    require_instance(augment)
    if isinstance(augment, keras.Layer):
        layer: AugmentationLayer = as_layer(augment)
        return lambda x, y, weight, seeds: layer.augment_batch(x, y, weight, seeds, training)
    if not callable(augment):
        raise value_error(
            "`augment` holds something that is neither a layer nor a function.",
            "Expected Keras layers, or functions of a batch of images.",
            "Pass for example `keras.layers.RandomFlip()`.",
            augment=augment,
        )
    taken = parameters(augment)
    if "seeds" in taken and "training" not in taken and not training:
        return lambda x, y, weight, seeds: (x, y, weight)

    def step(x: Any, y: Any, weight: Any, seeds: tf.Tensor) -> Batch:
        offered = {"seeds": seeds, "training": training}
        return augment(x, **{name: offered[name] for name in offered if name in taken}), y, weight

    return step


def require_rows(batch: Batch, seeds: tf.Tensor) -> None:
    rows = [tf.shape(leaf)[0] for leaf in keras.tree.flatten(batch) if isinstance(leaf, tf.Tensor)]
    tf.debugging.assert_equal(
        rows,
        tf.fill([len(rows)], tf.shape(seeds)[0]),
        "`augment` changed the number of examples in a batch. Expected as many as came in. Change "
        "each image by itself.",
    )
