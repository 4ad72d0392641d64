"""Records the loss, predictions and gradients of a step while it is traced.

    compute_loss(x, y, y_pred, ...) ──> loss      the tensors of its one call
    optimizer.apply(gradients)                    before they are clipped or accumulated

Meanwhile these methods of the model and its optimizers are replaced by recording ones.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals, optimizer_internals
from keras_multigpu.training.shares import tensors_of
from keras_multigpu.training.variables.placement import own_optimizers


class StepRecord:
    """What was recorded of a step.

    Attributes:
        losses: What each call of `compute_loss` returned.
        given: The names of the tensors that its last call took.
        y_pred: The predictions among them.
        attached: What Keras has attached to the predictions.
        gradients: The gradients that optimizers got, with their variables, without None.
    """

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.y_pred: Any = None
        self.attached: list[Any] = []
        self.given: set[str] = set()
        self.gradients: list[tuple[Any, keras.Variable]] = []

    @property
    def tensors(self) -> list[tf.Tensor]:
        """Everything that can be shown."""
        gradients = [gradient for gradient, _ in self.gradients]
        return tensors_of((self.losses, gradients, self.y_pred, self.attached))


@contextlib.contextmanager
def recording(model: keras.Model) -> Iterator[StepRecord]:
    """Record the step that is traced, or runs, in this context."""
    record, calls = StepRecord(), list[None]()
    methods = [(model, "compute_loss", recording_loss(record, model.compute_loss))]
    for optimizer in own_optimizers(model):
        for name in ("apply", "apply_gradients"):
            method = getattr(optimizer, name)
            methods.append((optimizer, name, recording_gradients(record, calls, optimizer, method)))
    before = [vars(owner).get(name) for owner, name, _ in methods]
    for owner, name, method in methods:
        vars(owner)[name] = method
    try:
        yield record
    finally:
        for (owner, name, _), known in zip(methods, before, strict=True):
            if known is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = known


def recording_loss(record: StepRecord, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        record.losses.append(loss)
        record.y_pred = given.get("y_pred")
        record.attached = model_internals.attached(keras.tree.flatten(record.y_pred))
        data = [given.get(name) for name in ("x", "y", "y_pred", "sample_weight")]
        if not tf.executing_eagerly():
            record.given = {tensor.name for tensor in tensors_of((data, record.attached))}
        return loss

    return compute_loss


def recording_gradients(
    record: StepRecord,
    calls: list[None],
    optimizer: keras.optimizers.Optimizer,
    method: Callable[..., Any],
) -> Callable[..., Any]:
    """A method that records the gradients it gets, unless a recorded method calls it.

    Args:
        calls: An entry for each recorded method that runs now.
    """
    by_pairs = method.__name__ == "apply_gradients"

    def apply(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(gradients)
        if not calls:
            pairs = gradients
            if not by_pairs:
                variables = args[0] if args else kwargs.get("trainable_variables")
                variables = variables or optimizer_internals.optimized_variables(optimizer)
                pairs = list(zip(gradients, variables, strict=True))
            record.gradients += [(g, v) for g, v in pairs if g is not None]
        calls.append(None)
        try:
            return method(gradients, *args, **kwargs)
        finally:
            calls.pop()

    return apply
