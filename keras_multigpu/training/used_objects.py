"""Finds the models, optimizers and metrics that a function uses."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.training.variables.placement import (
    optimizers_of,
    place_optimizers,
    with_inner,
)

# Their objects do not hold the user's, or are searched in other ways.
LIBRARIES = {"builtins", "keras", "keras_multigpu", "numpy", "tensorflow"}


class UsedObjects:
    """The Keras objects that a function uses, each once; it takes the place of a model."""

    def __init__(self, jit_compile: bool) -> None:
        self.layers: list[keras.Layer] = []
        self.optimizers: list[keras.optimizers.Optimizer] = []
        self.metrics: list[keras.metrics.Metric] = []
        self.trainable_variables: list[keras.Variable] = []
        self.jit_compile = jit_compile

    @property
    def are_built(self) -> bool:
        """Whether all variables exist."""
        return all(part.built for part in (*self.layers, *self.optimizers))

    @property
    def variables(self) -> list[keras.Variable]:
        return [variable for layer in self.layers for variable in layer.variables]

    @property
    def metrics_variables(self) -> list[keras.Variable]:
        models = [layer for layer in self.layers if isinstance(layer, keras.Model)]
        of_models = [variable for model in models for variable in model.metrics_variables]
        return of_models + [v for metric in self.metrics for v in metric.variables]

    def place(self, strategy: tf.distribute.Strategy) -> None:
        """Give each replica a copy of all variables, except those of metrics."""
        place_optimizers(self.optimizers, strategy, self.variables)


def used_by(function: Any, jit_compile: bool = False) -> UsedObjects:
    """The layers, optimizers and metrics that a function can reach.

    It reaches them through its closure, the globals that it names, the object of a method, and
    through lists, dictionaries, functions and user objects that it finds there.
    """
    found = UsedObjects(jit_compile)
    waiting, seen = [function], {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        # Kept alive, so that no other object gets its id.
        seen[id(value)] = value
        if isinstance(value, keras.Layer):
            found.layers.insert(0, value)
            waiting += optimizers_of(value)
        elif isinstance(value, keras.optimizers.Optimizer):
            found.optimizers.insert(0, value)
            waiting += with_inner(value)
        elif isinstance(value, keras.metrics.Metric):
            found.metrics.insert(0, value)
        else:
            waiting += inside(value)
    return found


def inside(value: Any) -> Iterator[Any]:
    """The values inside a user's value."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif hasattr(value, "python_function"):
        # A `tf.function`.
        yield value.python_function
    elif inspect.isfunction(value):
        yield from reached_from(value)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif not isinstance(value, type | types.ModuleType) and is_of_user(value):
        yield from getattr(value, "__dict__", {}).values()
        yield vars(type(value)).get("__call__")


def is_of_user(value: Any) -> bool:
    """Whether an object's class is not one of a library's."""
    return str(type(value).__module__).partition(".")[0] not in LIBRARIES


def reached_from(function: types.FunctionType) -> Iterator[Any]:
    """The values that a function's code can name."""
    if function.__module__.partition(".")[0] in LIBRARIES:
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # Not filled yet.
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                # `models.generator`: both names are in the code.
                value = [vars(value).get(other) for other in code.co_names]
            yield value
