"""Where the time of steps went, without steps that were compiled and without validation."""

import operator
import time
from typing import Any, NamedTuple

from keras_multigpu.callbacks.timing.step_probe import Sums, TraceProbe, no_sums
from keras_multigpu.training.replica_group import ReplicaGroup


class Timing(NamedTuple):
    """Seconds of some steps, and what was added up in them.

    Attributes:
        wall: The seconds that passed.
        data_wait: For how many of them training waited for data.
        in_steps: For how many of them steps ran.
        groups: How many calls of steps there were.
        steps: How many steps.
        sums: What the probe added up.
    """

    wall: float
    data_wait: float
    in_steps: float
    groups: int
    steps: int
    sums: Sums

    def plus(self, other: "Timing") -> "Timing":
        added = map(operator.add, self[:-1], other[:-1])
        return Timing._make([*added, self.sums.plus(other.sums)])

    def since(self, before: "Timing") -> "Timing":
        passed = map(operator.sub, self[:-1], before[:-1])
        return Timing._make([*passed, self.sums.since(before.sums)])


def of_replicas(timing: Timing, group: ReplicaGroup) -> list[Timing]:
    """The same with the seconds of each replica's process; every process has to ask."""
    own = timing.wall, timing.data_wait, timing.in_steps
    # As whole nanoseconds: processes exchange integers.
    everyones = group.of_processes([int(seconds * 1e9) for seconds in own])
    seconds = [[number / 1e9 for number in numbers] for numbers in everyones]
    each = [timing._replace(wall=wall, data_wait=wait, in_steps=at) for wall, wait, at in seconds]
    return [each[worker] for worker in map(group.worker_of, range(group.count))]


def no_time(replicas: int) -> Timing:
    return Timing(0.0, 0.0, 0.0, 0, 0, no_sums(replicas))


class StepClock:
    """Runs while steps run that are compiled already; `eager` ones are, all but the first.

    It stops when a step begins to be compiled and goes on when that step is done.
    """

    def __init__(self, run: Any, probe: TraceProbe, eager: bool = False) -> None:
        self._eager = eager
        self._run = run
        self._probe = probe
        self._total = no_time(1)
        self._begun: Timing | None = None
        self._last = 0.0
        self._steps = 0
        self._groups = 0
        self.step = 0
        self._seen_eagerly = False

    def begin_epoch(self) -> None:
        self._total = no_time(self._probe.replicas)
        self.step = self._run.step
        self._start()

    def compiling(self) -> None:
        """A step is being compiled; this step will not count."""
        if self._seen_eagerly:
            return
        self._seen_eagerly = self._eager
        # By now its parts are compiled already; what came before the call is to be counted.
        self._last = max(self._last, self._run.step_began)
        self._stop()

    def step_done(self) -> None:
        self._steps += self._run.step - self.step
        self.step = self._run.step
        self._groups += 1
        self._last = time.perf_counter()
        if self._begun is None:
            self._start()

    def read(self) -> Timing:
        """All that this epoch took until its last step was done."""
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
        return Timing(
            self._last, run.data_wait, run.in_steps, self._groups, self._steps, self._probe.read()
        )
