"""`ThroughputReport`: how fast training is, where the time goes, and what to try."""

import json
import math
from pathlib import Path
from typing import Any

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
from keras_multigpu.devices import forget_peaks, memory_peak
from keras_multigpu.host_memory import peak_bytes
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.writing import require_writable, say, write_whole, writes_here


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
        self._probe = StepProbe(required=False)
        self._clock: StepClock

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
        self._probe = run.watch(StepProbe(required=False))
        self._clock = StepClock(run, self._probe)
        run.after_each("on_train_batch_end", self._clock.step_done)
        self._devices = [run.group.name_of(replica) for replica in range(run.replicas)]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self.reports:
            # Trials, such as those of `BatchSizeFinder`, may have needed more.
            forget_peaks()
        self._clock.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        run = self.run
        peaks = run.group.exchange_numbers(own_peaks(run.group))
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
        found = found._replace(
            step_flops=flops,
            peak_flops=None if peak is None else peak * run.replicas,
            verdict=verdict_on(found, self.model, run.data),
            peak_memory=[peak for of_worker in peaks for peak in of_worker],
        )
        self.reports.append(found)
        self._write()
        if self.verbose == 2:
            say(str(found))

    def on_train_end(self, logs: Any = None) -> None:
        if self.verbose == 1 and self.reports:
            say(str(self.report or self.reports[-1]))

    def _write(self) -> None:
        if self._path is not None and writes_here():
            content = {"epochs": [report.as_json() for report in self.reports]}
            with write_whole(self._path) as partial:
                partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def own_peaks(group: ReplicaGroup) -> list[int]:
    """The peak bytes of memory of each replica's device in this process; zero if unknown."""
    # Read once, so that all CPU devices of the process have the same number.
    process = peak_bytes() or 0
    return [
        process if "CPU" in replica.device else memory_peak(replica.device) or 0
        for replica in group.replicas
    ]
