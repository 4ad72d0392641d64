"""`Trace`: a timeline of each replica in a few steps, as a file for Perfetto.

    previous step │  wait   │ pass     │ sum      │ update      │
                  └ updated └ started  └ computed └ reduced     └ updated

A probe writes the times into a variable, which is read once, when the last of these steps is over.
"""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import require_ending, value_error
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.steps.probes import Probe, StepView, now_that
from keras_multigpu.writing import require_writable, whole, writes_here

logger = logging.getLogger("keras_multigpu")

SPANS = ("wait", "pass", "sum", "update")
"""The phases of a replica's step, in order."""


class Trace(RunCallback):
    """Writes what each replica did in a few steps, as a trace that Perfetto and Chrome open.

    Args:
        path: A `.json` file, written when the last of the steps is over.
        steps: The first and the last step, both included, counted from 1 in this `fit`. The first
            steps are slow, because they are compiled.
        verbose: Whether to print the path of the file.
    """

    needs = "inside"

    def __init__(
        self, path: str | Path, *, steps: tuple[int, int] = (10, 15), verbose: int = 1
    ) -> None:
        super().__init__(verbose=verbose)
        if not (
            isinstance(steps, (tuple, list))
            and len(steps) == 2
            and all(isinstance(each, int) and not isinstance(each, bool) for each in steps)
            and 1 <= steps[0] <= steps[1]
        ):
            raise value_error(
                "`steps` is not a first and a last step.",
                "Expected two integers, which count from 1.",
                "Pass for example steps=(10, 15).",
                steps=steps,
            )
        self.path = require_ending(path, ".json", "The file for the trace is not a JSON file.")
        require_writable(self.path)
        self.steps = first, last = tuple(steps)
        self._probe = TimesProbe(first, last)
        self._calls: list[Call] = []
        # The steps done in this `fit`, and the epoch's step that was counted last.
        self._done = self._at = 0
        self._before = 0.0, 0.0, 0.0
        self._written = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._calls, self._done, self._written = [], 0, False
        self._before = 0.0, 0.0, 0.0
        self.run.watch(self._probe)
        self.run.after_each("on_train_batch_end", self._steps_done)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at = self.run.step

    def on_train_end(self, logs: Any = None) -> None:
        if self._calls and not self._written:
            self._write()
        elif not self._written:
            logger.warning(
                "`Trace` has written nothing: `fit` ended after %d steps, and steps=(%d, %d).",
                self._done,
                *self.steps,
            )

    def _steps_done(self) -> None:
        if self._written:
            return
        run, (first, last) = self.run, self.steps
        done = self._done + run.step - self._at
        now = run.in_calls, run.feed.waited, run.data_wait - run.feed.waited
        spent, waited, inside = (n - b for n, b in zip(now, self._before, strict=True))
        if done >= first and self._done < last:
            # In the time of day, which the probe uses.
            began = time.time() - (time.perf_counter() - run.step_began)
            self._calls.append(Call(began, spent, waited, inside, done - self._done))
        self._before, self._done, self._at = now, done, run.step
        if done >= last:
            self._write()

    def _write(self) -> None:
        """Write the file. Every process has to call it."""
        self._written = True
        group, (first, last) = self.run.group, self.steps
        traced = min(self._done, last) - first + 1 if self._probe.sees else 0
        times = self._probe.read()[: traced + 1]
        # As whole nanoseconds: processes exchange integers.
        own = [round(number * 1e9) for call in self._calls for number in call]
        everyones = np.reshape(
            group.exchange_numbers(own), [-1, len(self._calls), len(Call._fields)]
        )
        calls = [[Call(*call) for call in of_worker] for of_worker in everyones / 1e9]
        if not writes_here():
            return
        with whole(self.path) as partial:
            content = trace_of(group, first, times, calls)
            partial.write_text(json.dumps(content, allow_nan=False) + "\n")
        self.say(f"{self.path} has steps {first} to {min(self._done, last)}; open it in Perfetto.")


