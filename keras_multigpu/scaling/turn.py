"""One turn: runs the user's script in this process, measures its first `fit`, and ends there.

    python -m keras_multigpu.scaling.turn '{"replicas": 2, ...}' train.py [ARGUMENTS]

Callbacks and validation are left out: they may write to the user's files. `fit` goes on for as many
epochs as the measurement takes, and nothing of the script runs after it.
"""

import faulthandler
import inspect
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.throughput_report.report import (
    opaque_throughput,
    remedies,
    throughput_of,
)
from keras_multigpu.callbacks.throughput_report.throughput_report import own_peaks
from keras_multigpu.callbacks.timing import StepClock, StepProbe, Timing
from keras_multigpu.checks import runtime_error, value_error
from keras_multigpu.devices import device_count, require_logical_cpus
from keras_multigpu.explanation.explain import explain_trained
from keras_multigpu.keras_internals.replacing import replaced
from keras_multigpu.replicas import get_strategy
from keras_multigpu.training.distribute import distribute
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replication import known_replication
from keras_multigpu.writing import write_text

WARM_UP = 3
"""Steps before time counts, besides those that are compiled; they take a third of `seconds`."""

LEAST = 3
"""Steps that a turn measures, however long they take."""

ENOUGH = 100_000
"""More epochs than a turn has."""


class Stretch(RunCallback):
    """Trains until enough was measured, writes it to a file, and ends the process."""

    def __init__(self, times_batch: float, seconds: float, result: str) -> None:
        super().__init__()
        self._times_batch, self._seconds, self._result = times_batch, seconds, Path(result)
        self._steps, self._began, self._until = 0, 0.0, 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        self._batch = run.global_batch_size
        if self._times_batch != 1:
            if self._batch is None:
                raise value_error(
                    "The batch size is not known, so it cannot grow with the replicas.",
                    "Expected arrays, a dataset with one batch size, or `kmg.data`.",
                    data=run.data,
                )
            self._batch = round(self._batch * self._times_batch)
            run.set_batch_size(self._batch)
        self._probe = run.watch(StepProbe(required=False))
        self._clock = StepClock(run, self._probe)
        run.after_each("on_train_batch_end", self._step_done)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._steps:
            self._clock.begin_epoch()
        # The time goes on: between epochs data is opened again.
        self._clock.step = self.run.step

    def _step_done(self) -> None:
        now = time.perf_counter()
        self._steps, self._began = self._steps + 1, self._began or now
        is_warm = self._steps > WARM_UP and now - self._began >= self._seconds / 3
        begins, ends = not self._until and is_warm, self._until and now >= self._until
        if begins or ends:
            # GPUs may be behind: their time belongs to the steps that were asked for.
            tf.test.experimental.sync_devices()
        self._clock.step_done()
        if begins:
            self._clock.begin_epoch()
            self._until = time.perf_counter() + self._seconds
        elif ends and (timing := self._clock.read()).steps >= LEAST:
            self._finish(timing)

    def _finish(self, timing: Timing) -> None:
        run, batch = self.run, self._batch
        devices = [run.group.name_of(replica) for replica in range(run.replicas)]
        if self._probe.sees:
            found = throughput_of(0, devices, timing)
        else:
            found = opaque_throughput(0, devices, timing, batch)
        shared = explain_trained(self.model, batch or 1) if run.replicas > 1 else None
        told = found._replace(peak_memory=own_peaks(run.group)).as_json() | {
            "batch": batch,
            "bytes": sum(part.bytes for part in shared.parts) if shared else 0,
            "alone": shared.reason if shared else None,
            "tries": {part: tries_of(part, self.model, run.data) for part in found.parts},
        }
        write_text(self._result, json.dumps(told))
        os._exit(0)


def tries_of(part: str, model: keras.Model, data: Any) -> str:
    """What to try where a part of the step limits the scaling."""
    if part in ("compute", "step"):
        return "a larger replica batch, or fewer replicas"
    # The script's callbacks do not run here.
    tries = [each for helps, each in remedies(part, model, data) if helps]
    return ", ".join(each for each in tries if not each.startswith("callbacks"))


def measuring(train: Any, replicas: int, **measured: Any) -> Any:
    """A method in place of `fit` that measures a model on this many replicas."""

    def fit(model: keras.Model, *args: Any, **given: Any) -> None:
        known = known_replication(model)
        options = known.options._asdict() if known else {}
        kept = {k: v for k, v in options.items() if k in ("on_inexact", "self_check", "shard")}
        distribute(model, get_strategy("auto", replicas), **kept)
        asked = inspect.signature(train).bind(model, *args, **given).arguments
        # Validation that needs a part of the data still gets it, and never comes.
        changed = {"validation_data": None, "validation_freq": ENOUGH, "verbose": 0}
        changed["epochs"] = asked.get("initial_epoch", 0) + ENOUGH
        train(**{**asked, **changed, "callbacks": [Stretch(**measured)]})
        raise runtime_error(
            "The data ended before the measurement.",
            "Expected data that can be read again, or a generator that goes on.",
            "Give `fit` arrays, a dataset or `kmg.data`, or measure for fewer `--seconds`.",
            x=asked.get("x"),
        )

    return fit


def main() -> None:
    settings, script, *arguments = sys.argv[1:]
    # Whoever started this turn asks where it hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    options = json.loads(settings)
    most = options.pop("most")
    if not device_count("GPU"):
        # Once TensorFlow has started it is too late. All turns have as many, so they are alike.
        require_logical_cpus(most)
    # As `python SCRIPT` does.
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    fit = measuring(DistributedModel.fit, **options)
    with replaced(DistributedModel, "fit", fit), replaced(keras.Model, "fit", fit):
        runpy.run_path(script, run_name="__main__")
    raise runtime_error(
        "The script ended without a call of `fit`.",
        "Expected a script that trains a Keras model with `fit`.",
        script=script,
    )


if __name__ == "__main__":
    main()
