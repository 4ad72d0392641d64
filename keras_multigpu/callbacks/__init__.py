"""Callbacks: what people do by hand around training, done once and tested.

Each is a `keras.callbacks.Callback`. What it needs to know of `fit` it asks
`model.training_run` (`training/run.py`); what has to be seen inside a step, on each replica, it
measures with a probe (`training/probes.py`).
"""

from keras_multigpu.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
from keras_multigpu.callbacks.batch_size_scaling import BatchSizeScaling as BatchSizeScaling
from keras_multigpu.callbacks.evaluation_averaging import EvaluationAveraging as EvaluationAveraging
from keras_multigpu.callbacks.gradient_noise_scale import GradientNoiseScale as GradientNoiseScale
from keras_multigpu.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
from keras_multigpu.callbacks.learning_rate_warmup import LearningRateWarmup as LearningRateWarmup
from keras_multigpu.callbacks.nan_guard import NaNGuard as NaNGuard
from keras_multigpu.callbacks.replica_drift_check import ReplicaDriftCheck as ReplicaDriftCheck
from keras_multigpu.callbacks.replica_metrics import ReplicaMetrics as ReplicaMetrics
from keras_multigpu.callbacks.resumable_checkpoint import ResumableCheckpoint as ResumableCheckpoint
from keras_multigpu.callbacks.throughput_report import ThroughputReport as ThroughputReport
from keras_multigpu.training.probes import Probe as Probe

__all__ = [
    "BatchSizeFinder",
    "BatchSizeScaling",
    "EvaluationAveraging",
    "GradientNoiseScale",
    "LearningRateFinder",
    "LearningRateWarmup",
    "NaNGuard",
    "Probe",
    "ReplicaDriftCheck",
    "ReplicaMetrics",
    "ResumableCheckpoint",
    "ThroughputReport",
]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