class TimesProbe(Probe):
    """Records when each replica ended each phase, in a range of steps and in the step before."""

    timed = True
    required = False

    def __init__(self, first: int, last: int) -> None:
        self._first, self._rows = first, last - first + 3
        self._times: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        shape = [self._rows, ReplicaGroup(strategy).count, len(SPANS)]
        if self._times is None or self._times.shape != shape:
            with tf.device(HOST):
                self._times = tf.Variable(tf.zeros(shape, tf.float64), trainable=False)
                self._done = tf.Variable(0, trainable=False)
        self._times.assign(tf.zeros_like(self._times))
        self._done.assign(0)

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        assert view.times is not None
        updated = now_that([*view.update.trainable, *view.update.optimizer])
        with tf.device(HOST):
            return [tf.stack([*view.times.moments, updated])]

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        with tf.device(HOST):
            # Earlier steps share row 0, and later ones share the last row.
            row = tf.clip_by_value(self._done + 2 - self._first, 0, self._rows - 1)
            times = tf.stack([times for (times,) in measured])
            self._times.scatter_nd_update([[row]], times[tf.newaxis])
            self._done.assign_add(1)

    def read(self) -> np.ndarray:
        """The times by step, replica and phase, beginning with the step before."""
        times: np.ndarray = self._times.numpy()
        return times


class Call(NamedTuple):
    """A call of the training function on the host of a worker, in seconds.

    Attributes:
        began: When it began, since 1970.
        spent: How long it took.
        waited: The wait for data before the call.
        inside: The wait for data in the call, if its graph reads them.
        steps: How many steps it ran.
    """

    began: float
    spent: float
    waited: float
    inside: float
    steps: float


def trace_of(
    group: ReplicaGroup, first: int, times: np.ndarray, calls: Sequence[Sequence[Call]]
) -> dict[str, Any]:
    """The content of the file, from what `TimesProbe.read` returns and the calls of each worker."""
    workers = [group.worker_of(replica) for replica in range(group.count)]
    late = clock_offsets(times[1:, :, 2], workers)
    times = np.where(times > 0, times - late[workers][:, np.newaxis], 0.0)
    spans = spans_of_replicas(first, times, workers)
    for worker, of_worker in enumerate(calls):
        for call in of_worker:
            began, host = call.began - late[worker], group.count
            more = {"steps": round(call.steps), "data wait, ms": call.inside * 1e3}
            spans.append(("data", worker, host, began - call.waited, began, {}))
            spans.append(("call", worker, host, began, began + call.spent, more))
    zero = min(began for _, _, _, began, _, _ in spans)
    events: list[dict[str, Any]] = []
    # In Perfetto, number 0 is an idle processor, so all numbers count from one.
    for worker in range(len(calls)):
        events.append(named("process_name", worker, 0, f"worker {worker}"))
        events.append(named("thread_name", worker, group.count, "host"))
    for replica, worker in enumerate(workers):
        name = f"replica {replica} ({group.device_of(replica)})"
        events.append(named("thread_name", worker, replica, name))
    for name, worker, row, *ends, more in spans:
        place = {"ph": "X", "pid": worker + 1, "tid": row + 1, "args": more}
        # Ends are rounded, not durations: Perfetto drops a span that overlaps the one before.
        began, ended = (round((end - zero) * 1e6) for end in ends)
        events.append({"name": name, **place, "ts": began, "dur": ended - began})
    offsets = [round(seconds * 1e3, 3) for seconds in late.tolist()]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clocks are ahead of worker 0's, ms": offsets},
    }


Span = tuple[str, int, int, float, float, dict[str, Any]]
"""The name, worker, row, beginning, end and details."""


def spans_of_replicas(first: int, times: np.ndarray, workers: Sequence[int]) -> list[Span]:
    found: list[Span] = []
    for replica, worker in enumerate(workers):
        # There is no step before the first one of the training.
        end = times[0, replica, -1] or times[1:2, replica, 0].sum()
        for step, ends in enumerate(times[1:, replica], first):
            for name, until in zip(SPANS, ends, strict=True):
                # A GPU may get the next examples before its update ends; its pass begins later.
                until = max(end, until)
                found.append((name, worker, replica, end, until, {"step": step}))
                end = until
    return found


def clock_offsets(reduced: np.ndarray, workers: Sequence[int]) -> np.ndarray:
    """How many seconds the clock of each worker is ahead of the first one's.

    Args:
        reduced: When each replica had the sums of each step, really the same moment for all.
        workers: The worker of each replica.
    """
    of_workers = [reduced[:, np.equal(workers, each)] for each in dict.fromkeys(workers)]
    if not len(reduced):
        return np.zeros(len(of_workers))
    last = np.stack([each.max(axis=1) for each in of_workers])
    offsets: np.ndarray = np.median(last - last[0], axis=1)
    return offsets


def named(kind: str, worker: int, row: int, name: str) -> dict[str, Any]:
    place = {"ph": "M", "pid": worker + 1, "tid": row + 1}
    return {"name": kind, **place, "args": {"name": name}}
