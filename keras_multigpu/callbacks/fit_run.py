"""The run of `fit` that a callback is part of, where there is one."""

from collections.abc import Collection, Sequence
from typing import NoReturn

import keras

from keras_multigpu.checks import value_error
from keras_multigpu.training.run import TrainingRun

LEAVE_OUT = "Leave out the callback"


def run_of(callback: keras.callbacks.Callback, why: str, instead: str = LEAVE_OUT) -> TrainingRun:
    """The run of `fit`; a `ValueError` with a model of stock Keras, which has none.

    Args:
        why: What it cannot do without, as the end of a sentence.
        instead: What can be done other than to change the model.
    """
    run: TrainingRun | None = getattr(callback.model, "training_run", None)
    if run is None:
        refuse_model(
            callback,
            "of stock Keras",
            f"Expected a model of `keras_multigpu.distribute`: {why}.",
            f"{instead}, or write `model = kmg.distribute(model)` before `compile`; one device is "
            "enough.",
        )
    return run


def run_to_see(
    callback: keras.callbacks.Callback,
    why: str = "elsewhere losses and gradients of a replica are not seen",
    instead: str = LEAVE_OUT,
) -> TrainingRun:
    """The run of `fit`, into whose steps a callback can look; a `ValueError` where none can."""
    run = run_of(callback, why, instead)
    if run.has_own_train_step:
        refuse_model(
            callback,
            "with a `train_step` of its own",
            f"Expected Keras's own `train_step`: {why}.",
            f"{instead}, or write the model with `compute_loss` instead of `train_step`.",
        )
    return run


def refuse_model(
    callback: keras.callbacks.Callback, kind: str, expected: str, fix: str
) -> NoReturn:
    raise value_error(
        f"`{type(callback).__name__}` came to a model {kind}.",
        expected,
        fix,
        model=type(callback.model).__name__,
    )


def require_before_readers(
    callback: keras.callbacks.Callback,
    callbacks: Sequence[keras.callbacks.Callback],
    logged: Collection[str],
) -> None:
    name = type(callback).__name__
    for other in callbacks[: callbacks.index(callback)]:
        writes_all = isinstance(other, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard))
        if writes_all or getattr(other, "monitor", None) in logged:
            raise value_error(
                f"{type(other).__name__} stands before {name} and would miss "
                f"{' and '.join(f'`{one}`' for one in logged)}.",
                f"Expected {name} before all callbacks that read the logs.",
                "Move it to the front of `callbacks`.",
                callbacks=[type(each).__name__ for each in callbacks],
            )
