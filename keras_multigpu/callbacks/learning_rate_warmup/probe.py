"""Sets the learning rate of each step of a warm-up, inside the step."""

import math
from collections.abc import Callable
from types import SimpleNamespace
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
        self._at = SimpleNamespace(
            over=tf.Variable(True),
            # The number of the first step, and of steps until the target.
            start=tf.Variable(0, dtype=tf.int64),
            length=tf.Variable(1, dtype=tf.int64),
            # The first step's part of the target.
            first=tf.Variable(1.0),
            target=tf.Variable(1.0),
            # What was left in the lever: another value there was assigned by somebody else.
            left=tf.Variable(1.0),
            # What the velocity was last multiplied with.
            used=tf.Variable(1.0),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {name: variable.numpy().item() for name, variable in vars(self._at).items()}

    def give(self, **values: Any) -> None:
        """Let some of the variables of `state` have these values."""
        for name, value in values.items():
            getattr(self._at, name).assign(value)

    def multiply(self, factor: float) -> None:
        """Rate and velocity were multiplied together: nothing to react to in the next step."""
        for variable in (self._at.target, self._at.left, self._at.used):
            variable.assign(variable * tf.constant(factor, tf.float32))

    def part(self, step: Any) -> tf.Tensor:
        """The part of the target that a step of the warm-up has; one after its end."""
        progress = tf.cast(step, tf.float32) / tf.cast(self._at.length, tf.float32)
        part = self._curve(tf.identity(self._at.first), tf.clip_by_value(progress, 0.0, 1.0))
        # Exactly one in the end, however the curve is rounded.
        return tf.where(step >= self._at.length, 1.0, part)

    def before_step(self) -> None:
        """Set the rate of this step, unless the warm-up is over, and keep it."""
        warms = tf.logical_and(self.active, tf.logical_not(self._at.over))
        tf.cond(warms, self._warm, nothing)
        super().before_step()

    def _warm(self) -> bool:
        copies = self.rate.lever_copies()
        found = tf.identity(copies[0].read_value())
        lower = found < self._at.left
        target = tf.where(tf.equal(found, self._at.left), self._at.target, found)
        step = self.rate.steps() - self._at.start
        new = tf.where(lower, found, target * self.part(step))
        if self.corrects:
            change = tf.where(lower, 1.0, tf.math.divide_no_nan(new, self._at.used))
            self._correct(change)
        for copy in copies:
            with tf.device(copy.device):
                copy.assign(new, read_value=False)
        self._at.target.assign(target)
        self._at.left.assign(new)
        self._at.used.assign(new)
        self._at.over.assign(tf.logical_or(lower, step >= self._at.length))
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
