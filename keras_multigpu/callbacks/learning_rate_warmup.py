"""`LearningRateWarmup`: begin with a small learning rate and raise it step by step."""

import math
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.batch_size_scaling import BatchSizeScaling
from keras_multigpu.callbacks.rates import (
    Rate,
    RateCallback,
    RateProbe,
    multiply_velocities,
)
from keras_multigpu.checks import real_number, require_positive_integer, value_error
from keras_multigpu.keras_internals import graph_internals

# As in Goyal et al. 2017.
EPOCHS = 5


class LearningRateWarmup(RateCallback):
    """Raises the learning rate from a small one to that of the optimizer, step by step.

    The rate is set inside the training step, so each step has its own even with
    `steps_per_execution`; in stock Keras it then changes only between calls. After `fit` the
    optimizer has the target rate, or the schedule that it was compiled with.

    A second `fit` with the same object continues the warm-up; a new object starts a new one.

    The logs get `learning_rate`: that of the epoch's last step.

    Args:
        epochs: The length in epochs, as long as the first one; may be a fraction. By default 5.
        steps: The length in optimizer steps, instead of `epochs`.
        initial_rate: The rate of the first step. By default the unscaled rate of
            `BatchSizeScaling`; without that, the first of equal steps from zero.
    """

    after = (BatchSizeScaling,)

    def __init__(
        self,
        epochs: float | None = None,
        *,
        steps: int | None = None,
        initial_rate: float | None = None,
    ) -> None:
        self._probe = WarmupProbe()
        super().__init__(self._probe)
        if steps is not None:
            require_positive_integer("steps", steps)
        bad = epochs is not None and not 0 < real_number(epochs) < math.inf
        if bad or (epochs is not None and steps is not None):
            raise value_error(
                "The length of the warm-up is not defined.",
                "Expected a positive number of `epochs`, or a number of `steps`, not both.",
                epochs=epochs,
                steps=steps,
            )
        if initial_rate is not None and not 0 <= real_number(initial_rate) < math.inf:
            raise value_error(
                "The warm-up cannot begin with this `initial_rate`.",
                "Expected a non-negative number.",
                initial_rate=initial_rate,
            )
        self.epochs, self.steps = epochs, steps
        self.initial_rate = initial_rate
        self._optimizer: Any = None
        # The progress of an earlier `fit` with this optimizer.
        self._known: dict[str, Any] = {}

    @property
    def _progress(self) -> dict[str, Any]:
        return {"warmup": self._probe.state}

    def _resume(self, state: dict[str, Any]) -> None:
        self._probe.give(**state["warmup"])
        self._probe.resume(state["last"])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end()
        super().on_train_begin(logs)
        assert self._rate is not None
        self._probe.rate, self._probe.corrects = self._rate, self._corrects
        if self._rate.optimizer is not self._optimizer:
            self._optimizer, self._known = self._rate.optimizer, {}
        self.__dict__.pop("on_train_batch_begin", None)
        run = self.run_or_none
        if run is None:
            self._watch_stock_steps()
        else:
            run.watch(self._probe)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._rate is not None
        if not self._begun:
            self._begin(self._rate)
            self._begun = True
            self._probe.active.assign(True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # In a distributed model `run.after_end` does this, even if `fit` fails.
        if self.run_or_none is None:
            self._end()

    def _watch_stock_steps(self) -> None:
        """Run the probe before each call of the stock step."""
        optimizer = self._optimizer
        with graph_internals.single_device():
            self._probe.build(self.model.distribute_strategy)
        compiled = tf.function(self._probe.before_step, autograph=False)

        def on_train_batch_begin(batch: int, logs: dict[str, Any] | None = None) -> None:
            # Before the first step, the optimizer has no velocities to compile.
            (compiled if optimizer.built else self._probe.before_step)()

        # Not a method, because Keras would also call it in distributed models, at a cost.
        self.__dict__["on_train_batch_begin"] = on_train_batch_begin

    def _begin(self, rate: Rate) -> None:
        """Set the probe's variables to begin or continue the warm-up."""
        now, target = int(rate.steps().numpy()), float(rate.variable.numpy())
        known = self._known
        # An optimizer whose step counter was reset is warmed up again.
        if not known or known["start"] > now:
            length = self._length()
            first = self._first_fraction(rate.next, length)
            known = {"start": now, "length": length, "over": False, "first": first}
        self._probe.give(**known, target=target, left=target, used=target)
        if not known["over"]:
            fraction = self._probe.fraction(tf.constant(now - known["start"], tf.int64))
            # Code that reads the rate before the first step gets the one that this step will use.
            rate.variable.assign(float(fraction.numpy()) * target)
            self._probe.give(left=rate.variable.numpy())

    def _length(self) -> int:
        if self.steps is not None:
            return self.steps
        run = self.run_or_none
        each = self.params.get("steps") if run is None else run.steps_per_epoch
        if each is None:
            raise value_error(
                "The warm-up is given in epochs, and the length of an epoch is not known.",
                "Expected data of a known length, or a number of steps.",
                "Pass `steps` instead of `epochs`.",
                epochs=self.epochs,
            )
        return max(1, round((EPOCHS if self.epochs is None else self.epochs) * each))

    def _first_fraction(self, target: float, length: int) -> float:
        if self.initial_rate is None:
            run = self.run_or_none
            for callback in [] if run is None else run.callbacks:
                if isinstance(callback, BatchSizeScaling):
                    return 1.0 / max(callback.factor, 1.0)
            return 1.0 / (length + 1)
        if not self.initial_rate <= target:
            raise value_error(
                "The warm-up would begin above its target rate.",
                "Expected an initial rate that is at most that of the optimizer.",
                "Pass a lower `initial_rate`; a schedule that includes a warm-up needs no other.",
                initial_rate=self.initial_rate,
                learning_rate=target,
            )
        return self.initial_rate / target if target else 1.0

    def _end(self) -> None:
        rate, begun = self._rate, self._begun
        self._rate, self._begun = None, False
        if rate is None:
            return
        rate.restore()
        if not begun:
            return
        values = self._probe.state
        found = float(rate.variable.numpy())
        # A rate that differs from what the last step left was assigned by other code.
        lowered = found < values["left"]
        target = values["target"] if found == values["left"] else found
        if not values["over"] and not lowered:
            rate.variable.assign(target)
            if self._probe.corrects:
                back = target / values["used"] if values["used"] else 0.0
                multiply_velocities(rate.velocities(), back)
        self._known = {name: values[name] for name in ("start", "length", "first")}
        self._known["over"] = values["over"] or lowered
        self._probe.active.assign(False)


class WarmupProbe(RateProbe):
    """Sets and records the rate of each step of a warm-up, and corrects SGD's velocity."""

    corrects = False

    def create_variables(self) -> None:
        super().create_variables()
        self._variables = SimpleNamespace(
            over=tf.Variable(True),
            # The number of the first step, and of the steps to the target.
            start=tf.Variable(0, dtype=tf.int64),
            length=tf.Variable(1, dtype=tf.int64),
            # The rate of the first step, as a fraction of the target.
            first=tf.Variable(1.0),
            target=tf.Variable(1.0),
            # The rate that the last step left; other code has assigned any other value.
            left=tf.Variable(1.0),
            # The rate that the velocity contains.
            used=tf.Variable(1.0),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {name: variable.numpy().item() for name, variable in vars(self._variables).items()}

    def give(self, **values: Any) -> None:
        """Assign to some of the variables of `state`."""
        for name, value in values.items():
            getattr(self._variables, name).assign(value)

    def multiply(self, factor: float) -> None:
        # Otherwise the new rate would look like an assignment by other code.
        for variable in (self._variables.target, self._variables.left, self._variables.used):
            variable.assign(variable * tf.constant(factor, tf.float32))

    def fraction(self, step: Any) -> tf.Tensor:
        """The rate of a step as a fraction of the target; one after the end of the warm-up."""
        progress = tf.cast(step, tf.float32) / tf.cast(self._variables.length, tf.float32)
        first = tf.identity(self._variables.first)
        fraction = first + (1.0 - first) * tf.clip_by_value(progress, 0.0, 1.0)
        # Exactly one at the end, whatever the rounding.
        return tf.where(step >= self._variables.length, 1.0, fraction)

    def before_step(self) -> None:
        """Set the rate of this step, unless the warm-up is over, and record it."""
        warms = tf.logical_and(self.active, tf.logical_not(self._variables.over))
        tf.cond(warms, self._warm, lambda: False)
        super().before_step()

    def _warm(self) -> bool:
        copies = self.rate.variable_copies()
        found = tf.identity(copies[0].read_value())
        lower = found < self._variables.left
        target = tf.where(tf.equal(found, self._variables.left), self._variables.target, found)
        step = self.rate.steps() - self._variables.start
        new = tf.where(lower, found, target * self.fraction(step))
        if self.corrects:
            change = tf.where(lower, 1.0, tf.math.divide_no_nan(new, self._variables.used))
            tf.cond(tf.not_equal(change, 1.0), lambda: self._correct(change), lambda: False)
        for copy in copies:
            with tf.device(copy.device):
                copy.assign(new, read_value=False)
        self._variables.target.assign(target)
        self._variables.left.assign(new)
        self._variables.used.assign(new)
        self._variables.over.assign(tf.logical_or(lower, step >= self._variables.length))
        return True

    def _correct(self, change: tf.Tensor) -> bool:
        multiply_velocities(self.rate.velocities(), change)
        return True
