"""Applies augmentation in the pipeline, with draws that depend on the example alone."""

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem

Step = Callable[[Any, tf.Tensor], Any]
"""A function of inputs and `int32[n, 2]` seeds."""


def augmentation(augment: Any, training: bool) -> Step | None:
    """What `Batches(augment=...)` means, as a function of a batch's inputs and its seeds.

    Args:
        augment: A Keras layer, a function, or several of them, applied in turn; or None.
        training: Whether layers draw at random, or do what they do at inference.
    """
    if augment is None:
        return None
    several = augment if isinstance(augment, list | tuple) else [augment]
    steps = [one_step(layer, position, training) for position, layer in enumerate(several)]

    def apply(x: Any, seeds: tf.Tensor) -> Any:
        for step in steps:
            x = step(x, seeds)
        return x

    return apply


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
    if "seeds" in parameters(augment):
        return lambda x, seeds: augment(x, seeds=seeds + position)
    return lambda x, seeds: augment(x)


def layer_step(layer: keras.Layer, position: int, training: bool) -> Step:
    """A layer as a `Step`: image by image where it draws, so that each draw is its image's own.

    Args:
        layer: The layer.
        position: Its place among several.
        training: Whether it draws at random.
    """
    takes_training = "training" in parameters(layer.call)

    def call(x: Any) -> Any:
        return layer(x, training=training) if takes_training else layer(x)

    states = keras_internals.seed_states(layer)
    if not states or not training:
        return lambda x, seeds: call(x)

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
        image = keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), x)
        traced = tf.function(one, autograph=False).get_concrete_function(
            (image, tf.TensorSpec((2,), tf.int32))
        )
        signature = keras.tree.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), traced.structured_outputs
        )
        return tf.map_fn(traced, (x, seeds), fn_output_signature=signature)

    return step


def parameters(function: Any) -> Sequence[str]:
    """The names of a function's parameters."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
