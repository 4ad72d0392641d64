"""Callbacks for what people otherwise script by hand around training.

Each is a `RunCallback` (`run_callback.py`) in a module of its own; larger ones are a folder, whose
main module has the folder's name.

    the progress of `fit`                 model.training_run    training/run.py
    inside a step                         a Probe               training/watching/probe.py
    steps before the first epoch          run.trial             trials.py
    the learning rate of each step        RateCallback          rate_of_run.py
    the times of steps                    StepClock             timing.py
"""

from keras_multigpu.callbacks.batch_size_finder import BatchSizeFinder
from keras_multigpu.callbacks.batch_size_scaling import BatchSizeScaling
from keras_multigpu.callbacks.learning_rate_finder import LearningRateFinder
from keras_multigpu.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_multigpu.callbacks.nan_guard.nan_guard import NaNGuard
from keras_multigpu.callbacks.replica_drift_check import ReplicaDriftCheck
from keras_multigpu.callbacks.replica_metrics import ReplicaMetrics
from keras_multigpu.callbacks.resumable_checkpoint.resumable_checkpoint import ResumableCheckpoint
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.throughput_report.throughput_report import ThroughputReport
from keras_multigpu.training.watching.probe import Probe

__all__ = [
    "BatchSizeFinder",
    "BatchSizeScaling",
    "LearningRateFinder",
    "LearningRateWarmup",
    "NaNGuard",
    "Probe",
    "ReplicaDriftCheck",
    "ReplicaMetrics",
    "ResumableCheckpoint",
    "RunCallback",
    "ThroughputReport",
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
