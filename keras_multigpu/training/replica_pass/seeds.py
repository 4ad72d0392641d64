"""Each replica draws its own random numbers, from states that are equal everywhere.

Keras's random layers draw from a `SeedGenerator`, whose state is `[seed, counter]`. Mirrored on N
replicas it is equal everywhere, so every replica would draw the same dropout mask. So a replica
adds a multiple of its index to the seed before a pass and takes it off afterwards: draws differ,
replay exactly, and a checkpoint sees the state of a single device. Replica 0 draws what one device
draws.
"""

import tensorflow as tf

STRIDE = 0x9E3779B1
"""Distance between two replicas' seeds; far larger than any seed Keras picks."""


def for_replica(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    """A seed generator's state as one replica uses it."""
    return state + offset(state, replica)


def for_one_device(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    """The inverse of `for_replica`: the state without the replica's share."""
    return state - offset(state, replica)


def offset(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    """What a replica adds to the state."""
    shift = tf.cast(replica, tf.int64) * tf.constant(STRIDE, tf.int64)
    return tf.cast(tf.stack([shift, tf.zeros((), tf.int64)]), state.dtype)
