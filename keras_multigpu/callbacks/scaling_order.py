"""Finds `BatchSizeScaling` and `LearningRateWarmup` among callbacks, and checks their order."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.checks import value_error

SCALING, WARMUP = "BatchSizeScaling", "LearningRateWarmup"

Callbacks = Sequence[keras.callbacks.Callback]


def among(callbacks: Callbacks, name: str) -> list[Any]:
    # Not above: the modules of both import this one.
    from keras_multigpu import callbacks as public

    return [callback for callback in callbacks if isinstance(callback, getattr(public, name))]


def scaling_of(model: keras.Model) -> Any:
    """The `BatchSizeScaling` of the present `fit`, or None."""
    run = getattr(model, "training_run", None)
    return None if run is None else next(iter(among(run.callbacks, SCALING)), None)


def refuse_scheduler(callbacks: Callbacks) -> None:
    if any(isinstance(callback, keras.callbacks.LearningRateScheduler) for callback in callbacks):
        raise value_error(
            "`LearningRateScheduler` sets the rate in every epoch, and so undoes the scaling.",
            "Expected a rate or a `keras.optimizers.schedules` object, which are scaled.",
            "Pass the schedule to the optimizer, or leave one of the two callbacks out.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )


def require_order(callbacks: Callbacks) -> None:
    found = [*among(callbacks, SCALING), *among(callbacks, WARMUP)]
    if len(found) > len({type(callback) for callback in found}):
        raise value_error(
            "A callback that sets the learning rate is there twice.",
            f"Expected at most one {SCALING} and one {WARMUP}.",
            "Leave one out.",
            callbacks=[type(callback).__name__ for callback in found],
        )
    places = [list(callbacks).index(callback) for callback in found]
    if places != sorted(places):
        raise value_error(
            f"{WARMUP} comes before {SCALING}, so it would not know the scaled rate.",
            f"Expected callbacks=[{SCALING}, {WARMUP}].",
            "Exchange the two.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )
