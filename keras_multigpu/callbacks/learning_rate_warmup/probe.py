"""Sets the learning rate of each step of a warm-up, inside the step."""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.rates.probe import RateProbe, multiply_velocities, nothing


class WarmupProbe(RateProbe):
    """Sets the rate of each step of a warm-up, which SGD's velocity may follow, and keeps it."""

    corrects = False

    def __init__(self, curve: str) -> None:
        super().__init__()
        self._curve = CURVES[curve]

    def make(self) -> None:
        """Make the variables; see `LearningRateWarmup` for what a user may change."""
        super().make()
        self._over = tf.Variable(True)
        # The number of the first step, and of steps until the target.
        self._start = tf.Variable(0, dtype=tf.int64)
        self._length = tf.Variable(1, dtype=tf.int64)
        # The first step's part of the target.
        self._first = tf.Variable(1.0)
        self._target = tf.Variable(1.0)
        # What was left in the lever: another value there was assigned by somebody else.
        self._left = tf.Variable(1.0)
        # What the velocity was last multiplied with.
        self._used = tf.Variable(1.0)

    @property
    def state(self) -> dict[str, Any]:
        return {name: variable.numpy().item() for name, variable in self._variables.items()}

    def give(self, **values: Any) -> None:
        """Let some of the variables of `state` have these values."""
        for name, value in values.items():
            self._variables[name].assign(value)

    def multiply(self, factor: float) -> None:
        """Rate and velocity were multiplied together: nothing to react to in the next step."""
        for variable in (self._target, self._left, self._used):
            variable.assign(variable * tf.constant(factor, tf.float32))

    @property
    def _variables(self) -> dict[str, tf.Variable]:
        return {
            "over": self._over,
            "start": self._start,
            "length": self._length,
            "first": self._first,
            "target": self._target,
            "left": self._left,
            "used": self._used,
        }

    def part(self, step: Any) -> tf.Tensor:
        """The part of the target that a step of the warm-up has; one after its end."""
        progress = tf.cast(step, tf.float32) / tf.cast(self._length, tf.float32)
        part = self._curve(tf.identity(self._first), tf.clip_by_value(progress, 0.0, 1.0))
        # Exactly one in the end, however the curve is rounded.
        return tf.where(step >= self._length, 1.0, part)

    def before_step(self) -> None:
        """Set the rate of this step, unless the warm-up is over, and keep it."""
        warms = tf.logical_and(self.active, tf.logical_not(self._over))
        tf.cond(warms, self._warm, nothing)
        super().before_step()

    def _warm(self) -> bool:
        copies = self.rate.lever_copies()
        found = tf.identity(copies[0].read_value())
        lower = found < self._left
        target = tf.where(tf.equal(found, self._left), self._target, found)
        step = self.rate.steps() - self._start
        new = tf.where(lower, found, target * self.part(step))
        if self.corrects:
            change = tf.where(lower, 1.0, tf.math.divide_no_nan(new, self._used))
            self._correct(change)
        for copy in copies:
            with tf.device(copy.device):
                copy.assign(new, read_value=False)
        self._target.assign(target)
        self._left.assign(new)
        self._used.assign(new)
        self._over.assign(tf.logical_or(lower, step >= self._length))
        return True

    def _correct(self, change: tf.Tensor) -> None:
        velocities = self.rate.velocities()

        def correct() -> bool:
            multiply_velocities(velocities, change)
            return True

        tf.cond(tf.not_equal(change, 1.0), correct, nothing)


def linear(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    return first + (1.0 - first) * progress


def exponential(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    return tf.pow(first, 1.0 - progress)


def cosine(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    """Half a wave: slow at both ends."""
    return first + (1.0 - first) * (1.0 - tf.cos(math.pi * progress)) / 2.0


CURVES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "linear": linear,
    "exponential": exponential,
    "cosine": cosine,
}
