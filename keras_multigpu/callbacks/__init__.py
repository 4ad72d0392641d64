"""Callbacks: what people otherwise script by hand around training.

Each is a `RunCallback` (`base.py`), in a file of its name; larger ones in a folder, whose main file
bears the name.

    to look at where `fit` is             model.training_run    training/run.py
    to look inside a step                 a Probe               training/steps/probes.py
    to try steps before the first epoch   run.trial             trials.py
    the learning rate of each step        RateCallback          rates.py
    when steps begin and end              StepClock             timing.py
"""

from keras_multigpu.callbacks.base import RunCallback as RunCallback
from keras_multigpu.callbacks.batch_size_finder import (
    BatchSizeFinder as BatchSizeFinder,
)
from keras_multigpu.callbacks.batch_size_scaling import (
    BatchSizeScaling as BatchSizeScaling,
)
from keras_multigpu.callbacks.gradient_noise_scale import (
    GradientNoiseScale as GradientNoiseScale,
)
from keras_multigpu.callbacks.learning_rate_finder import (
    LearningRateFinder as LearningRateFinder,
)
from keras_multigpu.callbacks.learning_rate_warmup import (
    LearningRateWarmup as LearningRateWarmup,
)
from keras_multigpu.callbacks.nan_guard.nan_guard import NaNGuard as NaNGuard
from keras_multigpu.callbacks.ray_report import RayReport as RayReport
from keras_multigpu.callbacks.replica_drift_check import (
    ReplicaDriftCheck as ReplicaDriftCheck,
)
from keras_multigpu.callbacks.replica_metrics.replica_metrics import (
    ReplicaMetrics as ReplicaMetrics,
)
from keras_multigpu.callbacks.resumable_checkpoint.resumable_checkpoint import (
    ResumableCheckpoint as ResumableCheckpoint,
)
from keras_multigpu.callbacks.throughput_report.throughput_report import (
    ThroughputReport as ThroughputReport,
)
from keras_multigpu.callbacks.trace import Trace as Trace
from keras_multigpu.training.steps.probes import Probe as Probe

__all__ = [
    "BatchSizeFinder",
    "BatchSizeScaling",
    "GradientNoiseScale",
    "LearningRateFinder",
    "LearningRateWarmup",
    "NaNGuard",
    "Probe",
    "RayReport",
    "ReplicaDriftCheck",
    "ReplicaMetrics",
    "ResumableCheckpoint",
    "RunCallback",
    "ThroughputReport",
    "Trace",
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
