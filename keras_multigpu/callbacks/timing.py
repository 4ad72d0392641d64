"""Measures how long steps take, and what each replica did in them.

    started ────────────────> computed ──────────> reduced
    has its rows   compute    has its    sync      has everyone's
                              gradients            gradients

`StepProbe` adds these up inside the step, in two small variables; reading them waits for the
devices. `StepClock` measures the wall time on the host, without compilation and validation.
"""

import operator
import time
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.watching.probe import Probe, StepView

OF_REPLICAS = 6
"""How many fields of `Sums` have a number for each replica."""


class Sums(NamedTuple):
    """Sums over steps, of each replica and then of the step as a whole.

    Attributes:
        present: The steps in which a replica had examples.
        examples: Its examples.
        loss: Its loss times its examples.
        gradient_norm: The norms of its gradients.
        compute: The seconds of its passes.
        sync: The seconds from its gradients until it had everyone's.
        step_compute: The seconds from the first replica's start to the last one's gradients.
        step_all_reduce: The seconds from there until all replicas had all gradients.
        step_hidden: The seconds in which replicas exchanged sums while computing, on average.
    """

    present: np.ndarray
    examples: np.ndarray
    loss: np.ndarray
    gradient_norm: np.ndarray
    compute: np.ndarray
    sync: np.ndarray
    step_compute: float
    step_all_reduce: float
    step_hidden: float = 0.0


def no_sums(replicas: int) -> Sums:
    return Sums._make([*np.zeros((OF_REPLICAS, replicas)), 0.0, 0.0, 0.0])


class StepProbe(Probe):
    """Sums times and examples, and on request losses and norms of gradients.

    Args:
        losses: Whether to sum losses and norms.
        required: Whether a step that cannot be inspected is an error.
    """

    timed = True

    def __init__(self, losses: bool = False, required: bool = True) -> None:
        self.clock: StepClock | None = None
        self.required = required
        self._losses = losses
        self.settings: Hashable = (losses, required)
        self._of_replicas: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once, for several calls of `fit`."""
        group = ReplicaGroup(strategy)
        self.replicas = group.count
        self._here = len(group.replicas)
        known = self._of_replicas
        if known is None or known.shape[0] != self.replicas:
            # Sums of seconds need double precision, which some devices lack.
            with tf.device(HOST):
                zeros = tf.zeros([self.replicas, OF_REPLICAS], tf.float64)
                self._of_replicas = tf.Variable(zeros, trainable=False)
                self._of_steps = tf.Variable(tf.zeros([3], tf.float64), trainable=False)

    def before_step(self) -> None:
        """Runs when the step is traced, or at each step if it runs eagerly."""
        if self.clock is not None:
            with tf.init_scope():
                self.clock.compiling()

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        assert view.times is not None
        of_loss = (view.loss, tf.sqrt(view.square_norm)) if self._losses else (0.0, 0.0)
        numbers = [tf.cast(number, tf.float32) for number in (view.examples, *of_loss)]
        with tf.device(HOST):
            times = [*view.times.moments, tf.cast(view.times.hidden, tf.float64)]
            return [tf.stack(numbers), tf.stack(times)]

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Add to the sums; a rejected step only adds its times."""
        with tf.device(HOST):
            numbers = tf.cast(tf.stack([one[0] for one in measured]), tf.float64)
            times, hidden = tf.split(tf.stack([one[1] for one in measured]), [3, 1], axis=1)
            examples, losses, norms = tf.unstack(numbers, axis=1)
            present = tf.cast(examples > 0, tf.float64)
            added = tf.stack([present, examples, losses * examples, norms], axis=1)
            if allowed is not None:
                # A factor of zero would not remove the NaN of a rejected step.
                added = tf.where(allowed, added, tf.zeros_like(added))
            self._of_replicas.assign_add(tf.concat([added, times[:, 1:] - times[:, :-1]], axis=1))
            compute, all_reduce = durations_of_parts(times, self._here)
            self._of_steps.assign_add(tf.stack([compute, all_reduce, tf.reduce_mean(hidden)]))

    def read(self) -> Sums:
        """The sums so far. Waits for the devices."""
        return Sums(*self._of_replicas.numpy().T, *map(float, self._of_steps.numpy()))

    def write(self, sums: Sums) -> None:
        self._of_replicas.assign(np.stack(sums[:OF_REPLICAS], axis=1))
        self._of_steps.assign(sums[OF_REPLICAS:])


