"""`ThroughputReport`: how fast training is, where the time goes, and what to try."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.throughput_report.flops import peak_flops, step_flops
from keras_multigpu.callbacks.throughput_report.report import (
    Throughput,
    opaque_throughput,
    throughput_of,
    verdict_on,
)
from keras_multigpu.callbacks.timing import StepClock, StepProbe, of_replicas
from keras_multigpu.checks import require_choice, require_ending
from keras_multigpu.devices import forget_peaks, memory_peak, short_name
from keras_multigpu.host_memory import peak_bytes
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.watching.probe import StepView
from keras_multigpu.writing import require_writable, say, whole, writes_here


class ThroughputReport(RunCallback):
    """Reports how fast training is, where the time of a step goes, and what to try.

    The wall time of an epoch's steps is split into waiting for data, computing on the replicas, the
    all-reduce, and the rest, which the host spends. Validation and steps that are compiled are left
    out.

    Args:
        path: A `.json` file for the reports of all epochs, rewritten after each. It holds the last
            `fit`, with the epochs before `ResumableCheckpoint` resumed it.
        verbose: 0 prints nothing, 1 the last epoch's report when training ends, 2 each epoch's.

    Attributes:
        reports: A `Throughput` for each epoch.
    """

    needs = "inside"

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        verbose: int = 1,
    ) -> None:
        require_choice("verbose", verbose, (0, 1, 2))
        super().__init__(verbose=verbose)
        self.reports: list[Throughput] = []
        self._path: Path | None = None
        if path is not None:
            wrong = "The file for the reports is not a JSON file."
            self._path = require_ending(path, ".json", wrong)
            require_writable(self._path)
        self._probe = ExchangeProbe(required=False)
        self._clock: StepClock
        self._end_time: EndTime
        self._first_memory: list[int] = []

    @property
    def report(self) -> Throughput | None:
        """The last report that measured any step."""
        return next((one for one in reversed(self.reports) if one.steps), None)

    @property
    def state(self) -> dict[str, Any]:
        return {"reports": [report._asdict() for report in self.reports]}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.reports = [Throughput(**report) for report in state["reports"]]

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        self.reports = []
        self._probe = run.watch(ExchangeProbe(required=False))
        self._clock = StepClock(run, self._probe)
        self._end_time = EndTime()
        run.after_each("on_train_batch_end", self._clock.step_done)
        self._first_memory = []
        run.after_each("on_train_batch_end", self._look_at_first_step)
        self._devices = [run.group.name_of(replica) for replica in range(run.replicas)]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._first_memory:
            # Trials, such as those of `BatchSizeFinder`, may have needed more.
            forget_peaks()
        self._clock.begin_epoch()
        self._end_time.begin_epoch(self.run.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        run = self.run
        first, peaks = self._memory()
        timings = of_replicas(self._clock.read(), run.group)
        # All workers wait until the last one has its data.
        timing = timings[0]._replace(data_wait=max(each.data_wait for each in timings))
        if self._probe.sees:
            found = throughput_of(epoch, self._devices, timing)
        else:
            found = opaque_throughput(epoch, self._devices, timing, run.global_batch_size)
        known = found.steps and math.isfinite(found.examples)
        flops = step_flops(self.model, found.examples / found.steps) if known else None
        # All replicas are taken to run on GPUs of one kind.
        peak = peak_flops(run.group.replicas[0].device, self.model.compute_dtype)
        left = run.epochs - epoch - 1
        found = found._replace(
            step_flops=flops,
            peak_flops=None if peak is None else peak * run.replicas,
            verdict=verdict_on(found, self.model, run.data),
            epochs=run.epochs,
            first_step_memory=first,
            peak_memory=peaks,
            exchanges=self._probe.exchanges,
            ends=self._end_time.after(run.step, left) if left else None,
        )
        self.reports.append(found)
        self._write()
        if self.verbose == 2:
            say(str(found))

    def _look_at_first_step(self) -> None:
        if not self._first_memory:
            if self._probe.sees:
                # Waits for the devices.
                self._probe.read()
            self._first_memory = own_peaks(self.run.group)

    def _memory(self) -> tuple[list[int], list[int]]:
        """The peaks of all devices: after the first step, and until now."""
        group, own = self.run.group, own_peaks(self.run.group)
        everyones = np.array(group.exchange_numbers([*(self._first_memory or own), *own]))
        first, now = (part.ravel() for part in np.split(everyones, 2, axis=1))
        # Linux counts pages per core and adds them up late, so a peak may seem to fall a little.
        return first.tolist(), np.maximum(first, now).tolist()

    def on_train_end(self, logs: Any = None) -> None:
        if self.verbose == 1 and self.reports:
            say(str((self.report or self.reports[-1])._replace(ends=None)))

    def _write(self) -> None:
        if self._path is not None and writes_here():
            content = {"epochs": [report.as_json() for report in self.reports]}
            with whole(self._path) as partial:
                partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


class EndTime:
    """Estimates the end of a `fit` from the epochs that it has done, validation included.

    Args:
        clock: The time, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = 0
        self._since = 0.0
        self._skipped = 0

    def begin_epoch(self, step: int) -> None:
        """An epoch begins after `step` steps, which a resumed run did earlier."""
        self._begun += 1
        # The first epoch compiles and may be incomplete: it counts only until a second one ends.
        if self._begun <= 2:
            self._since, self._skipped = self._clock(), step

    def after(self, step: int, epochs_left: int) -> float | None:
        """The end of training, estimated after an epoch of `step` steps; None if unknown."""
        done = max(self._begun - 1, 1) - (self._skipped / step if step else 1)
        if done <= 0:
            # A resumed run had only the end of this epoch left.
            self._begun = 0
            return None
        now = self._clock()
        return now + epochs_left * (now - self._since) / done


class ExchangeProbe(StepProbe):
    """A `StepProbe` that also counts the exchanges of the step, without those of the probe.

    Attributes:
        exchanges: See `Throughput`; also None without a graph.
    """

    exchanges: list[int | None] | None = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        super().build(strategy)
        self._is_spread = ReplicaGroup(strategy).is_spread

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        if self._is_spread and not tf.executing_eagerly():
            device = short_name(tf.zeros(()).device)
            self.exchanges = count_exchanges(tf.compat.v1.get_default_graph(), device)
        return super().on_replica(view)


def count_exchanges(graph: Any, device: str) -> list[int | None] | None:
    """How many exchanges begin on a device, and their bytes, see `Throughput.exchanges`."""
    sizes = []
    for operation in graph.get_operations():
        if operation.type.startswith("Collective") and short_name(operation.device) == device:
            given = operation.inputs[0]
            elements = given.shape.num_elements()
            sizes.append(None if elements is None else elements * given.dtype.size)
    if not sizes:
        return None
    return [len(sizes), None if None in sizes else sum(filter(None, sizes))]


def own_peaks(group: ReplicaGroup) -> list[int]:
    """The peak bytes of memory of each replica's device in this process; zero if unknown."""
    # Read once, so that all CPU devices of the process have the same number.
    process = peak_bytes() or 0
    return [
        process if "CPU" in replica.device else memory_peak(replica.device) or 0
        for replica in group.replicas
    ]
