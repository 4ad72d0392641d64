"""The door to what `compile` was given and what it makes of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import get_metric

from keras_multigpu.keras_internals.model_internals import (
    called,
    layers_of,
    symbolic_call,
)


def compiled_metric(metric: Any, y: Any, y_pred: Any) -> keras.metrics.Metric:
    """What `compile(metrics=[metric])` would use for these targets and predictions."""
    # `keras.metrics.get("accuracy")` is another metric: it compares without an argmax.
    return get_metric(metric, y, y_pred)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile` as they came; none before it."""
    # `get_compile_config` serializes them, and a loss function of the user's own does not come
    # back.
    return model._compile_config.config if model.compiled else {}


def compile_loss(model: keras.Model) -> Any:
    """The object that `compile(loss=...)` made, None without a loss."""
    return model._compile_loss


def loss_tracker(model: keras.Model) -> Any:
    """The running mean that is logged as `loss`."""
    return model._loss_tracker


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """`model.compute_loss`, also where an override lacks the `training` argument."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def owned_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Metrics that belong to the model or its layers and not to `compile`."""
    compiled = [model._loss_tracker, model._compile_metrics]
    compiled += model._compile_loss.metrics if model._compile_loss is not None else []
    known = {id(metric) for metric in compiled}
    return [metric for metric in model.metrics if id(metric) not in known]


def given_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metric objects given to `compile`, which Keras names only once they were used."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    return [entry.loss for entry in model._compile_loss._flat_losses]


@contextlib.contextmanager
def losses_exchanged(model: keras.Model, losses: list[Any]) -> Iterator[None]:
    """Let the compiled losses be others while the context lasts, in the order of `losses_of`."""
    # Keras matches losses with outputs, weights and nested structures in `CompileLoss`; exchanging
    # its list of losses keeps that logic in one place.
    compiled = model._compile_loss
    saved = compiled._flat_losses
    compiled._flat_losses = [
        entry._replace(loss=loss) for entry, loss in zip(saved, losses, strict=True)
    ]
    try:
        yield
    finally:
        compiled._flat_losses = saved


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs as Keras returns them from `evaluate`: a number or a list in its order."""
    return model._flatten_metrics_in_order(logs)


def build_model(model: keras.Model, batch: Any, call: Any = symbolic_call) -> None:
    """Build the model, its compiled losses and metrics.

    Args:
        model: The model.
        batch: `(x, y, sample_weight)`.
        call: `symbolic_call` where the batch is symbolic, `real_call` where it is tensors.
    """
    x, y, sample_weight = batch
    losses, metrics = model._compile_loss, model._compile_metrics
    if all(part is None or part.built for part in (*layers_of(model), losses, metrics)):
        return
    y_pred = call(lambda x: called(model, x, training=False), x)
    build_metrics(model, x, y, y_pred, sample_weight, call)
    if losses is not None and not losses.built:
        call(losses, y, y_pred, sample_weight)


def build_metrics(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, call: Any = symbolic_call
) -> None:
    """Create the variables of `compile(metrics=...)`; see `build_model`."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        call(model.compute_metrics, x, y, y_pred, sample_weight)


def update_metrics(
    model: keras.Model, update: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    """Call `update(metric, y_true, y_pred)` for every compiled metric, with what belongs to it.

    A weighted one gets its weights as well.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return
    # Keras matches metrics with outputs and weights in `CompileMetrics`; giving it stand-ins for
    # its metrics keeps that logic in one place.
    names = "_flat_metrics", "_flat_weighted_metrics"
    saved = {name: getattr(compiled, name) for name in names}
    for name, entries in saved.items():
        # Not by setting an attribute, which Keras would track.
        vars(compiled)[name] = [entry and EachMetric(entry.metrics, update) for entry in entries]
    try:
        compiled.update_state(y, y_pred, sample_weight)
    finally:
        vars(compiled).update(saved)


class EachMetric:
    """Stands in for the metrics of one output, of which each is updated, see `update_metrics`."""

    def __init__(self, metrics: list[keras.metrics.Metric], update: Any) -> None:
        self._metrics = metrics
        self._update = update

    def update_state(self, *data: Any) -> None:
        """What Keras calls with the output's targets, predictions and perhaps weights."""
        for metric in self._metrics:
            self._update(metric, *data)


def has_metrics(model: keras.Model) -> bool:
    """Whether `compile` was given metrics."""
    return model._compile_metrics is not None


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of `compile`, once Keras has resolved and built them."""
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


same_rank = squeeze_or_expand_to_same_rank
"""Squeezes or expands two tensors whose ranks differ by one, as losses do."""