def durations_of_parts(times: tf.Tensor, here: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The seconds that a step computed, and then exchanged gradients; `here` replicas per process.

    Computing begins with the first replica of the last process, because processes wait for data
    before, and ends when the last replica has its gradients.
    """
    of_processes = tf.reshape(times, [-1, here, times.shape[1]])
    # Machines have different clocks, but all of them have the sums at the same moment.
    reduced = tf.reduce_max(of_processes[:, :, 2:], axis=1, keepdims=True)
    started, computed, _ = tf.unstack(of_processes - reduced, axis=2)
    began, ended = tf.reduce_max(tf.reduce_min(started, axis=1)), tf.reduce_max(computed)
    return ended - began, -ended


class Timing(NamedTuple):
    """The time of some steps, and the sums of the probe.

    Attributes:
        wall: The seconds that passed.
        data_wait: The seconds of waiting for data.
        in_steps: The seconds in which steps ran.
        steps: The number of steps.
        sums: What the probe summed.
    """

    wall: float
    data_wait: float
    in_steps: float
    steps: int
    sums: Sums


T = TypeVar("T", Sums, Timing)


def subtract(before: T, now: T) -> T:
    return tf.nest.map_structure(operator.sub, now, before)


def of_replicas(timing: Timing, group: ReplicaGroup) -> list[Timing]:
    """The timing for each replica, by its own process. Every process has to call it."""
    own = timing.wall, timing.data_wait, timing.in_steps
    # As whole nanoseconds: processes exchange integers.
    everyones = group.exchange_numbers([int(seconds * 1e9) for seconds in own])
    seconds = [[number / 1e9 for number in numbers] for numbers in everyones]
    each = [timing._replace(wall=wall, data_wait=wait, in_steps=at) for wall, wait, at in seconds]
    return [each[worker] for worker in map(group.worker_of, range(group.count))]


class StepClock:
    """Measures an epoch's steps, without those that are compiled or are the first eager one.

    It stops when a step is being compiled and continues when that step is done.
    """

    def __init__(self, run: TrainingRun, probe: StepProbe) -> None:
        self._run = run
        self._probe = probe
        probe.clock = self
        # The measurement is the time since `_from`, which compilation moves on. While a step is
        # being compiled it is None, and `_total` is the measurement until then.
        self._from: Timing | None = None
        self._total: Timing
        self._last = 0.0
        self._steps = 0
        self.step = 0
        self._seen_eagerly = False

    def begin_epoch(self) -> None:
        self.step, self._last = self._run.step, time.perf_counter()
        self._from = self._now()

    def compiling(self) -> None:
        """A step is being compiled and does not count."""
        if self._seen_eagerly:
            return
        self._seen_eagerly = self._run.is_eager
        # Part of the compilation is over by now, but the time before this call counts.
        self._last = max(self._last, self._run.step_began)
        if self._from is not None:
            self._total, self._from = self.read(), None

    def step_done(self) -> None:
        self._steps += self._run.step - self.step
        self.step, self._last = self._run.step, time.perf_counter()
        if self._from is None:
            self._from = subtract(self._total, self._now())

    def read(self) -> Timing:
        """The time of this epoch until the end of its last step."""
        return self._total if self._from is None else subtract(self._from, self._now())

    def _now(self) -> Timing:
        run = self._run
        return Timing(self._last, run.data_wait, run.in_steps, self._steps, self._probe.read())
