"""`Stopwatch`: when a replica began a step, had its summands, and had the sums."""

from collections.abc import Sequence

import tensorflow as tf

from keras_multigpu.training.shares import held_until
from keras_multigpu.training.steps.probes import Times, now_that


class Stopwatch:
    """Takes the times when a replica began, had its summands, and had the sums."""

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
        """Take the times of sums whose summands were there at these times."""
        there = [now_that([whole]) for whole in sums]
        self._computed.append(tf.reduce_max(ready))
        self._reduced.append(tf.reduce_max(there))
        # The replica computes until it has the last tensor.
        self._hidden.append(time_within(ready, there, self._computed[-1]))

    def times(self, gradients: Sequence[tf.Tensor]) -> Times:
        """The times of a step with these gradients; without sums, from the gradients alone."""
        if not self._computed:
            computed = now_that(gradients)
            with tf.control_dependencies([computed]):
                return Times(self.started, computed, tf.timestamp())
        computed, reduced = (tf.reduce_max(each) for each in (self._computed, self._reduced))
        return Times(self.started, computed, reduced, tf.add_n(self._hidden))


def time_within(
    begun: Sequence[tf.Tensor], ended: Sequence[tf.Tensor], until: tf.Tensor
) -> tf.Tensor:
    """For how long, until some time, any of several things was under way.

    Args:
        begun: When each began, in order.
        ended: When each ended.
    """
    total, before = tf.zeros_like(until), begun[0]
    for begin, end in zip(begun, ended, strict=True):
        end = tf.minimum(end, until)
        total += tf.maximum(end - tf.maximum(begin, before), 0.0)
        before = tf.maximum(end, before)
    return total
