"""Workers agree, in each step, on its batch and on whether one of them wants to stop.

Each process gets the same data and trains on its own rows. If each shuffled the data in its own
order, some examples would come twice in an epoch and others never, and nobody would notice. So
batches are compared in every step: a few numbers travel with its sums, which costs almost nothing.

A callback may stop one worker only, and the others would wait for it. One more number says so:

    one worker      its next step             that step, everywhere    the loop, everywhere
    wants to stop   sums the flags of all     changes nothing          ends

If its next step cannot, since it has effects or sums nothing, the workers ask each other after it.
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


class StepCheck:
    """Compares the workers' batches in a step, and asks who wants to stop, by one sum.

    Args:
        group: The replicas.
        shares: The shares of all replicas, in all processes.
        stops: Whether to ask too who wants to stop.

    Attributes:
        numbers: This worker's numbers; empty if there is nothing to ask.
    """

    def __init__(self, group: ReplicaGroup, shares: Sequence[Rows], stops: bool = False) -> None:
        self._group = group
        numbers: list[tf.Tensor] = []
        with tf.device(HOST):
            # If each worker has read its own rows, there is nothing to compare.
            if group.is_spread and are_here(shares):
                own = fingerprint([rows.data for rows in shares])
                parts = tf.bitwise.right_shift(own, tf.range(0, 32, BITS))
                parts = tf.bitwise.bitwise_and(parts, 2**BITS - 1)
                numbers = tf.unstack(tf.cast(parts, tf.float32))
            self._of_batch = len(numbers)
            if stops:
                numbers.append(group.stop_flags.own.read_value())
            self.numbers = tf.stack(numbers) if numbers else tf.zeros([0])

    def exchanged(self) -> tf.Tensor | None:
        """As `result`, with an exchange of its own."""
        if not self._of_batch:
            return None
        numbers = self.numbers[: self._of_batch]
        (total,) = self._group.exchange.sum([[numbers] for _ in self._group.replicas])[0]
        return self.result(total)

    def result(self, total: tf.Tensor) -> tf.Tensor:
        """Whether no worker wants to stop, given the sums; fails if batches differ."""
        with tf.device(HOST):
            of_batch, stops = tf.split(total, [self._of_batch, -1])
            same = tf.reduce_all(of_batch == self.numbers[: self._of_batch] * self._group.count)
            check = tf.debugging.Assert(same, [DIFFERS], summarize=1)
            # Without a graph the check is already done.
            with tf.control_dependencies([] if check is None else [check]):
                return tf.reduce_all(stops < 1)


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


class Stopping:
    """Stops a loop on all workers as soon as one of them wants to.

    If it can, that worker announces it in its next step, which then changes nothing on any worker;
    otherwise the workers ask each other after each step.

    Args:
        asks: Whether the workers may disagree.

    Attributes:
        asks_others: Whether there are others to ask.
        asked_for: Whether this worker wants to stop; at the end, whether any worker does.
    """

    def __init__(self, group: ReplicaGroup, asks: bool) -> None:
        self._group = group
        self.asks_others = asks and group.is_spread
        self._in_step = self.asked_for = False

    def __enter__(self) -> "Stopping":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._in_step:
            self._group.stop_flags.own.assign(0.0)
            if kind is None:
                # Maybe no step followed that could have told the others.
                self.asked_for = self._group.any_worker(self.asked_for)

    def has_dropped_step(self) -> bool:
        """Whether the last step changed nothing, because a worker wants to stop."""
        if not self._in_step or self._group.stop_flags.nobody.numpy():
            return False
        self._group.stop_flags.nobody.assign(True)
        self.asked_for = True
        return True

    def ends_now(self, asked_for: bool, in_step: bool) -> bool:
        """Whether the loop ends now.

        Args:
            asked_for: Whether this worker wants to stop.
            in_step: Whether the next step can tell the others.
        """
        self._in_step = in_step
        if in_step:
            if asked_for != self.asked_for:
                self._group.stop_flags.own.assign(float(asked_for))
        elif self.asks_others:
            asked_for = self._group.any_worker(asked_for)
        self.asked_for = asked_for
        return asked_for and not in_step
