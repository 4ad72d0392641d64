"""From summed gradients to new values, on each replica alike: one optimizer step, a pure function.

The gradients that come in are already summed over replicas, so whatever the optimizer
does with them (clip, accumulate, decay, scale, average) is what one device would do, and
every replica does the same. Keras's own code does it; `keras_internals/optimizer_internals` lets it
run without assigning, also accumulated gradients, averages of weights (EMA) and rows of embeddings.

A learning rate schedule is traced into the step, and Keras lets nobody assign to it. So that
callbacks can scale or replace one, the optimizer gets an `AdjustedSchedule` for the time of a
`fit`, which asks the user's and adjusts the answer by variables.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.variables.placement import MadeOutside, place_variables, with_inner


def loss_scale(
    optimizer: keras.optimizers.Optimizer | None,
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
) -> tf.Tensor:
    """The factor that the optimizer wants the loss to have before its gradient is taken.

    The variables are `state_of(optimizer)`.
    """
    if optimizer is None:
        return tf.ones(())
    with keras.StatelessScope(list(zip(variables, values, strict=True))):
        return optimizer.scale_loss(tf.ones(()))


def updated(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    values: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
    method: str = "apply",
) -> list[tf.Tensor]:
    """New values of variables, from the present ones.

    The first have a gradient, which is None where the loss does not depend on its variable; after
    them comes `state_of(optimizer)`. Keras's training step calls the method `apply_gradients`,
    which a user may have written.
    """
    trainable = variables[: len(gradients)]
    if is_loss_scaled(optimizer):
        return loss_scaled_update(optimizer, variables, list(values), trainable, gradients)
    return plain_update(optimizer, variables, values, trainable, gradients, method)


def is_loss_scaled(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer skips steps with gradients that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def plain_update(  # type: ignore[no-untyped-def]
    optimizer, variables, values, trainable, gradients, method="apply"
):
    """New values of all variables after a method of the optimizer."""
    parts = with_inner(optimizer)
    built = [part for part in parts if part.built]
    with optimizer_internals.ValuesScope(list(zip(variables, values, strict=True))) as scope:
        with optimizer_internals.functional(built), built_outside(parts):
            if method == "apply" or not trainable:
                optimizer.apply(gradients, trainable)
            else:
                optimizer.apply_gradients(zip(gradients, trainable, strict=True))
    return [scope.get_current_value(variable) for variable in variables]


class NeedsOptimizer(MadeOutside):
    """An optimizer inside of another is built when it is first given weights."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, trainable: Sequence[Any]) -> None:
        super().__init__(optimizer.name)
        self._optimizer, self._trainable = optimizer, list(trainable)

    def build(self) -> None:
        with optimizer_internals.variables_anywhere():
            self._optimizer.build(self._trainable)


@contextlib.contextmanager
def built_outside(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Let those that are not built ask for it where Keras would build them."""

    def raise_needed(optimizer: Any, trainable: Sequence[Any]) -> None:
        raise NeedsOptimizer(optimizer, trainable)

    waiting = [optimizer for optimizer in optimizers if not optimizer.built]
    for optimizer in waiting:
        vars(optimizer)["build"] = functools.partial(raise_needed, optimizer)
    try:
        yield
    finally:
        for optimizer in waiting:
            del vars(optimizer)["build"]


def loss_scaled_update(optimizer, variables, values, trainable, gradients):  # type: ignore[no-untyped-def]
    """The same for a `LossScaleOptimizer`: all replicas take or skip the step together."""
    known = {id(v): value for v, value in zip(variables, values, strict=True)}
    scale, counter = known[id(optimizer.dynamic_scale)], known[id(optimizer.step_counter)]
    given = [gradient for gradient in gradients if gradient is not None]
    flags = [keras.ops.all(keras.ops.isfinite(gradient)) for gradient in given]
    finite = tf.reduce_all(flags)

    def take() -> list[tf.Tensor]:
        unscaled = [None if g is None else keras.ops.divide(g, scale) for g in gradients]
        return plain_update(optimizer.inner_optimizer, variables, values, trainable, unscaled)

    new = tf.cond(finite, take, lambda: [tf.identity(value) for value in values])
    grow = tf.equal(counter, optimizer.dynamic_growth_steps - 1)
    # The factors are those of `keras.optimizers.LossScaleOptimizer`.
    scale_if_finite = tf.where(grow, scale * 2.0, scale)
    changed = {
        id(optimizer.dynamic_scale): tf.where(finite, scale_if_finite, scale * 0.5),
        id(optimizer.step_counter): tf.where(
            tf.logical_and(finite, tf.logical_not(grow)), counter + 1, tf.zeros_like(counter)
        ),
    }
    return [changed.get(id(v), value) for v, value in zip(variables, new, strict=True)]


def adjustments(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    """The variables of adjusted schedules, which no optimizer counts as its own."""
    parts = [] if optimizer is None else with_inner(optimizer)
    rates = [optimizer_internals.compiled_rate(part) for part in parts]
    return [v for rate in rates if isinstance(rate, AdjustedSchedule) for v in rate.variables]


def state_of(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    """All variables that an update reads or changes, besides the weights."""
    parts = [] if optimizer is None else with_inner(optimizer)
    # What an optimizer inside of another has, both may count.
    own = {id(v): v for part in parts for v in part.variables}
    return [*own.values(), *adjustments(optimizer)]


class AdjustedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """`factor * schedule(step) + offset`, saved as if it were the schedule itself.

    The user's schedule may be a function without arguments.
    """

    def __init__(self, schedule: Any, strategy: tf.distribute.Strategy) -> None:
        self.schedule, self.strategy = schedule, strategy
        with tf.init_scope():
            self.factor = keras.Variable(1.0, dtype="float32", trainable=False, name="factor")
            self.offset = keras.Variable(0.0, dtype="float32", trainable=False, name="offset")
        place_variables(self.variables, strategy)

    # Keras asks an object for its class when it saves it, and finds the user's.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.schedule)

    @property
    def variables(self) -> list[keras.Variable]:
        """What the adjustment depends on. Training steps take these from each replica."""
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
