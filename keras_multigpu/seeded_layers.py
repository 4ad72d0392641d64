"""Calls layers with given seeds in place of what their own generators would draw."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import variable_internals

Call = Callable[[Any], Any]
"""A function of data whose first axis counts examples."""


@contextlib.contextmanager
def seeded(layer: keras.Layer, seed: tf.Tensor, position: int = 0) -> Iterator[None]:
    """Let the layers inside a layer draw from a seed while the context lasts.

    Args:
        seed: `int32[2]`.
        position: Its place among several layers with the same seed.
    """
    states = variable_internals.seed_states(layer)
    known = {id(state) for state in states}
    draws = [
        # Each generator in a layer its own: with one seed all would draw the same.
        (state, tf.cast(seed + tf.constant([place, position], tf.int32), state.dtype))
        for place, state in enumerate(states)
    ]
    # A scope hides the values that an outer one, as that of a training step, gives to weights.
    weights = [(weight, weight.value) for weight in layer.variables if id(weight) not in known]
    with keras.StatelessScope(state_mapping=weights + draws):
        yield


def image_by_image(one: Callable[[Any, tf.Tensor], Any], data: Any, seeds: tf.Tensor) -> Any:
    """Apply a function to each example by itself, so that what it draws is the example's own.

    Args:
        one: A function of a batch of one example and the example's `int32[2]`.
        data: Tensors whose first axis counts examples.
        seeds: `int32[n, 2]`.
    """

    def lone(example: tuple[Any, tf.Tensor]) -> Any:
        parts, seed = example
        outputs = one(keras.tree.map_structure(lambda leaf: leaf[None], parts), seed)
        return keras.tree.map_structure(lambda leaf: leaf[0], outputs)

    specs = keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), data)
    traced = tf.function(lone, autograph=False).get_concrete_function(
        (specs, tf.TensorSpec((2,), tf.int32))
    )
    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), traced.structured_outputs
    )
    return tf.map_fn(traced, (data, seeds), fn_output_signature=signature)


def call_of(layer: keras.Layer, training: bool) -> Call:
    """A layer as a function; told whether it trains, and so draws, if it wants to know."""
    if "training" in parameters(layer.call):
        return lambda data: layer(data, training=training)
    return lambda data: layer(data)


def build(layer: keras.Layer, x: Any) -> None:
    """Build a layer outside of the present graph, which its variables must outlive."""
    if layer.built:
        return
    with tf.init_scope():
        layer(
            keras.tree.map_structure(
                lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), x
            )
        )


def require_instance(layer: Any) -> None:
    if isinstance(layer, type):
        raise value_error(
            f"{layer.__name__} is a class, not a layer.",
            "Expected a layer that is made from it, or a function.",
            f"Pass `{layer.__name__}(...)`.",
            layer=layer,
        )


def is_keras_cv(layer: Any) -> bool:
    """Whether a layer is one of keras-cv, which need not be installed."""
    return any(cls.__module__.startswith("keras_cv.") for cls in type(layer).__mro__)


def parameters(function: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
