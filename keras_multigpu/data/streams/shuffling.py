"""Shuffles streams, with seeds that Python code computes in tf.data's threads."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.data.pipeline.loader import GATE
from keras_multigpu.data.pipeline.order import hashed


def in_python(
    function: Callable[..., np.ndarray],
    arguments: list[tf.Tensor],
    dtype: tf.DType,
    shape: list[int | None],
) -> tf.Tensor:
    def call(*values: np.ndarray) -> np.ndarray:
        with GATE:
            return function(*values)

    result = tf.numpy_function(call, arguments, dtype)
    result.set_shape(shape)
    return result


def buffer_shuffled(
    examples: tf.data.Dataset, buffer: int, epoch: tf.Tensor, seed: int
) -> tf.data.Dataset:
    """Shuffle with a buffer, in an order that depends on seed and epoch; call it in a graph."""
    # The graph's own seed, so that the program's `tf.random.set_seed` does not change the order.
    tf.random.set_seed(1)
    return examples.shuffle(buffer, seed=epoch_seed(seed, epoch), reshuffle_each_iteration=False)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """The seed of all shuffling in an epoch: a scalar `int64` below `2**31`."""

    def hashes(epoch: np.ndarray) -> np.ndarray:
        return (hashed(seed, int(epoch), 4) >> np.uint64(33)).astype(np.int64)[0]

    return in_python(hashes, [epoch], tf.int64, [])


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), structure
    )
