"""Applies augmentation in the pipeline, with draws that depend on the example alone."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, variable_internals
from keras_multigpu.seeded_layers import (
    build,
    call_of,
    fold_seeds,
    image_by_image,
    in_a_row,
    is_keras_cv,
    parameters,
    require_instance,
    seeded,
)

Batch = tuple[Any, Any, Any]
"""Inputs, targets and weights; the last two may be None."""

Augment = Callable[[Any, Any, Any, tf.Tensor], Batch]
"""A function of inputs, targets, weights and `int32[n, 2]` seeds."""

Step = Callable[[Any, tf.Tensor], Any]
"""A function of inputs and `int32[n, 2]` seeds."""


def augmentation(augment: Any, training: bool) -> Augment | None:
    """`Batches(augment=...)` as a function of a batch and its seeds.

    Keras layers and functions change the inputs. A layer with a method `augment_batch` gets the
    whole batch, so that it can also change targets and weights.
    """
    if augment is None:
        return None
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
    """All layers and functions, including those within a `keras.Sequential` or `Sequence`."""
    parts = augment if isinstance(augment, list | tuple) else in_a_row(augment)
    return [augment] if parts is None else [one for part in parts for one in flatten_layers(part)]


def batch_step(augment: Any, training: bool) -> Augment:
    require_instance(augment)
    whole = getattr(augment, "augment_batch", None)
    if whole is not None:
        return lambda x, y, weight, seeds: whole(x, y, weight, seeds, training)
    step = one_step(augment, training)

    def change(x: Any, y: Any, weight: Any, seeds: tf.Tensor) -> Batch:
        if isinstance(augment, keras.Layer):
            require_no_masks(augment, x, y)
        return step(x, seeds), y, weight

    return change


def one_step(augment: Any, training: bool) -> Step:
    if isinstance(augment, keras.Layer):
        return layer_step(augment, training)
    if not callable(augment):
        raise value_error(
            "`augment` holds something that is neither a layer nor a function.",
            "Expected Keras layers, or functions of a batch of images.",
            "Pass for example `keras.layers.RandomFlip()`.",
            augment=augment,
        )
    taken = parameters(augment)
    if "seeds" in taken and "training" not in taken and not training:
        return lambda x, seeds: x

    def step(x: Any, seeds: tf.Tensor) -> Any:
        offered = {"seeds": seeds, "training": training}
        return augment(x, **{name: offered[name] for name in offered if name in taken})

    return step


def layer_step(layer: keras.Layer, training: bool) -> Step:
    """A layer as a `Step`; a random one is called for each image with the image's own seed."""
    require_draws_of_its_own(layer)
    call = call_of(layer, training)

    def whole(x: Any, seeds: tf.Tensor) -> Any:
        build(layer, x)
        return call(x)

    # Image by image is slower: 8 ms instead of 2 for a layer that doubles 32 images of 224x224.
    if not variable_internals.seed_states(layer) or not training:
        return whole

    def one(x: Any, seed: tf.Tensor) -> Any:
        with seeded(layer, seed):
            return call(x)

    def step(x: Any, seeds: tf.Tensor) -> Any:
        build(layer, x)
        return image_by_image(one, x, seeds)

    return step


def require_draws_of_its_own(layer: keras.Layer) -> None:
    for part in model_internals.layers_of(layer):
        name = type(part).__name__
        if isinstance(part, keras.layers.MixUp | keras.layers.CutMix):
            raise value_error(
                f"`augment` holds {name}, which mixes the examples of a batch.",
                "Expected layers that change each image by itself; targets are not passed.",
                "Use `keras_multigpu.augmentation.Mix`, which gets them.",
                augment=type(layer).__name__,
            )
        if is_keras_cv(part):
            raise value_error(
                f"`augment` holds {name} of keras-cv by itself. It would draw other numbers in "
                "every run, and also in evaluation.",
                "Expected layers whose draws depend on seed, epoch and example alone.",
                "Pass `keras_multigpu.augmentation.Sequence([layer])`, which ensures that.",
                augment=type(layer).__name__,
            )


def require_no_masks(layer: keras.Layer, x: Any, y: Any) -> None:
    sizes = {tuple(leaf.shape[1:3]) for leaf in keras.tree.flatten(x) if leaf.shape.rank == 4}
    masks = [
        leaf
        for leaf in keras.tree.flatten(y)
        if leaf is not None and leaf.shape.rank in (3, 4) and tuple(leaf.shape[1:3]) in sizes
    ]
    if masks and variable_internals.seed_states(layer):
        raise value_error(
            f"{type(layer).__name__} would change the images, but not their masks.",
            "Expected layers that change masks as well.",
            "Pass `keras_multigpu.augmentation.Sequence([layer])`, which transforms both.",
            augment=type(layer).__name__,
            masks=[tuple(mask.shape) for mask in masks],
        )


def require_rows(batch: Batch, seeds: tf.Tensor) -> None:
    rows = [tf.shape(leaf)[0] for leaf in keras.tree.flatten(batch) if isinstance(leaf, tf.Tensor)]
    tf.debugging.assert_equal(
        rows,
        tf.fill([len(rows)], tf.shape(seeds)[0]),
        "`augment` changed the number of examples in a batch. Expected as many as came in. Change "
        "each image by itself.",
    )
