"""When steps begin and end, and what each replica saw in them and how long it took.

    started ────────────────> computed ──────────> reduced
    has its rows   compute    has its    sync      has everyone's
                              gradients            gradients

`StepProbe`, in the step, adds these up in two small variables; reading them waits for the devices.
`StepClock`, on the host, measures the wall time, without steps that were compiled and without
validation. `ReplicaMetrics` and `ThroughputReport` are built on both.
"""

import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.steps.probes import Probe, StepView

REPLICA_SUMS = ("present", "examples", "loss", "gradient_norm", "compute", "sync")
"""What is summed for each replica: the columns of `Sums.replicas`."""

STEP_SUMS = ("compute", "all_reduce")
"""What is summed for a step as a whole: the entries of `Sums.steps`."""


class Sums(NamedTuple):
    """Sums over steps.

    Attributes:
        replicas: For each replica the steps in which it had examples, its examples, its loss times
            its examples, its gradient norms, and the seconds of its passes and of its sums.
        steps: The seconds from the first start to the last gradients, and from there until all
            replicas had all gradients.
    """

    replicas: np.ndarray
    steps: np.ndarray

    def of_replicas(self, name: str) -> np.ndarray:
        return self.replicas[:, REPLICA_SUMS.index(name)]

    def of_steps(self, name: str) -> float:
        return float(self.steps[STEP_SUMS.index(name)])

    def since(self, before: "Sums") -> "Sums":
        return Sums(self.replicas - before.replicas, self.steps - before.steps)

    def plus(self, other: "Sums") -> "Sums":
        return Sums(self.replicas + other.replicas, self.steps + other.steps)


def no_sums(replicas: int) -> Sums:
    return Sums(np.zeros((replicas, len(REPLICA_SUMS))), np.zeros(len(STEP_SUMS)))


class StepProbe(Probe):
    """Sums times and examples, and on request losses and norms of gradients.

    Args:
        on_trace: Called while a step is compiled, before any of it runs.
        losses: Whether to sum losses and norms.
        required: Whether a step that cannot be looked into is an error.
    """

    timed = True

    def __init__(
        self, on_trace: Callable[[], None], losses: bool = False, required: bool = True
    ) -> None:
        self._on_trace = on_trace
        self.required = required
        self._losses = losses
        self._of_replicas: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once; the same object may serve several calls of `fit`."""
        group = ReplicaGroup(strategy)
        self.replicas = group.count
        self._here = len(group.replicas)
        known = self._of_replicas
        if known is None or known.shape[0] != self.replicas:
            zeros = no_sums(self.replicas)
            # Sums of seconds need double precision, which some devices lack.
            with tf.device(HOST):
                self._of_replicas = tf.Variable(zeros.replicas, trainable=False)
                self._of_steps = tf.Variable(zeros.steps, trainable=False)

    def before_step(self) -> None:
        """Called only when the step is traced, or at each step if it runs eagerly."""
        with tf.init_scope():
            self._on_trace()

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        assert view.times is not None
        numbers = [tf.cast(view.examples, tf.float32)]
        if self._losses:
            numbers += [tf.cast(view.loss, tf.float32), tf.sqrt(view.square_norm)]
        with tf.device(HOST):
            return [tf.stack(numbers), tf.stack(list(view.times))]

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Add to the sums; of a rejected step only the times count."""
        with tf.device(HOST):
            numbers = tf.cast(tf.stack([one[0] for one in measured]), tf.float64)
            times = tf.stack([one[1] for one in measured])
            present = tf.cast(numbers[:, 0] > 0, tf.float64)
            columns = [present, numbers[:, 0]]
            if self._losses:
                columns += [numbers[:, 1] * numbers[:, 0], numbers[:, 2]]
            else:
                columns += [present * 0, present * 0]
            added = tf.stack(columns, axis=1)
            if allowed is not None:
                # Not by a factor of zero: a step is rejected because of NaN.
                added = tf.where(allowed, added, tf.zeros_like(added))
            self._of_replicas.assign_add(tf.concat([added, times[:, 1:] - times[:, :-1]], axis=1))
            started, computed, reduced = ends_of_parts(times, self._here)
            self._of_steps.assign_add(tf.stack([computed - started, reduced - computed]))

    def read(self) -> Sums:
        """The sums so far. Waits for the devices."""
        return Sums(self._of_replicas.numpy(), self._of_steps.numpy())

    def write(self, sums: Sums) -> None:
        self._of_replicas.assign(sums.replicas)
        self._of_steps.assign(sums.steps)


