"""Workers agree, in each step, on its batch.

Each process gets the same data and trains on its own rows. If each shuffled the data in its own
order, some examples would come twice in an epoch and others never, and nobody would notice. So
batches are compared in every step: a few numbers travel with its sums, which costs almost nothing.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.shares import Rows, are_here

DIFFERS = (
    "The workers read different batches. Expected the same data in the same order on each of them, "
    "of which each trains on its own part. Give `dataset.shuffle` and generators of random numbers "
    "a seed, or make the data with `keras_multigpu.data`, whose order is the same everywhere."
)

# How many bits of a fingerprint each float32 carries, so that 4,096 replicas sum them exactly.
BITS = 12


def known_to_all(group: ReplicaGroup, error: ValueError) -> ValueError:
    """Wait until every process has found this error, to be raised in all of them."""
    # The first process to end aborts the exchanges of the others, which would report only that.
    with contextlib.suppress(tf.errors.OpError):
        group.exchange_numbers([0])
    return error


def numbers_of_batch(group: ReplicaGroup, shares: Sequence[Rows]) -> tf.Tensor | None:
    """This worker's numbers for a batch; None if there is nothing to compare.

    Args:
        shares: The shares of all replicas, in all processes.
    """
    # Workers that have read only their own rows cannot compare them.
    if not group.is_spread or not are_here(shares):
        return None
    with tf.device(HOST):
        own = fingerprint([rows.data for rows in shares])
        parts = tf.bitwise.right_shift(own, tf.range(0, 32, BITS))
        return tf.cast(tf.bitwise.bitwise_and(parts, 2**BITS - 1), tf.float32)


def require_same_batch(
    group: ReplicaGroup, numbers: tf.Tensor | None, total: tf.Tensor | None = None
) -> tf.Tensor | None:
    """Fail if batches differ between workers; what the result depends on waits for that.

    Args:
        numbers: Those of `numbers_of_batch`.
        total: Their sum over all replicas; by default it is exchanged now.
    """
    if numbers is None:
        return None
    if total is None:
        (total,) = group.exchange.sum([[numbers] for _ in group.replicas])[0]
    with tf.device(HOST):
        same = tf.reduce_all(total == numbers * group.count)
        check = tf.debugging.Assert(same, [DIFFERS], summarize=1)
        # Without a graph the check is already done.
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(same)


def fingerprint(batches: Any) -> tf.Tensor:
    """A hash of the first rows of some batches."""
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
