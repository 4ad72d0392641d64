"""Sees, and during a warm-up sets, the learning rate of each step, inside the step."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.rates.rates import Rate
from keras_multigpu.training.steps.probes import Probe

CAPACITY = 4096
"""For how many steps the rate is kept on the device before somebody reads it."""


class RateProbe(Probe):
    """Keeps the rate that each step uses.

    Attributes:
        rate: The model's rate; set before the probe is let into a step.
    """

    rate: Rate

    def __init__(self) -> None:
        self._strategy: tf.distribute.Strategy | None = None
        self._seen, self._read = 0, 0
        self._rates: list[np.ndarray] = []

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables, once for each strategy: compiled steps have them inside."""
        if strategy is not self._strategy:
            self._strategy = strategy
            with tf.device(self.rate.lever_copies()[0].device):
                self.make()
        self.active.assign(False)

    def make(self) -> None:
        """Make the variables."""
        self.active = tf.Variable(False)
        self._last = tf.Variable(0.0)
        self._count = tf.Variable(0, dtype=tf.int64)
        self._kept = tf.Variable(tf.zeros([CAPACITY]))

    def begin(self) -> None:
        """From now on steps count; those before were only tried."""
        self._count.assign(0)
        self._seen, self._read, self._rates = 0, 0, []
        self.active.assign(True)

    def before_step(self) -> None:
        """Keep the rate that this step uses."""
        tf.cond(self.active, self._note, nothing)

    def _note(self) -> bool:
        rate = tf.cast(self.rate.of_step(), tf.float32)
        self._last.assign(rate)
        place = self._count % CAPACITY
        self._kept.scatter_nd_update([[place]], [rate])
        self._count.assign_add(1)
        return True

    @property
    def last(self) -> float:
        """The rate of the last step."""
        return float(self._last.numpy())

    def go_on(self, last: float) -> None:
        """Begin as after a step with this rate, which is logged if none follows in the epoch."""
        self.begin()
        self._last.assign(last)

    def passed(self, steps: int) -> None:
        """So many steps were called; read the rates if there is little room left.

        Only then it waits for the device. With more than 4096 steps per execution the older
        ones of each are lost.
        """
        self._seen += steps
        if self._seen - self._read > CAPACITY // 2:
            self.read()

    def read(self) -> np.ndarray:
        """The rates of all steps so far. Waits for the device."""
        count = int(self._count.numpy())
        if count > self._read:
            places = np.arange(max(self._read, count - CAPACITY), count) % CAPACITY
            self._rates.append(self._kept.numpy()[places])
            self._read = self._seen = count
        return np.concatenate([np.zeros(0, np.float32), *self._rates])


class WarmupProbe(RateProbe):
    """Sets the rate of each step of a warm-up, and keeps it.

    Args:
        curve: `"linear"`, `"exponential"` or `"cosine"`.

    Attributes:
        corrects: Whether the velocity of SGD follows the rate.
    """

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
        """The values of the variables, as JSON can hold them."""
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


def multiply_velocities(velocities: list[tuple[tf.Variable, ...]], change: Any) -> None:
    """Multiply velocities on all replicas, each on its device."""
    for parts in velocities:
        for part in parts:
            with tf.device(part.device):
                part.assign(part * tf.cast(change, part.dtype), read_value=False)


def nothing() -> bool:
    """Do nothing, as a branch."""
    return False


def linear(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    """Equal differences."""
    return first + (1.0 - first) * progress


def exponential(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    """Equal ratios."""
    return tf.pow(first, 1.0 - progress)


def cosine(first: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
    """Half a wave: slow at both ends."""
    return first + (1.0 - first) * (1.0 - tf.cos(math.pi * progress)) / 2.0


CURVES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "linear": linear,
    "exponential": exponential,
    "cosine": cosine,
}
