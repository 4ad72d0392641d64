"""Adds up, inside the training step, what each replica saw and how long it took.

    started ────────────────> computed ──────────> reduced
    has its rows   compute    has its    sync      has everyone's
                              gradients            gradients

One timed probe that `ReplicaMetrics` and `ThroughputReport` have in common. It only adds numbers
to two small variables; whoever reads these waits for the devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.steps.probes import Probe, Seen

REPLICA_SUMS = ("present", "examples", "loss", "gradient_norm", "compute", "sync")
"""What is added up for each replica: the columns of `Sums.replicas`."""

STEP_SUMS = ("steps", "compute", "all_reduce")
"""What is added up for a step as a whole: the entries of `Sums.steps`."""


class Sums(NamedTuple):
    """Sums over steps.

    Attributes:
        replicas: For each replica the steps in which it had examples, its examples, its loss times
            its examples, its gradient norms, and the seconds of its passes and of its sums.
        steps: The steps, the seconds from the first start to the last gradients, and those from
            there until all had all gradients.
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


class TraceProbe(Probe):
    """Tells when a step is being compiled, and lets waiting for data inside graphs be timed.

    It measures nothing, so it also works with a `train_step` of the user's own.

    Args:
        on_trace: Called while a step is compiled, before any of it runs.
    """

    timed = True

    def __init__(self, on_trace: Callable[[], None]) -> None:
        self._on_trace = on_trace

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Remember how many replicas there are, and in how many processes."""
        group = ReplicaGroup(strategy)
        self.replicas = group.count
        self._here = len(group.replicas)

    def before_step(self) -> None:
        """Called when the step is traced only, or at each step if it runs eagerly."""
        with tf.init_scope():
            self._on_trace()

    def read(self) -> Sums:
        return no_sums(self.replicas)


class StepProbe(TraceProbe):
    """Adds up times and examples, and on request losses and norms of gradients."""

    def __init__(self, on_trace: Callable[[], None], losses: bool = False) -> None:
        super().__init__(on_trace)
        self._losses = losses
        self._of_replicas: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once; the same object may serve several calls of `fit`."""
        super().build(strategy)
        known = self._of_replicas
        if known is None or known.shape[0] != self.replicas:
            zeros = no_sums(self.replicas)
            # Sums of seconds need double precision, which some devices do not have.
            with tf.device(HOST):
                self._of_replicas = tf.Variable(zeros.replicas, trainable=False)
                self._of_steps = tf.Variable(zeros.steps, trainable=False)

    def on_replica(self, seen: Seen) -> list[tf.Tensor]:
        assert seen.times is not None
        numbers = [tf.cast(seen.examples, tf.float32)]
        if self._losses:
            numbers += [tf.cast(seen.loss, tf.float32), tf.sqrt(seen.square_norm)]
        with tf.device(HOST):
            return [tf.stack(numbers), tf.stack(list(seen.times))]

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Add to the sums; a step that was forbidden counts for times only."""
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
                # Not by a factor of zero: a step is forbidden because of NaN.
                added = tf.where(allowed, added, tf.zeros_like(added))
            self._of_replicas.assign_add(tf.concat([added, times[:, 1:] - times[:, :-1]], axis=1))
            started, computed, reduced = ends_of_parts(times, self._here)
            self._of_steps.assign_add(
                tf.stack([tf.ones((), tf.float64), computed - started, reduced - computed])
            )

    def read(self) -> Sums:
        """The sums so far; waits for the devices."""
        return Sums(self._of_replicas.numpy(), self._of_steps.numpy())

    def write(self, sums: Sums) -> None:
        self._of_replicas.assign(sums.replicas)
        self._of_steps.assign(sums.steps)


def ends_of_parts(times: tf.Tensor, here: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """When a step began, when the last replica had its gradients, when the last had everyone's.

    It began in each process with its first replica; the last of several processes counts, as what
    comes before is its wait for data. `here` says how many replicas each process has.
    """
    of_processes = tf.reshape(times, [-1, here, times.shape[1]])
    # Machines have clocks of their own, but all of them have the sums at the same moment.
    there = tf.reduce_max(of_processes[:, :, 2:], axis=1, keepdims=True)
    started, computed, _ = tf.unstack(of_processes - there, axis=2)
    began = tf.reduce_max(tf.reduce_min(started, axis=1))
    return began, tf.reduce_max(computed), tf.zeros((), times.dtype)
