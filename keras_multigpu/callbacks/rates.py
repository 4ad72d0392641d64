"""The learning rate of a model, and callbacks that change it inside the step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.training.replica_group import copies_of, parts_or_copies
from keras_multigpu.training.replication import known_replication
from keras_multigpu.training.variables.adjusted_schedule import AdjustedSchedule, unscaled
from keras_multigpu.training.watching.probe import Probe


class Rate:
    """Reads, scales and sets the learning rate of a compiled model, even one of stock Keras.

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
        known.factor.assign(1.0)
        known.offset.assign(0.0)
        self.optimizer.learning_rate = known
        self._compile_again()
        return self

    def restore(self) -> None:
        """Restore the schedule that the optimizer was compiled with; a plain rate stays."""
        if isinstance(optimizer_internals.compiled_rate(self.optimizer), AdjustedSchedule):
            self.optimizer.learning_rate = self._given
            self._compile_again()

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

    def velocities(self) -> list[tuple[tf.Variable, ...]]:
        """The copies or parts of the velocities of SGD with momentum, which contain the rate."""
        if not self.has_velocity:
            return []
        velocities = getattr(self.optimizer, "momentums", ())
        return [parts_or_copies(variable_storage(v)) for v in velocities if v is not None]

    @property
    def has_velocity(self) -> bool:
        return isinstance(self.optimizer, keras.optimizers.SGD) and bool(self.optimizer.momentum)

    @property
    def _variables(self) -> list[keras.Variable]:
        return [self._given] if self.is_plain else self._adjusted.variables

    @property
    def _adjusted(self) -> AdjustedSchedule:
        return self.optimizer.__dict__["_adjusted_schedule"]

    def _compile_again(self) -> None:
        # A distributed model notices a new schedule; Keras's compiled step does not.
        is_stock = known_replication(self.model) is None
        if is_stock and getattr(self.model, "train_function", None) is not None:
            self.model.make_train_function(force=True)


class RateCallback(RunCallback):
    """Changes the learning rate inside the step, and logs that of an epoch's last step.

    Args:
        probe: Knows that rate, whatever other callbacks assign when the epoch ends.
    """

    writes: Sequence[str] = ("learning_rate",)
    single = True

    def __init__(self, probe: "RateProbe") -> None:
        super().__init__()
        self.rate_probe = probe
        self._rate: Rate | None = None
        self._corrects = self._begun = False

    @property
    def state(self) -> dict[str, Any]:
        """The progress, the last rate and a schedule's factor; empty before the first epoch."""
        if self._rate is None or not self._begun:
            return {}
        return {**self._progress, "last": self.rate_probe.last, "rate": self._rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Applied at once, because another callback may multiply the rate before the next epoch
        # begins. A run that resumes within an epoch sets the state twice.
        if state and self._rate is not None and not self._begun:
            self._begun, self._rate.state = True, state["rate"]
            self._resume(state)

    @property
    def _progress(self) -> dict[str, Any]:
        raise NotImplementedError

    def _resume(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        rate = Rate(self.model)
        # Keras's velocity contains the rate: `v = momentum * v - rate * gradient`. When the rate
        # changes, the old gradients in `v` would keep the old one (Goyal et al. 2017, 3.3).
        self._corrects = rate.has_velocity
        self._rate = rate.adjust()
        run = self.run_or_none
        if run is not None:
            run.after_end(self._end)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.rate_probe.last

    def _end(self) -> None:
        """`fit` is over, however it ended."""
        raise NotImplementedError


class RateProbe(Probe):
    """Records the rate of the last step. A callback sets `rate` before the step is traced."""

    rate: Rate

    def __init__(self) -> None:
        self._strategy: tf.distribute.Strategy | None = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once for each strategy, because compiled steps contain them."""
        if strategy is not self._strategy:
            self._strategy = strategy
            with tf.device(self.rate.variable_copies()[0].device):
                self.create_variables()
        self.active.assign(False)

    def create_variables(self) -> None:
        # False during trials.
        self.active = tf.Variable(False)
        self._last = tf.Variable(0.0)

    def before_step(self) -> None:
        tf.cond(self.active, self._record, lambda: False)

    def _record(self) -> bool:
        self._last.assign(tf.cast(self.rate.in_step(), tf.float32))
        return True

    @property
    def last(self) -> float:
        return float(self._last.numpy())

    def resume(self, last: float) -> None:
        """Begin after a step with this rate, which is logged if no step follows."""
        self.active.assign(True)
        self._last.assign(last)

    def multiply(self, factor: float) -> None:
        """Called when another callback multiplies the rate and the velocity."""


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


def multiply_velocities(velocities: list[tuple[tf.Variable, ...]], change: Any) -> None:
    for parts in velocities:
        for part in parts:
            with tf.device(part.device):
                part.assign(part * tf.cast(change, part.dtype), read_value=False)
