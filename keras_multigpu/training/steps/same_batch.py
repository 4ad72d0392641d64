"""Whether all processes have read the same batch: looked at in every step, for next to nothing.

Each is handed the same data and trains on rows of its own. Data that each process shuffles in its
own order would go unnoticed: some examples would come twice in an epoch, and others never.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.shares import Rows

DIFFERS = (
    "The workers read different batches. Expected the same data in the same order on each of them, "
    "of which each trains on its own part. Give `dataset.shuffle` and generators of random numbers "
    "a seed, or make the data with `keras_multigpu.data`, whose order is the same everywhere."
)


def require_same_batch(group: ReplicaGroup, shares: Sequence[Rows]) -> None:
    """Let the step fail where one of several processes has read another batch.

    The shares are those of all replicas, also of those in other processes.
    """
    with tf.device(HOST):
        own = fingerprint([rows.data for rows in shares])
    (total,) = group.run(lambda replica: group.sum([tf.identity(own)]))[0]
    with tf.device(HOST):
        # Integers wrap around, in sums and in products alike.
        tf.debugging.Assert(tf.equal(total, own * group.count), [DIFFERS], summarize=1)


def fingerprint(batches: Any) -> tf.Tensor:
    """A number of the first rows of some batches."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    values = [bits(leaf[:1] if leaf.shape.rank else leaf) for leaf in leaves if leaf is not None]
    every = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
    # Different factors, so that the order counts, and odd ones, which lose no bit of a product.
    return tf.reduce_sum(every * (2 * tf.range(tf.size(every)) + 1))


def bits(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.string:
        return tf.cast(tf.strings.to_hash_bucket_fast(values, 2**31 - 1), tf.int32)
    if values.dtype.is_floating:
        return tf.bitcast(tf.cast(values, tf.float32), tf.int32)
    return tf.cast(values, tf.int32)