def ends_of_parts(times: tf.Tensor, here: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """When a step began, when the last replica had its gradients, when the last had everyone's.

    In each process it began with the first replica; the last process counts, because what comes
    before is its wait for data. `here` is the number of replicas of each process.
    """
    of_processes = tf.reshape(times, [-1, here, times.shape[1]])
    # Machines have different clocks, but all of them have the sums at the same moment.
    there = tf.reduce_max(of_processes[:, :, 2:], axis=1, keepdims=True)
    started, computed, _ = tf.unstack(of_processes - there, axis=2)
    began = tf.reduce_max(tf.reduce_min(started, axis=1))
    return began, tf.reduce_max(computed), tf.zeros((), times.dtype)


class Timing(NamedTuple):
    """The time of some steps, and the sums of the probe.

    Attributes:
        wall: The seconds that passed.
        data_wait: For how many of them training waited for data.
        in_steps: For how many of them steps ran.
        steps: How many steps there were.
        sums: What the probe summed.
    """

    wall: float
    data_wait: float
    in_steps: float
    steps: int
    sums: Sums

    def plus(self, other: "Timing") -> "Timing":
        added = map(operator.add, self[:-1], other[:-1])
        return Timing._make([*added, self.sums.plus(other.sums)])

    def since(self, before: "Timing") -> "Timing":
        passed = map(operator.sub, self[:-1], before[:-1])
        return Timing._make([*passed, self.sums.since(before.sums)])


def of_replicas(timing: Timing, group: ReplicaGroup) -> list[Timing]:
    """The same with the seconds of each replica's process. Every process has to call it."""
    own = timing.wall, timing.data_wait, timing.in_steps
    # As whole nanoseconds: processes exchange integers.
    everyones = group.of_processes([int(seconds * 1e9) for seconds in own])
    seconds = [[number / 1e9 for number in numbers] for numbers in everyones]
    each = [timing._replace(wall=wall, data_wait=wait, in_steps=at) for wall, wait, at in seconds]
    return [each[worker] for worker in map(group.worker_of, range(group.count))]


def no_time(replicas: int) -> Timing:
    return Timing(0.0, 0.0, 0.0, 0, no_sums(replicas))


class StepClock:
    """Measures steps that are already compiled; of `eager` ones all but the first.

    It stops when a step is being compiled and continues when that step is done.
    """

    def __init__(self, run: TrainingRun, probe: StepProbe, eager: bool = False) -> None:
        self._eager = eager
        self._run = run
        self._probe = probe
        self._total = no_time(1)
        self._begun: Timing | None = None
        self._last = 0.0
        self._steps = 0
        self.step = 0
        self._seen_eagerly = False

    def begin_epoch(self) -> None:
        self._total = no_time(self._probe.replicas)
        self.step = self._run.step
        self._start()

    def compiling(self) -> None:
        """A step is being compiled, and will not count."""
        if self._seen_eagerly:
            return
        self._seen_eagerly = self._eager
        # Its parts are already compiled by now; what came before the call counts.
        self._last = max(self._last, self._run.step_began)
        self._stop()

    def step_done(self) -> None:
        self._steps += self._run.step - self.step
        self.step = self._run.step
        self._last = time.perf_counter()
        if self._begun is None:
            self._start()

    def read(self) -> Timing:
        """What this epoch took until its last step was done."""
        was_running = self._begun is not None
        self._stop()
        if was_running:
            self._start(self._last)
        return self._total

    def _start(self, at: float | None = None) -> None:
        self._last = time.perf_counter() if at is None else at
        self._begun = self._mark()

    def _stop(self) -> None:
        if self._begun is None:
            return
        added = self._mark().since(self._begun)
        self._total, self._begun = self._total.plus(added), None

    def _mark(self) -> Timing:
        run = self._run
        return Timing(self._last, run.data_wait, run.in_steps, self._steps, self._probe.read())
