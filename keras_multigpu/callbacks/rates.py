"""The learning rate of a model: reads, scales and sets it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.training.replica_group import copies_of, parts_or_copies
from keras_multigpu.training.variables.adjusted_schedule import AdjustedSchedule, unscaled


class Rate:
    """Reads, scales and sets the learning rate of a compiled distributed model.

    A plain rate is changed in place. A schedule is wrapped in one that adjusts it through
    variables, from `adjust` until `restore`; the step is compiled again for it. Saved models
    always contain the user's schedule.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.optimizer = innermost(model)
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        self._given = optimizer_internals.compiled_rate(self.optimizer)
        if isinstance(self._given, AdjustedSchedule):
            self._given = self._given.schedule

    @property
    def is_plain(self) -> bool:
        """Whether it is a number, not a schedule or a function."""
        return isinstance(self._given, keras.Variable)

    def adjust(self) -> "Rate":
        """Make a schedule adjustable until `restore`; a plain rate already is."""
        present = optimizer_internals.compiled_rate(self.optimizer)
        if self.is_plain or isinstance(present, AdjustedSchedule):
            return self
        known = vars(self.optimizer).get("_adjusted_schedule")
        if known is None or known.schedule is not present or known.strategy is not self.strategy:
            known = AdjustedSchedule(present, self.strategy)
            # Kept for the next `fit`, whose steps are already compiled for it.
            self.optimizer.__dict__["_adjusted_schedule"] = known
        self.optimizer.learning_rate = known
        return self

    def restore(self) -> None:
        """Restore the schedule that the optimizer was compiled with; a plain rate stays."""
        if isinstance(optimizer_internals.compiled_rate(self.optimizer), AdjustedSchedule):
            self.optimizer.learning_rate = self._given

    @property
    def variable(self) -> keras.Variable:
        """The variable that scales the rate: the rate itself, or a schedule's factor."""
        return self._given if self.is_plain else self._adjusted.factor

    @property
    def state(self) -> float | None:
        """The factor of a schedule; None for a plain rate, which is part of the optimizer."""
        return None if self.is_plain else float(self.variable.numpy())

    @state.setter
    def state(self, state: float | None) -> None:
        if state is not None and not self.is_plain:
            self.variable.assign(state)

    @property
    def next(self) -> float:
        return float(self.optimizer.learning_rate)

    def scale(self, factor: float) -> None:
        """Multiply the rate of all steps to come."""
        for variable in self._variables:
            # In single precision, like a training step.
            variable.assign(variable.numpy() * tf.constant(factor, tf.float32).numpy())

    def set(self, rate: float) -> None:
        """Use this rate for all steps to come, whatever a schedule says."""
        if self.is_plain:
            self._given.assign(rate)
        else:
            self._adjusted.factor.assign(0.0)
            self._adjusted.offset.assign(rate)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Allow rates to be set in this context, and restore everything afterwards."""
        adjusted = isinstance(optimizer_internals.compiled_rate(self.optimizer), AdjustedSchedule)
        self.adjust()
        before = [variable.numpy() for variable in self._variables]
        try:
            yield
        finally:
            for variable, value in zip(self._variables, before, strict=True):
                variable.assign(value)
            if not adjusted:
                self.restore()

    # The following methods work inside a training step.

    def variable_copies(self) -> tuple[tf.Variable, ...]:
        return copies_of(self.variable)

    def steps(self) -> tf.Tensor:
        counter = copies_of(optimizer_internals.step_counter(self.optimizer))
        return counter[0].read_value()

    def in_step(self) -> tf.Tensor:
        factor = self.variable_copies()[0].read_value()
        if self.is_plain:
            return factor
        offset = copies_of(self._adjusted.offset)[0].read_value()
        return tf.cast(self._adjusted.unadjusted(self.steps()), factor.dtype) * factor + offset

    def scale_velocities(self, factor: Any) -> None:
        """Multiply the velocities of SGD with momentum, which contain the rate.

        `v = momentum * v - rate * gradient`: when the rate changes, the old gradients in `v` would
        keep the old one (Goyal et al. 2017, 3.3).
        """
        velocities = getattr(self.optimizer, "momentums", ()) if self.has_velocity else ()
        for velocity in velocities:
            for part in parts_or_copies(variable_storage(velocity)) if velocity is not None else ():
                with tf.device(part.device):
                    part.assign(part * tf.cast(factor, part.dtype), read_value=False)

    @property
    def has_velocity(self) -> bool:
        return isinstance(self.optimizer, keras.optimizers.SGD) and bool(self.optimizer.momentum)

    @property
    def _variables(self) -> list[keras.Variable]:
        return [self._given] if self.is_plain else self._adjusted.variables

    @property
    def _adjusted(self) -> AdjustedSchedule:
        return self.optimizer.__dict__["_adjusted_schedule"]


def innermost(model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer that updates the weights, inside one that scales the loss."""
    optimizer = unscaled(getattr(model, "optimizer", None))
    if not isinstance(optimizer, keras.optimizers.Optimizer) or hasattr(optimizer, "optimizers"):
        raise value_error(
            "The model has no single learning rate.",
            "Expected one compiled Keras optimizer.",
            "Pass `optimizer` to `compile`; with several optimizers, set their rates yourself.",
            optimizer=optimizer,
        )
    return optimizer
