"""`Stopwatch`: when a replica began a step, had its summands, and had the sums."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import held_until


class Times(NamedTuple):
    """When a replica began its pass, had its gradients, and had the summed ones; in seconds.

    `hidden` is for how long it exchanged sums while it still computed.
    """

    started: tf.Tensor
    computed: tf.Tensor
    reduced: tf.Tensor
    hidden: Any = 0.0

    @property
    def moments(self) -> list[tf.Tensor]:
        """The points in time, without `hidden`."""
        return [self.started, self.computed, self.reduced]


class Stopwatch:
    """Takes the times of a replica's step."""

    def __init__(self, started: tf.Tensor) -> None:
        self.started = started
        self._computed: list[tf.Tensor] = []
        self._reduced: list[tf.Tensor] = []
        self._hidden: list[tf.Tensor] = []

    def ready(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """When each tensor is there."""
        return [now_that([tensor]) for tensor in tensors]

    def held(self, ready: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Tensors that travel once these times are taken."""
        return [held_until(*pair) for pair in zip(ready, tensors, strict=True)]

    def summed(self, ready: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> None:
        """Take the time of sums whose summands were there at these times."""
        # One time for all: each costs a copy to the host.
        there = now_that(sums)
        self._computed.append(tf.reduce_max(ready))
        self._reduced.append(there)
        # The replica computes until it has the last tensor.
        self._hidden.append(time_within(ready, [there] * len(ready), self._computed[-1]))

    def times(self, gradients: Sequence[tf.Tensor]) -> Times:
        """The times of a step with these gradients; without sums, from the gradients alone."""
        if not self._computed:
            computed = now_that(gradients)
            with tf.control_dependencies([computed]):
                return Times(self.started, computed, tf.timestamp())
        computed, reduced = (tf.reduce_max(each) for each in (self._computed, self._reduced))
        return Times(self.started, computed, reduced, tf.add_n(self._hidden))


def now_that(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The time, in seconds, once these tensors are computed; without tensors, the time now."""
    if not tensors:
        return tf.timestamp()
    there = on_host(tensors)
    with tf.device(there.device), tf.control_dependencies([there]):
        return tf.timestamp()


def on_host(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """What is there once these tensors are computed."""
    with tf.control_dependencies(tensors):
        number = tf.reshape(tensors[0], [-1])[:1]
    # A GPU has finished its work only once a number of it has arrived on the host.
    with tf.device(number.device if "CPU" in number.device else HOST):
        return tf.identity(number)


def time_within(
    begun: Sequence[tf.Tensor], ended: Sequence[tf.Tensor], until: tf.Tensor
) -> tf.Tensor:
    """For how long, until some time, any of several things was under way; they begin in order."""
    total, before = tf.zeros_like(until), begun[0]
    for begin, end in zip(begun, ended, strict=True):
        end = tf.minimum(end, until)
        total += tf.maximum(end - tf.maximum(begin, before), 0.0)
        before = tf.maximum(end, before)
    return total
