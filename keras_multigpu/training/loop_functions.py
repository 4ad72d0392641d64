"""`train_function`, `test_function` and `predict_function`: Keras's names for compiled steps.

Keras's loops call them; the loops of this package do not. But assigning None has a meaning: the
compiled step is dropped, so that the next one sees what has changed in the model. Keras does that
after it has quantized a model. To export a model it puts them aside, and assigns them again.
"""

from typing import Any

import keras

from keras_multigpu.checks import value_error
from keras_multigpu.training.replication import known_replication


def refuse(received: Any) -> None:
    """Raise a `ValueError`; this stands for each loop function."""
    raise value_error(
        "A loop function of Keras was assigned or called.",
        "Expected None: such a function reads Keras's iterator, which does not split batches.",
        "Override `train_step`, `test_step` or `predict_step` instead, and call `fit`, `evaluate`, "
        "`predict` or the `*_on_batch` methods.",
        received=received,
    )


def loop_function(mode: str) -> property:
    """A model's property for "train", "test" or "predict"."""

    def get(model: Any) -> Any:
        replication = known_replication(model)
        # Keras asks while it makes a model, before there are replicas.
        return None if replication is None or mode in replication.dropped else refuse

    def assign(model: Any, function: Any) -> None:
        replication = known_replication(model)
        if function not in (None, refuse):
            refuse(function)
        if replication is not None:
            change = replication.dropped.add if function is None else replication.dropped.discard
            change(mode)

    text = f"Stands for the compiled `{mode}_step`; assign None to compile it again."
    return property(get, assign, doc=text)


def remake(model: keras.Model, mode: str, force: bool) -> Any:
    """What `make_train_function` and its like return."""
    if force:
        setattr(model, f"{mode}_function", None)
    return refuse
