"""`ThroughputReport`: how fast training is, where the time goes, and what to try."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.callbacks.base import RunCallback
from keras_multigpu.callbacks.throughput_report.bottlenecks import verdict_on
from keras_multigpu.callbacks.throughput_report.forward_flops import forward_flops
from keras_multigpu.callbacks.throughput_report.report import (
    Throughput,
    throughput_figure,
    throughput_of,
    unseen_throughput,
)
from keras_multigpu.callbacks.throughput_report.scaling_run import scaling_of
from keras_multigpu.callbacks.timing import StepClock, StepProbe, TraceProbe, of_replicas
from keras_multigpu.checks import (
    require_choice,
    require_ending,
    require_number,
    require_positive_integer,
    value_error,
)
from keras_multigpu.pictures import picture_file, write_png
from keras_multigpu.training.feed.feed import is_generator
from keras_multigpu.writing import require_writable, say, whole, writes_here

logger = logging.getLogger("keras_multigpu")


class ThroughputReport(RunCallback):
    """Tells how fast training is, where the time of a step goes, and what to try.

    The wall time of an epoch's steps is split into the wait for data, the computation of the
    replicas, the all-reduce of what they have computed, and the rest, which is the host's. The
    parts add up to the wall time. Steps that are compiled and validation are left out.

    Args:
        path: A `.json` file for the reports of all epochs, written anew after each. It holds the
            last `fit`, and what a `ResumableCheckpoint` says came before it.
        picture: A PNG that is drawn when training ends.
        scaling_steps: Measure, when training is over, how much faster all replicas are than one,
            in rounds of so many steps on copies of the model. None leaves it out.
        peak_flops: The operations a second that one device can do at most, from its data sheet and
            for the type that the model computes in. With it the report has the utilisation.
        verbose: 0 prints nothing, 1 the last epoch's report when training ends, 2 each epoch's.

    Attributes:
        reports: A `Throughput` for each epoch.
        report: The last of them that measured any step; None before.

    Example:

    ```python
    model.fit(data, epochs=2, callbacks=[kmg.callbacks.ThroughputReport()])
    ```
    """

    needs = "inside"

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        picture: str | Path | None = None,
        scaling_steps: int | None = None,
        peak_flops: float | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        if scaling_steps is not None:
            require_positive_integer("scaling_steps", scaling_steps)
        require_choice("verbose", verbose, (0, 1, 2))
        if peak_flops is not None:
            fix = "Leave it out where it is not known."
            require_number("peak_flops", peak_flops, lambda n: 0 < n < math.inf, "above zero", fix)
        self.scaling_steps = scaling_steps
        self.peak_flops = None if peak_flops is None else float(peak_flops)
        self.verbose = verbose
        self.reports: list[Throughput] = []
        self._json_path: Path | None = None
        if path is not None:
            wrong = "The file for the reports is not a JSON file."
            self._json_path = require_ending(path, ".json", wrong)
            require_writable(self._json_path)
        self._picture = picture_file(picture)
        self._measures = StepProbe(self._compiling)
        # For a `train_step` of the user's own, in which nothing can be measured.
        self._traces = TraceProbe(self._compiling)
        self._clock: StepClock | None = None
        self._forward_flops: int | None = None
        self._counted = False

    @property
    def report(self) -> Throughput | None:
        """The last report that measured any step."""
        return next((one for one in reversed(self.reports) if one.steps), None)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._run = run = self.run
        self.reports = []
        self._counted = False
        if self.scaling_steps is not None:
            if is_generator(run.data) or isinstance(run.data, tf.distribute.DistributedDataset):
                raise value_error(
                    "`scaling_steps` came with data of which no batch can be read twice.",
                    "Expected arrays, a `tf.data.Dataset` or `keras_multigpu.data` batches.",
                    "Leave it out, or make the data with one of the `kmg.data.from_*`.",
                    data=type(run.data).__name__,
                )
        self._seen = not run.has_own_train_step
        probe = self._measures if self._seen else self._traces
        run.watch(probe)
        self._clock = StepClock(run, probe, run.is_eager)
        run.after_each("on_train_batch_end", self._clock.step_done)
        self._group = self.model.replication.group
        self._devices = [self._group.name_of(replica) for replica in range(self._group.count)]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert self._clock is not None
        self._clock.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._clock is not None
        timings, run = of_replicas(self._clock.read(), self._group), self._run
        # All have waited for the data of the last one.
        timing = timings[0]._replace(data_wait=max(each.data_wait for each in timings))
        if self._seen:
            found = throughput_of(epoch, self._devices, timing)
        else:
            found = unseen_throughput(epoch, self._devices, timing, run.global_batch_size)
        if not self._counted:
            self._counted = True
            self._forward_flops = flops_of(self.model, run.batch_spec)
        found = found._replace(
            forward_flops=self._forward_flops,
            peak_flops=None if self.peak_flops is None else self.peak_flops * len(self._devices),
            verdict=verdict_on(found, self.model, run.data),
        )
        self.reports.append(found)
        self._write()
        if self.verbose == 2:
            say(str(found))

    def on_train_end(self, logs: Any = None) -> None:
        if self.scaling_steps is not None and self.report is not None:
            scaling = scaling_of(self.model, self._run, self.scaling_steps)
            index = self.reports.index(self.report)
            self.reports[index] = self.reports[index]._replace(scaling=scaling)
            self._write()
        measured = [report for report in self.reports if report.steps]
        if self._picture is not None and measured:
            write_png(throughput_figure(measured), self._picture)
        if self.verbose == 1 and self.reports:
            say(str(self.report or self.reports[-1]))

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed training needs: the reports so far."""
        return {"reports": [report.state for report in self.reports]}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.reports = [Throughput.from_state(report) for report in state["reports"]]

    def _write(self) -> None:
        if self._json_path is not None and writes_here():
            content = {"epochs": [report.as_json() for report in self.reports]}
            with whole(self._json_path) as partial:
                partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def _compiling(self) -> None:
        if self._clock is not None:
            self._clock.compiling()


def flops_of(model: keras.Model, spec: Any) -> int | None:
    """The operations of a forward pass for one example; None where they cannot be counted."""
    if spec is None:
        return None
    try:
        return forward_flops(model, spec[0])
    except Exception as error:
        # The model's own code runs here, for a single example, and may raise whatever it likes. A
        # figure that is missing is not a reason to end a training.
        logger.debug("The operations of the model cannot be counted: %s", error)
        return None
