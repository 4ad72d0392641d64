"""`train_function`, `test_function` and `predict_function`: Keras's names for compiled steps.

Keras's loops call them; the loops of this package do not. But assigning None has a meaning: the
compiled step is dropped, so that the next one sees what has changed in the model. Keras does that
after it has quantized a model. To export a model it puts them aside, and assigns them again.
"""

from typing import Any

import keras

from keras_multigpu.checks import value_error
from keras_multigpu.training.replication import known_replication


class LoopFunction:
    """The compiled steps of a model, by the keys of its `Replication`."""

    def __init__(self, steps: dict[Any, Any]) -> None:
        self.steps = steps

    def __call__(self, iterator: Any) -> Any:
        refuse(iterator)


def loop_function(kind: str) -> property:
    """A model's property for "train", "test" or "predict"."""
    method = f"{kind}_step"

    def get(model: Any) -> LoopFunction | None:
        # Keras asks while it makes a model, before there are replicas.
        replication = known_replication(model)
        steps = {} if replication is None else replication.steps_of(method)
        return LoopFunction(steps) if steps else None

    def assign(model: Any, function: Any) -> None:
        replication = known_replication(model)
        if replication is None:
            return
        if function is not None and not isinstance(function, LoopFunction):
            refuse(function)
        replication.set_steps(method, {} if function is None else function.steps)

    return property(get, assign, doc=f"The compiled `{method}`; assign None to compile it again.")


def remake(model: keras.Model, kind: str, force: bool) -> Any:
    """What `make_train_function` and its like return."""
    if force:
        setattr(model, f"{kind}_function", None)
    return getattr(model, f"{kind}_function")


def refuse(received: Any) -> None:
    raise value_error(
        "A loop function of Keras was assigned or called.",
        "Expected None: such a function reads Keras's iterator, which does not split batches.",
        "Override `train_step`, `test_step` or `predict_step` instead, and call `fit`, `evaluate`, "
        "`predict` or the `*_on_batch` methods.",
        received=received,
    )
