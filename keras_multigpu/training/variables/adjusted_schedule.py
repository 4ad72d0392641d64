"""`AdjustedSchedule`: a learning rate schedule that callbacks can scale or replace.

A schedule is traced into the step, and Keras does not allow assigning to it. During a `fit` with
such a callback, the optimizer has an `AdjustedSchedule`, which adjusts the user's by variables.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.variables.placement import place_variables, with_inner


def adjusted_schedule(optimizer: keras.optimizers.Optimizer | None) -> "AdjustedSchedule | None":
    """The adjusted schedule of an optimizer, or of the one inside it, if there is one."""
    # Every step asks: it looks only where callbacks put one.
    inner = unscaled(optimizer)
    rate = None if inner is None else optimizer_internals.compiled_rate(inner)
    return rate if isinstance(rate, AdjustedSchedule) else None


def unscaled(optimizer: Any) -> Any:
    """The optimizer that updates the weights, inside one that scales the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def adjustments(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    """The variables of an adjusted schedule, which no optimizer counts as its own."""
    schedule = adjusted_schedule(optimizer)
    return [] if schedule is None else schedule.variables


def state_of(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    """All variables that an update reads or changes, besides the weights."""
    parts = [] if optimizer is None else with_inner(optimizer)
    # An outer optimizer may also list the variables of an inner one.
    own = {id(v): v for part in parts for v in part.variables}
    return [*own.values(), *adjustments(optimizer)]


class AdjustedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """`factor * schedule(step) + offset`, saved as if it were the user's schedule.

    That may be a function without arguments.
    """

    def __init__(self, schedule: Any, strategy: tf.distribute.Strategy) -> None:
        self.schedule, self.strategy = schedule, strategy
        with tf.init_scope():
            self.factor = keras.Variable(1.0, dtype="float32", trainable=False, name="factor")
            self.offset = keras.Variable(0.0, dtype="float32", trainable=False, name="offset")
        place_variables(self.variables, strategy)

    # Keras reads the class of an object that it saves, and finds the user's.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.schedule)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the adjustment, of which each replica has a copy."""
        return [self.factor, self.offset]

    def __call__(self, step: Any) -> Any:
        return keras.ops.cast(self.unadjusted(step), "float32") * self.factor + self.offset

    def unadjusted(self, step: Any) -> Any:
        takes_step = isinstance(self.schedule, keras.optimizers.schedules.LearningRateSchedule)
        return self.schedule(step) if takes_step else self.schedule()

    def get_config(self) -> dict[str, Any]:
        """The config of the user's schedule."""
        config: dict[str, Any] = self.schedule.get_config()
        return config
