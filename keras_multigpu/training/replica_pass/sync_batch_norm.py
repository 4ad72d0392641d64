"""BatchNorm with the moments of the global batch, uneven and empty shares included.

Keras's own `synchronized=True` sums the plain squares, of which little is left where the mean is
large, and crashes on an empty share. Here each replica takes its own mean and squared distances
from it. They are joined in double precision, so that the moments are as good as those of one
device after a single sum; the gradient of a sum is a sum, so the backward pass has one as well.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.exchange.stages import total
from keras_multigpu.training.shares import Rows

_replica = threading.local()


@contextlib.contextmanager
def synchronized(layers: list[keras.layers.BatchNormalization], rows: Rows) -> Iterator[None]:
    """Let the layers take their moments over all replicas, counting real examples only."""
    for layer in layers:
        # Stays on the layer and does nothing outside this context: replicas are traced in
        # turn, so the first to leave must not take it from the others.
        model_internals.take_moments(layer, functools.partial(moments, layer))
    _replica.rows = rows
    try:
        yield
    finally:
        _replica.rows = None


def moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """A layer's mean and variance: over all replicas in a synchronised step."""
    rows = getattr(_replica, "rows", None)
    if rows is None:
        return model_internals.batch_norm_moments(layer, inputs, mask)
    return global_moments(inputs, mask, layer.axis % inputs.shape.rank, rows.examples > 0)


def global_moments(
    inputs: tf.Tensor, mask: tf.Tensor | None, axis: int, present: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the global batch.

    Args:
        inputs: A replica's inputs.
        mask: Which of them count; None for all. It has no last axis.
        axis: The axis of the channels.
        present: Whether the replica has examples; one without counts for nothing.
    """
    rank = inputs.shape.rank
    axes = [each for each in range(rank) if each != axis]
    shape = [-1 if each == axis else 1 for each in range(rank)]
    counted = None
    if mask is not None:
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def along(values: tf.Tensor) -> tf.Tensor:
        """A value for each channel, so that inputs can be compared with it."""
        return values if axis == rank - 1 else tf.reshape(values, shape)

    # TensorFlow's own gradient is the same, of three times as many operations. There are few of
    # them in all, because a model may have a hundred such layers.
    @tf.custom_gradient
    def moments_of_all(own: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        mine = own_sums(own, counted, axes, along)
        count, added, squares = tf.unstack(total(tf.where(present, mine, tf.zeros((), mine.dtype))))
        # Keras adds the epsilon where it counts a mask.
        divisor = count if counted is None else count + keras.config.epsilon()
        mean = added / divisor
        # About a mean that the epsilon has moved, squares are more than about the true one.
        about = squares - mean * (added if counted is None else 2.0 * added - mean * count)
        variance = tf.maximum(about / divisor, 0.0)
        mean, variance = tf.cast(mean, own.dtype), tf.cast(variance, own.dtype)

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            arriving = tf.stack([of_mean, of_variance])
            arriving = total(tf.where(present, arriving, tf.zeros((), own.dtype)))
            factors = tf.constant([[1.0], [2.0]], own.dtype) / tf.cast(divisor, own.dtype)
            direct, by_distance = tf.unstack(arriving * factors)
            result = along(direct) + along(by_distance) * (own - along(mean))
            return result if counted is None else tf.where(counted, result, tf.zeros_like(result))

        return (mean, variance), gradient

    result: tuple[tf.Tensor, tf.Tensor] = moments_of_all(inputs)
    return result


def own_sums(
    inputs: tf.Tensor,
    counted: tf.Tensor | None,
    axes: list[int],
    along: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """How many inputs a replica has, their sum, and the sum of their squares, for each channel."""
    # They are made of the mean and of squared distances from it, in double precision, because the
    # square of the mean is added here and taken off again when the replicas' are joined.
    if counted is None:
        over = tf.constant(axes)
        mean = tf.reduce_mean(inputs, over)
        variance = tf.reduce_mean(tf.math.squared_difference(inputs, along(mean)), over)
        mean, variance = tf.unstack(tf.cast(tf.stack([mean, variance]), tf.float64))
        count = tf.cast(tf.size(inputs, tf.int64), tf.float64) / mean.shape[0]
        ones = tf.ones(mean.shape, tf.float64)
        return tf.stack([ones, mean, variance + tf.square(mean)]) * count
    counts = tf.math.count_nonzero(counted, axes, keepdims=True)
    zeros = tf.zeros_like(inputs)
    added = tf.reduce_sum(tf.where(counted, inputs, zeros), axes, keepdims=True)
    mean = tf.math.divide_no_nan(added, tf.cast(counts, inputs.dtype))
    distances = tf.reduce_sum(tf.square(tf.where(counted, inputs - mean, zeros)), axes)
    counts, mean, distances = (
        tf.cast(tf.reshape(part, [-1]), tf.float64) for part in (counts, mean, distances)
    )
    return tf.stack([counts, counts * mean, distances + counts * tf.square(mean)])
