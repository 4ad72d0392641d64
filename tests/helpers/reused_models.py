"""Models that many trainings share, because compiling a step takes longer than training."""

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from helpers.all_replicas import ALL_REPLICAS
from keras_multigpu.training.replication import known_replication, replication_of
from keras_multigpu.training.variables import model_state

KEPT = ("weights", model_state.RATE, "optimizer", "seed")


def reused(build: Callable[..., keras.Model]) -> Callable[..., keras.Model]:
    """Let a function that builds models return one model for equal arguments, reset each time.

    It is one object, so a test takes the numbers it compares before it asks for the model again.
    `__wrapped__` builds a new object, for tests in which that matters.
    """
    kept: dict[str, tuple[Any, ...]] = {}

    @functools.wraps(build)
    def again(*args: Any, **kwargs: Any) -> keras.Model:
        key = repr((args, sorted(kwargs.items())))
        if ALL_REPLICAS or " at 0x" in key:
            return build(*args, **kwargs)
        if key not in kept:
            model = build(*args, **kwargs)
            if known_replication(model) is not None:
                replication_of(model).placement.prepare(model, method="train_step")
            elif model.optimizer is not None:
                model.optimizer.build(model.trainable_variables)
            kept[key] = model, values_of(model), random.getstate(), np.random.get_state()
        model, values, python_state, numpy_state = kept[key]
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        variables = model_state.variables_of(model)
        for name, value in values.items():
            model_state.set_value(variables[name], value)
        return model

    return again


def values_of(model: keras.Model) -> dict[str, Any]:
    """Everything that a training starts from; metrics reset themselves."""
    values = model_state.ModelState.of(model).values
    return {name: value for name, value in values.items() if name.partition("/")[0] in KEPT}
