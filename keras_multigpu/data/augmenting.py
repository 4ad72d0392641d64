"""Applies augmentation in the pipeline, with draws that depend on the example alone."""

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem

Batch = tuple[Any, Any, Any]
"""Inputs, targets and weights; the last two may be None."""

Augment = Callable[[Any, Any, Any, tf.Tensor], Batch]
"""A function of inputs, targets, weights and `int32[n, 2]` seeds."""

Step = Callable[[Any, tf.Tensor], Any]
"""A function of inputs and `int32[n, 2]` seeds."""


def augmentation(augment: Any, training: bool) -> Augment | None:
    """What `Batches(augment=...)` means, as a function of a batch and its seeds.

    Keras layers and functions change the inputs. What has a method `augment_batch` is given the
    whole batch, so that targets and weights can follow the images.

    Args:
        augment: A Keras layer, a function, or several of them, applied in turn; or None.
        training: Whether layers draw at random, or do what they do at inference.
    """
    if augment is None:
        return None
    several = augment if isinstance(augment, list | tuple) else [augment]
    steps = [batch_step(layer, position, training) for position, layer in enumerate(several)]

    def apply(x: Any, y: Any, weight: Any, seeds: tf.Tensor) -> Batch:
        for step in steps:
            x, y, weight = step(x, y, weight, seeds)
        require_rows((x, y, weight), seeds)
        return x, y, weight

    return apply


def batch_step(augment: Any, position: int, training: bool) -> Augment:
    """One layer or function as a function of a batch.

    Args:
        augment: The layer or function.
        position: Its place among several, so that equal layers draw differently.
        training: Whether layers draw at random.
    """
    whole = getattr(augment, "augment_batch", None)
    if whole is not None:
        whole = tf.autograph.experimental.do_not_convert(whole)
        return lambda x, y, weight, seeds: whole(x, y, weight, seeds + position, training)
    step = one_step(augment, position, training)
    return lambda x, y, weight, seeds: (step(x, seeds), y, weight)


def one_step(augment: Any, position: int, training: bool) -> Step:
    """One layer or function as a `Step`.

    Args:
        augment: The layer or function.
        position: Its place among several, so that equal layers draw differently.
        training: Whether layers draw at random.
    """
    if isinstance(augment, keras.Layer):
        return layer_step(augment, position, training)
    if not callable(augment):
        raise ValueError(
            problem(
                "`augment` holds something that is no layer and no function.",
                "Expected Keras layers, or functions of a batch of images.",
                "Pass for example `keras.layers.RandomFlip()`.",
                augment=augment,
            )
        )
    taken = parameters(augment)
    if "seeds" in taken and "training" not in taken and not training:
        return lambda x, seeds: x

    def step(x: Any, seeds: tf.Tensor) -> Any:
        offered = {"seeds": seeds + position, "training": training}
        return augment(x, **{name: offered[name] for name in offered if name in taken})

    return step


def layer_step(layer: keras.Layer, position: int, training: bool) -> Step:
    """A layer as a `Step`: image by image where it draws, so that each draw is its image's own.

    Args:
        layer: The layer.
        position: Its place among several.
        training: Whether it draws at random.
    """
    refuse_mixing(layer)
    takes_training = "training" in parameters(layer.call)

    def call(x: Any) -> Any:
        return layer(x, training=training) if takes_training else layer(x)

    states = keras_internals.seed_states(layer)
    if not states or not training:

        def whole(x: Any, seeds: tf.Tensor) -> Any:
            build(layer, x)
            return call(x)

        return whole

    def one(example: tuple[Any, tf.Tensor]) -> Any:
        x, seed = example
        draws = [
            (state, tf.cast(seed + tf.constant([place, position], tf.int32), state.dtype))
            for place, state in enumerate(states)
        ]
        with keras.StatelessScope(state_mapping=draws):
            outputs = call(keras.tree.map_structure(lambda leaf: leaf[None], x))
        return keras.tree.map_structure(lambda leaf: leaf[0], outputs)

    def step(x: Any, seeds: tf.Tensor) -> Any:
        build(layer, x)
        image = keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), x)
        traced = tf.function(one, autograph=False).get_concrete_function(
            (image, tf.TensorSpec((2,), tf.int32))
        )
        signature = keras.tree.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), traced.structured_outputs
        )
        return tf.map_fn(traced, (x, seeds), fn_output_signature=signature)

    return step


def build(layer: keras.Layer, x: Any) -> None:
    """Build a layer outside of the pipeline's graph, which its variables must outlive."""
    if layer.built:
        return
    with tf.init_scope():
        layer(
            keras.tree.map_structure(
                lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), x
            )
        )


def refuse_mixing(layer: keras.Layer) -> None:
    """Raise a `ValueError` for layers that mix examples, and their targets with them."""
    for part in keras_internals.layers_of(layer):
        if isinstance(part, keras.layers.MixUp | keras.layers.CutMix):
            raise ValueError(
                problem(
                    f"`augment` holds {type(part).__name__}, which mixes the examples of a batch.",
                    "Expected layers that change each image by itself; targets are not passed.",
                    "Mix in a `train_step` of your own, or in `from_dataset(dataset.map(...))`.",
                    augment=type(layer).__name__,
                )
            )


def parameters(function: Any) -> Sequence[str]:
    """The names of a function's parameters."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def require_rows(batch: Batch, seeds: tf.Tensor) -> None:
    """Raise an error where `augment` has changed the number of examples."""
    rows = [tf.shape(leaf)[0] for leaf in keras.tree.flatten(batch) if isinstance(leaf, tf.Tensor)]
    tf.debugging.assert_equal(
        rows,
        tf.fill([len(rows)], tf.shape(seeds)[0]),
        "`augment` changed the number of examples in a batch. Expected as many as came in. Change "
        "each image by itself.",
    )
