"""Calls layers with given seeds instead of their own generators, and leaves the user's alone."""

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import variable_internals

# 2^32 divided by the golden ratio; multiples of it spread consecutive integers.
_GOLDEN = 0x9E3779B9


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random state of Python and NumPy: reading data may draw numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def seeded(layer: keras.Layer, seed: tf.Tensor) -> Iterator[None]:
    """Let the layers inside a layer draw from a seed, `int32[2]`, while the context lasts."""
    states = variable_internals.seed_states(layer)
    known = {id(state) for state in states}
    draws = [
        # Each generator gets its own seed, or all would draw the same.
        (state, tf.cast(seed + tf.constant([place, 0], tf.int32), state.dtype))
        for place, state in enumerate(states)
    ]
    # A scope hides the values that an outer one, such as a training step's, gives to weights.
    weights = [(weight, weight.value) for weight in layer.variables if id(weight) not in known]
    with keras.StatelessScope(state_mapping=weights + draws):
        yield


def image_by_image(one: Callable[[Any, tf.Tensor], Any], data: Any, seeds: tf.Tensor) -> Any:
    """Apply a function to each example separately, so that each has its own draws.

    The function gets a batch of one example, and the example's row of `seeds`, `int32[2]`.
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


def call_of(layer: keras.Layer, training: bool) -> Callable[[Any], Any]:
    """Return a layer as a function, which passes `training` if the layer takes it."""
    if "training" in parameters(layer.call):
        return lambda data: layer(data, training=training)
    return lambda data: layer(data)


def build(layer: keras.Layer, x: Any) -> None:
    """Build a layer outside the current graph, which its variables must outlive."""
    if layer.built:
        return
    with tf.init_scope():
        layer(
            keras.tree.map_structure(
                lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), x
            )
        )


def in_a_row(layer: Any) -> list[Any] | None:
    """The layers of a chain, such as `keras.Sequential`; None for other layers."""
    # A subclass with its own `call` may do something else with them.
    rows = keras.layers.Pipeline.call, keras.Sequential.call
    return list(layer.layers) if getattr(type(layer), "call", None) in rows else None


def require_instance(layer: Any) -> None:
    if isinstance(layer, type):
        raise value_error(
            f"{layer.__name__} is a class, not a layer.",
            "Expected a layer instance or a function.",
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


def fold_seeds(seeds: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Derive seeds for the layer at place `number`, an integer or `int32[n, 1]`."""
    # From the inverted seeds, because hashes of the seeds themselves are what a layer draws.
    words = tf.constant([[0, 1]], tf.int32) + 2 * tf.cast(number, tf.int32)
    return tf.bitcast(hash_words(tf.bitwise.invert(seeds), words), tf.int32)


def hash_words(seeds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Hash each pair of seeds with each number, `uint32[seeds, numbers]`."""
    words = tf.bitcast(seeds, tf.uint32)
    numbers = tf.bitcast(numbers, tf.uint32) * tf.constant(_GOLDEN, tf.uint32)
    return mix_bits(mix_bits(mix_bits(words[:, :1] + numbers) ^ words[:, 1:]) + numbers)


def mix_bits(words: tf.Tensor) -> tf.Tensor:
    """Mix the bits of `uint32` words, one to one."""
    # The constants were found by search (Chris Wellons, "hash-prospector", public domain).
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words = words ^ tf.bitwise.right_shift(words, tf.constant(shift, tf.uint32))
        words = words * tf.constant(factor, tf.uint32)
    return words ^ tf.bitwise.right_shift(words, tf.constant(15, tf.uint32))
