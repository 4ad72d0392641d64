"""Sees the learning rate of each step, inside the step."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.rates.rates import Rate
from keras_multigpu.training.steps.probes import Probe

# 16 kB on the device. At 1,000 steps a second somebody reads them, half full, every two seconds.
CAPACITY = 4096
"""For how many steps the rate is kept on the device before somebody reads it."""


class RateProbe(Probe):
    """Keeps the rate that each step uses; `rate` is set before it is let into a step."""

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
        return float(self._last.numpy())

    def go_on(self, last: float) -> None:
        """Begin as after a step with this rate, which is logged if none follows in the epoch."""
        self.begin()
        self._last.assign(last)

    def passed(self, steps: int) -> None:
        """So many steps were called; read the rates if there is little room left."""
        self._seen += steps
        # Seldom, as it waits for the device; half a buffer early, as the next call may bring many
        # steps. With more than 4096 steps per execution the older ones of each are lost.
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


def multiply_velocities(velocities: list[tuple[tf.Variable, ...]], change: Any) -> None:
    for parts in velocities:
        for part in parts:
            with tf.device(part.device):
                part.assign(part * tf.cast(change, part.dtype), read_value=False)


def nothing() -> bool:
    return False
