"""`train_function` and its like: what Keras's loops call, and make again where it is None.

No loop calls them here, but setting them to None has a meaning that must not be lost: the compiled
step is dropped, so that the next one sees what has changed in the model. Keras does so itself where
it has quantized a model; where it exports one, it puts back what it found.
"""

from typing import Any

import keras

from keras_multigpu.checks import value_error
from keras_multigpu.training.replication import known_replication


class LoopFunction:
    """Represents the compiled steps of a model."""

    def __init__(self, steps: dict[Any, Any]) -> None:
        self.steps = steps

    def __call__(self, iterator: Any) -> Any:
        """Refuse to run: Keras's iterator does not split batches."""
        refuse(iterator)


def loop_function(kind: str) -> property:
    """The attribute of a model for the loop of a kind: "train", "test" or "predict"."""
    method = f"{kind}_step"

    def get(model: Any) -> LoopFunction | None:
        # While Keras makes a model there is nothing yet.
        replication = known_replication(model)
        steps = {} if replication is None else replication.steps_of(method)
        return LoopFunction(steps) if steps else None

    def assign(model: Any, function: Any) -> None:
        replication = known_replication(model)
        if replication is None:
            return
        if isinstance(function, LoopFunction):
            replication.take_back(function.steps)
        elif function is None:
            replication.forget(method)
        else:
            refuse(function)

    explained = f"The compiled `{method}`; assign None to have it compiled again."
    return property(get, assign, doc=explained)


def made_again(model: keras.Model, kind: str, force: bool) -> Any:
    """What `make_..._function` of a kind returns; with `force` the step is compiled again."""
    name = f"{kind}_function"
    if force:
        setattr(model, name, None)
    return getattr(model, name)


def refuse(received: Any) -> None:
    raise value_error(
        "A loop function of Keras was assigned or called.",
        "Expected None: such a function reads Keras's iterator, which does not split batches.",
        "Override `train_step`, `test_step` or `predict_step` instead, and call `fit`, `evaluate`, "
        "`predict` or the `*_on_batch` methods.",
        received=received,
    )
