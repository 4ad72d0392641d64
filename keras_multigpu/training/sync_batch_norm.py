"""BatchNorm with the moments of the global batch, uneven and empty shares included.

Keras's own `synchronized=True` takes the variance as E[x^2] - E[x]^2, which cancels, and
crashes on an empty share. Here the mean is summed over replicas first and the squared
distances from it after that, as one device computes them.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.pure_model import Rows

_replica = threading.local()


def synchronized_layers(model: keras.Model, every: bool) -> list[keras.layers.BatchNormalization]:
    """The BatchNorm layers to synchronise: all, or those made with `synchronized=True`."""
    return [
        layer
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and (every or layer.synchronized)
    ]


def said_of_batch_norm(model: keras.Model, every: bool) -> str:
    """A sentence on what several replicas do with the BatchNorm layers, if there are any."""
    count, synchronised = (len(synchronized_layers(model, each)) for each in (True, every))
    if not count:
        return ""
    if synchronised == count:
        return " BatchNormalization is synchronised: it normalises over the global batch."
    which = "is not" if not synchronised else f"of {count - synchronised} layers is not"
    return (
        f" BatchNormalization {which} synchronised: each replica normalises its own share; "
        "`sync_batch_norm=True` makes it the global batch."
    )


@contextlib.contextmanager
def synchronized(layers: list[keras.layers.BatchNormalization], rows: Rows) -> Iterator[None]:
    """Let the layers take their moments over all replicas, counting real examples only."""
    for layer in layers:
        # Stays on the layer and does nothing outside this context: replicas are traced in
        # turn, so the first to leave must not take it from the others.
        vars(layer)["_moments"] = functools.partial(moments, layer)
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
        return keras_internals.batch_norm_moments(layer, inputs, mask)
    return global_moments(layer, inputs, mask, rows)


def global_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any, rows: Rows
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the global batch; an absent replica counts for nothing."""
    context = tf.distribute.get_replica_context()
    rank = inputs.shape.rank
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]

    def summed(tensor: tf.Tensor) -> tf.Tensor:
        present = tf.where(rows.examples > 0, tensor, tf.zeros_like(tensor))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, present)

    weights = tf.ones_like(inputs) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
    weights = tf.broadcast_to(weights, tf.shape(inputs))
    # Keras adds the epsilon where it counts a mask.
    spare = 0.0 if mask is None else keras.config.epsilon()
    count = summed(tf.reduce_sum(weights, axes)) + spare
    mean = summed(tf.reduce_sum(inputs * weights, axes)) / count
    shape = [-1 if axis == layer.axis % rank else 1 for axis in range(rank)]
    distance = (inputs - tf.reshape(mean, shape)) * weights
    return mean, summed(tf.reduce_sum(tf.square(distance), axes)) / count
