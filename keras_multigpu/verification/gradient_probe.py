"""Compares the gradients of a training step on shares with those on the whole batch.

The shares' gradients tell how a step of the user's own combines its examples:

    sum of the shares' gradients, each times its part of the batch  = the whole one
        a mean over the examples at hand
    plain sum of the shares' gradients                              = the whole one
        a sum over the examples at hand: right on replicas as it is
    neither
        the examples do not enter one by one
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import compile_internals, model_internals
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.verification.participants import weights_of

Gradients = list[np.ndarray | None]


class Outcome(NamedTuple):
    """What a training step over some rows computed, without changing the model.

    Args:
        gradients: With a `train_step` of the user's own, the gradients that it applied.
            Otherwise those of the compiled loss, for each of the predictions.
    """

    gradients: Gradients
    added_losses: list[tuple[keras.Layer, float]]


class GradientProbe:
    """Runs training steps, or a `train_step` of the model's own, that leave the model unchanged."""

    def __init__(self, model: keras.Model, custom: bool) -> None:
        self._model = model
        self._custom = custom
        self._weights = weights_of(model)
        self._applied: Gradients = []
        self.called_compute_loss = False
        for optimizer in optimizers_of(model):
            # The gradients are wanted, and the weights shall stay.
            vars(optimizer)["apply"] = self._remember
        if custom:
            vars(model)["compute_loss"] = self._noticed(model.compute_loss)

    def run(self, batch: Batch) -> Outcome:
        # The last run has moved the averages of BatchNormalization.
        self._model.set_weights(self._weights)
        gradients = self._of_train_step(batch) if self._custom else self._of_predictions(batch)
        return Outcome(gradients, added_losses(self._model))

    def _of_train_step(self, batch: Batch) -> Gradients:
        self._applied = []
        self._model.train_step(keras.utils.pack_x_y_sample_weight(*batch))
        return self._applied

    def _of_predictions(self, batch: Batch) -> Gradients:
        x, y, sample_weight = batch
        with tf.GradientTape() as tape:
            y_pred = model_internals.called(self._model, x, training=True)
            predictions = keras.tree.flatten(y_pred)
            # Crossentropies read the logits that Keras attaches to a softmax's output.
            logits = model_internals.attached(predictions)[1::2]
            predictions += [tensor for tensor in logits if tensor is not None]
            tape.watch(predictions)
            loss = compile_internals.compute_loss(self._model, x, y, y_pred, sample_weight, True)
        return as_arrays(tape.gradient(loss, predictions))

    def _remember(self, grads: Any, trainable_variables: Any = None) -> None:
        self._applied += as_arrays(list(grads))

    def _noticed(self, compute_loss: Any) -> Any:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.called_compute_loss = True
            return compute_loss(*args, **kwargs)

        return noticed


def added_losses(model: keras.Model) -> list[tuple[keras.Layer, float]]:
    """The losses that layers added in the last call, each with its layer."""
    # Regularisers are left out: those of weights, which Keras computes anew whenever it is asked,
    # and those of activities, which replicas handle.
    first, second = model.losses, model.losses
    found = []
    for loss in first:
        if any(loss is other for other in second):
            layers = model_internals.layers_of(model)
            having = [one for one in layers if any(loss is other for other in one.losses)]
            # The innermost layer comes last.
            if having[-1].activity_regularizer is None:
                found.append((having[-1], float(loss)))
    return found


def as_arrays(gradients: Any) -> Gradients:
    return [None if g is None else tf.convert_to_tensor(g).numpy() for g in gradients]


def weighted_sum(parts: list[Gradients], weights: list[float]) -> Gradients:
    return [
        None
        if any(gradient is None for gradient in column)
        else sum(weight * gradient for weight, gradient in zip(weights, column, strict=True))
        for column in zip(*parts, strict=True)
    ]


def equal(ours: Gradients, theirs: Gradients, tolerance: float) -> bool:
    # Of all together: a gradient that is zero but for rounding has no scale of its own.
    scale = max((np.abs(g).max(initial=0.0) for g in theirs if g is not None), default=0.0)
    return len(ours) == len(theirs) and all(
        a is b is None
        or (a is not None and b is not None and np.allclose(a, b, rtol=0, atol=tolerance * scale))
        for a, b in zip(ours, theirs, strict=True)
    )


def proportional(part: np.ndarray | None, whole: np.ndarray | None, tolerance: float) -> bool:
    """Whether the gradients of some examples point where they did in the batch."""
    if part is None or whole is None or part.shape != whole.shape:
        return part is whole
    # Their directions alone: the loss of a part is divided by fewer examples.
    a, b = part.astype(np.float64).ravel(), whole.astype(np.float64).ravel()
    if not (a.any() and b.any()):
        return not a.any() and not b.any()
    return float(np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b))) <= tolerance
