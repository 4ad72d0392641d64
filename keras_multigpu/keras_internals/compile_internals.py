"""What `compile` was given, and the losses and metrics that it makes from that."""

from typing import Any

import keras
from keras.src.trainers.compile_utils import CompileMetrics

from keras_multigpu.keras_internals.model_internals import (
    called,
    layers_of,
    symbolic_call,
)


def compiled_metrics(metrics: Any, output_names: list[str]) -> keras.metrics.Metric:
    """What `compile(metrics=metrics)` makes of metrics: one, whose result has a value for each."""
    # `keras.metrics.get("accuracy")` is another metric: it compares without an argmax.
    return CompileMetrics(metrics, None, output_names=output_names)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The original arguments of `compile`; empty before it."""
    # `get_compile_config` serializes them, and a user's loss function cannot be restored.
    return model._compile_config.config if model.compiled else {}


def given_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metric objects given to `compile`, which Keras lists only after their first use."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs as Keras returns them from `evaluate`: a number or a list in its order."""
    return model._flatten_metrics_in_order(logs)


def build_model(model: keras.Model, batch: Any) -> None:
    """Build the model, its compiled losses and metrics, with a symbolic `(x, y, sample_weight)`."""
    x, y, sample_weight = batch
    losses, metrics = model._compile_loss, model._compile_metrics
    if all(part is None or part.built for part in (*layers_of(model), losses, metrics)):
        return
    # As often as in Keras, even if the shapes are known: Python may draw numbers in each call.
    y_pred = symbolic_call(lambda x: called(model, x, training=False), x)
    if metrics is not None and not metrics.built:
        symbolic_call(model.compute_metrics, x, y, y_pred, sample_weight)
    if losses is None or losses.built:
        return
    try:
        # An overridden `compute_loss` may pass other outputs to the losses.
        symbolic_call(model._compute_loss, x, y, y_pred, sample_weight)
    except Exception:
        # They are now built for the arguments of this failed call.
        losses.built = False
        losses._metrics.clear()
        raise
