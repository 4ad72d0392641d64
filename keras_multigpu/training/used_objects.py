"""Finds the models, optimizers and metrics that a function uses."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_multigpu.training.variables.placement import optimizers_of, with_inner

# Their objects do not hold the user's, or are searched in other ways.
LIBRARIES = {"builtins", "keras", "keras_multigpu", "numpy", "tensorflow"}


class UsedObjects(NamedTuple):
    """The Keras objects that a function uses, each once."""

    layers: list[keras.Layer]
    optimizers: list[keras.optimizers.Optimizer]
    metrics: list[keras.metrics.Metric]

    @property
    def are_built(self) -> bool:
        """Whether all variables exist."""
        return all(part.built for part in (*self.layers, *self.optimizers))


def used_by(function: Any) -> UsedObjects:
    """The layers, optimizers and metrics that a function can reach.

    It reaches them through its closure, the globals that it names, the object of a method, and
    through lists, dictionaries, functions and user objects that it finds there.
    """
    found = UsedObjects([], [], [])
    waiting, seen = [function], {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        # Kept alive, so that no other object gets its id.
        seen[id(value)] = value
        if isinstance(value, keras.Layer):
            found.layers.append(value)
            waiting += optimizers_of(value)
        elif isinstance(value, keras.optimizers.Optimizer):
            found.optimizers.append(value)
            waiting += with_inner(value)
        elif isinstance(value, keras.metrics.Metric):
            found.metrics.append(value)
        else:
            waiting += inside(value)
    return UsedObjects(*(list(reversed(each)) for each in found))


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
