"""The door to what `compile` was given and what it makes of it."""

from typing import Any

import keras
from keras.src.trainers.compile_utils import get_metric


def compiled_metric(metric: Any, y: Any, y_pred: Any) -> keras.metrics.Metric:
    """What `compile(metrics=[metric])` would use for these targets and predictions."""
    # `keras.metrics.get("accuracy")` is another metric: it compares without an argmax.
    return get_metric(metric, y, y_pred)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile` as they came."""
    # `get_compile_config` serializes them, and a loss function of the user's own does not come
    # back.
    return model._compile_config.config
