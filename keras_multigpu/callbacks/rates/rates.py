"""The learning rate of a model, whatever its optimizer was compiled with."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.variables.adjusted_schedule import AdjustedSchedule


class Rate:
    """Reads, scales and sets the learning rate of a compiled model, one of Keras's too.

    A plain rate is changed where Keras keeps it. A schedule is replaced by one that adjusts it
    by variables, from `adjust` until `restore`; steps that were compiled without it are not used
    in between. Model files name the user's schedule all the time.
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
        """Whether it is a number, and not a schedule or a function."""
        return isinstance(self._given, keras.Variable)

    def adjust(self) -> "Rate":
        """Make a schedule adjustable until `restore`; a plain rate is so already."""
        present = optimizer_internals.compiled_rate(self.optimizer)
        if self.is_plain or isinstance(present, AdjustedSchedule):
            return self
        known = vars(self.optimizer).get("_adjusted_schedule")
        if known is None or known.schedule is not present or known.strategy is not self.strategy:
            known = AdjustedSchedule(present, self.strategy)
            # The same one each time, for which the steps of an earlier `fit` are compiled.
            self.optimizer.__dict__["_adjusted_schedule"] = known
        known.factor.assign(1.0)
        known.offset.assign(0.0)
        self.optimizer.learning_rate = known
        self._compile_again()
        return self

    def restore(self) -> None:
        """Give the optimizer the schedule that it was compiled with; a plain rate stays."""
        if isinstance(optimizer_internals.compiled_rate(self.optimizer), AdjustedSchedule):
            self.optimizer.learning_rate = self._given
            self._compile_again()

    @property
    def lever(self) -> keras.Variable:
        """What to multiply to scale the rate: the rate itself, or a schedule's factor."""
        return self._given if self.is_plain else self._adjusted.factor

    @property
    def state(self) -> float | None:
        """What a schedule is multiplied by; None for a plain rate, which is the optimizer's."""
        return None if self.is_plain else float(self.lever.numpy())

    @state.setter
    def state(self, state: float | None) -> None:
        if state is not None and not self.is_plain:
            self.lever.assign(state)

    @property
    def next(self) -> float:
        return float(self.optimizer.learning_rate)

    def scale(self, factor: float) -> None:
        """Multiply the rate of this and all further steps."""
        for variable in self._variables:
            # In single precision, in which a training step would do it.
            variable.assign(variable.numpy() * tf.constant(factor, tf.float32).numpy())

    def set(self, rate: float) -> None:
        """Let all further steps have this rate; a schedule's own is left out of account."""
        if self.is_plain:
            self._given.assign(rate)
        else:
            self._adjusted.factor.assign(0.0)
            self._adjusted.offset.assign(rate)

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Set rates for a while; afterwards it is adjusted, or not, as it was before."""
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

    # Inside a training step.

    def lever_copies(self) -> tuple[tf.Variable, ...]:
        return copies_of(self.lever)

    def steps(self) -> tf.Tensor:
        counter = copies_of(optimizer_internals.step_counter(self.optimizer))
        return counter[0].read_value()

    def of_step(self) -> tf.Tensor:
        lever = self.lever_copies()[0].read_value()
        if self.is_plain:
            return lever
        offset = copies_of(self._adjusted.offset)[0].read_value()
        return tf.cast(self._adjusted.unadjusted(self.steps()), lever.dtype) * lever + offset

    def velocities(self) -> list[tuple[tf.Variable, ...]]:
        """The velocities of SGD with momentum on each replica, which contain the rate."""
        if not isinstance(self.optimizer, keras.optimizers.SGD) or not self.optimizer.momentum:
            return []
        return [copies_of(v) for v in getattr(self.optimizer, "momentums", ()) if v is not None]

    @property
    def _variables(self) -> list[keras.Variable]:
        return [self._given] if self.is_plain else self._adjusted.variables

    @property
    def _adjusted(self) -> AdjustedSchedule:
        return self.optimizer.__dict__["_adjusted_schedule"]

    def _compile_again(self) -> None:
        # A distributed model looks at its schedule by itself; Keras's compiled step does not.
        if hasattr(self.model, "replication"):
            return
        if getattr(self.model, "train_function", None) is not None:
            self.model.make_train_function(force=True)


def innermost(model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer that updates the weights, inside of one that scales the loss."""
    optimizer: Any = getattr(model, "optimizer", None)
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer) or hasattr(optimizer, "optimizers"):
        raise value_error(
            "The model has no single learning rate.",
            "Expected one compiled Keras optimizer.",
            "Pass `optimizer` to `compile`; with several optimizers, set their rates yourself.",
            optimizer=optimizer,
        )
    return optimizer


def corrects_momentum(choice: bool | str, rate: Rate) -> bool:
    """Whether SGD's velocity follows the rate; a `ValueError` if it shall and there is none."""
    optimizer = rate.optimizer
    # Keras keeps the rate inside the velocity: `v = momentum * v - rate * gradient`. Where the rate
    # changes, the old gradients in `v` would go on with the old one (Goyal et al. 2017, 3.3).
    has_velocity = isinstance(optimizer, keras.optimizers.SGD) and bool(optimizer.momentum)
    if choice is True and not has_velocity:
        raise value_error(
            "`momentum_correction=True` needs a velocity to correct, and the optimizer has none.",
            "Expected `keras.optimizers.SGD` with momentum.",
            'Leave it out, which means "auto".',
            optimizer=type(optimizer).__name__,
        )
    return has_velocity and choice is not False
