"""Moves the variables of a model and its optimizers to a strategy, values kept.

Every variable that a training step changes lives once on each replica, with
`aggregation="none"`: in replica context an assignment is then local, needs no
`merge_call`, and works inside `cond`, `while` and XLA. The replicas stay equal because
each applies the same update to the same values.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.replica_group import home_device
from keras_multigpu.training.replica_group import scope_of


def place_model(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Move a built model's variables to `strategy`; those already there stay."""
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        optimizer_internals.remember_variables(optimizer)
    place_variables(model.variables, strategy)
    place_optimizers(optimizers, strategy)


def place_optimizers(
    optimizers: list[keras.optimizers.Optimizer], strategy: tf.distribute.Strategy
) -> None:
    """Move the variables of optimizers to `strategy`."""
    for optimizer in optimizers:
        if home_device(strategy) is None:
            optimizer_internals.set_optimizer_strategy(optimizer, strategy)
        place_variables(optimizer.variables, strategy)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, those that the model keeps, and those inside them."""
    return [part for optimizer in own_optimizers(model) for part in with_inner(optimizer)]


def own_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer and others kept as attributes, also in lists and dictionaries."""
    values = [getattr(model, "optimizer", None), *leaves_of(vars(model))]
    found = {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    return list(found.values())


def leaves_of(value: Any) -> list[Any]:
    """What stands in lists and dictionaries, in one another too."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in leaves_of(part)]


@contextlib.contextmanager
def idle_optimizers(model: keras.Model) -> Iterator[None]:
    """Let the model's optimizers do nothing."""
    optimizers = own_optimizers(model)
    for optimizer in optimizers:
        vars(optimizer)["apply"] = lambda grads, trainable_variables=None: None
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those it wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [*getattr(optimizer, "optimizers", ()), *([] if inner is None else [inner])]
    return [optimizer, *(each for part in parts for each in with_inner(part))]


def build_optimizer(
    optimizer: keras.optimizers.Optimizer | None,
    trainable: list[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Create the optimizer's variables, if they are not there yet, and place them."""
    if optimizer is None or optimizer.built or not trainable:
        return
    with optimizer_internals.variables_anywhere():
        optimizer.build(trainable)
    parts = with_inner(optimizer)
    for part in parts:
        optimizer_internals.remember_variables(part)
    place_optimizers(parts, strategy)


class MadeOutside(Exception):
    """A step needs what cannot be made inside of it; it is then made anew."""

    def build(self) -> None:
        """Make what is needed; called outside the step."""
        raise NotImplementedError


class NeedsOptimizer(MadeOutside):
    """An optimizer that a step uses has no variables, and inside a step none can be made.

    Args:
        optimizer: The optimizer.
        trainable: The variables that it is to update.
        strategy: Where they live.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        trainable: list[keras.Variable],
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(optimizer.name)
        self._arguments = optimizer, trainable, strategy

    def build(self) -> None:
        """Make the variables."""
        build_optimizer(*self._arguments)


def place_variables(variables: list[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Give each variable a storage under `strategy`, starting from its value."""
    for variable in variables:
        storage = keras_internals.variable_storage(variable)
        if storage is None or lives_under(storage, strategy):
            continue
        value = storage.numpy()
        keras_internals.set_variable_storage(variable, copied(variable, value, strategy))


def copied(
    variable: keras.Variable, value: np.ndarray, strategy: tf.distribute.Strategy
) -> tf.Variable:
    """A storage for a variable under `strategy`: a copy on each replica."""
    with tf.init_scope(), variable_scope(strategy):
        storage = tf.Variable(
            value, dtype=value.dtype, trainable=variable.trainable, name=variable.name
        )
    keras_internals.make_convertible(storage)
    if isinstance(storage, tf.distribute.DistributedValues):
        keras_internals.updated_by_others(storage)
    return storage


def variable_scope(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[object]:
    """Where a new variable of this strategy is made."""
    home = home_device(strategy)
    return scope_of(strategy) if home is None else tf.device(home)


def lives_under(storage: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether a variable is already where `place_variables` would put it."""
    if isinstance(storage, tf.distribute.DistributedValues):
        return storage.distribute_strategy is strategy
    home = home_device(strategy)
    return home is not None and tf.DeviceSpec.from_string(
        storage.device
    ) == tf.DeviceSpec.from_string(home)
