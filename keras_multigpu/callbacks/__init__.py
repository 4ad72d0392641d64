"""Callbacks: what people do by hand around training, done once and tested.

Each has a room of its own, with the class in `callback.py`; `rates/` and `timing/` are shared.
Each is a `keras.callbacks.Callback`. What it needs to know of `fit` it asks `model.training_run`
(`training/run.py`); what has to be seen inside a step, on each replica, it measures with a probe
(`training/steps/probes.py`). `fit_run` and `scaling_order` are what callbacks ask of their `fit`.
"""

from keras_multigpu.callbacks.base import RunCallback as RunCallback
from keras_multigpu.callbacks.batch_size_finder.callback import BatchSizeFinder as BatchSizeFinder
from keras_multigpu.callbacks.batch_size_scaling.callback import (
    BatchSizeScaling as BatchSizeScaling,
)
from keras_multigpu.callbacks.gradient_noise_scale import (
    GradientNoiseScale as GradientNoiseScale,
)
from keras_multigpu.callbacks.learning_rate_finder.callback import (
    LearningRateFinder as LearningRateFinder,
)
from keras_multigpu.callbacks.learning_rate_warmup.callback import (
    LearningRateWarmup as LearningRateWarmup,
)
from keras_multigpu.callbacks.nan_guard.callback import NaNGuard as NaNGuard
from keras_multigpu.callbacks.ray_report.callback import RayReport as RayReport
from keras_multigpu.callbacks.replica_drift_check import (
    ReplicaDriftCheck as ReplicaDriftCheck,
)
from keras_multigpu.callbacks.replica_metrics.callback import ReplicaMetrics as ReplicaMetrics
from keras_multigpu.callbacks.resumable_checkpoint.callback import (
    ResumableCheckpoint as ResumableCheckpoint,
)
from keras_multigpu.callbacks.throughput_report.callback import ThroughputReport as ThroughputReport
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
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
