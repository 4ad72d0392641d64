"""Finds `BatchSizeScaling` and `LearningRateWarmup` among callbacks, and checks their order."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.checks import value_error

SCALING, WARMUP = "BatchSizeScaling", "LearningRateWarmup"


def named(callbacks: Sequence[keras.callbacks.Callback], name: str) -> list[Any]:
    """The callbacks of a class of this package, or of a class derived from it."""
    return [
        callback
        for callback in callbacks
        if any(
            cls.__name__ == name and cls.__module__.startswith("keras_multigpu.")
            for cls in type(callback).__mro__
        )
    ]


def scaling_of(model: keras.Model) -> Any:
    """The `BatchSizeScaling` of the present `fit`, or None."""
    run = getattr(model, "training_run", None)
    found = [] if run is None else named(run.callbacks, SCALING)
    return found[0] if found else None


def warmup_of(model: keras.Model) -> Any:
    """The `LearningRateWarmup` of the present `fit`, or None."""
    found = named(model.training_run.callbacks, WARMUP)
    return found[0] if found else None


def refuse_scheduler(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a `ValueError` where Keras's scheduler would set rates that are not scaled."""
    if any(isinstance(callback, keras.callbacks.LearningRateScheduler) for callback in callbacks):
        raise value_error(
            "`LearningRateScheduler` sets the rate in every epoch, and so undoes the scaling.",
            "Expected a rate or a `keras.optimizers.schedules` object, which are scaled.",
            "Pass the schedule to the optimizer, or leave one of the two callbacks out.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )


def require_order(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a `ValueError` unless each is there at most once, and scaling comes first."""
    found = [*named(callbacks, SCALING), *named(callbacks, WARMUP)]
    names = [SCALING, WARMUP]
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
            f"Expected callbacks=[{', '.join(names)}].",
            "Exchange the two.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )
