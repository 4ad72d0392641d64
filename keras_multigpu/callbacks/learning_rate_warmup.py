"""`LearningRateWarmup`: begin with a small learning rate and raise it step by step."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.batch_size_scaling import BatchSizeScaling
from keras_multigpu.callbacks.rates import (
    Rate,
    RateCallback,
    RateProbe,
    multiply_velocities,
    nothing,
)
from keras_multigpu.checks import real_number, require_choice, require_positive_integer, value_error
from keras_multigpu.keras_internals import graph_internals

# As in Goyal et al. 2017.
EPOCHS = 5


CURVES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "linear": lambda first, progress: first + (1.0 - first) * progress,
    "exponential": lambda first, progress: tf.pow(first, 1.0 - progress),
    # Half a wave: slow at both ends.
    "cosine": lambda first, progress: (
        first + (1.0 - first) * (1.0 - tf.cos(math.pi * progress)) / 2.0
    ),
}
"""The rate as a fraction of the target, from the first fraction and the progress, 0 to 1."""


class LearningRateWarmup(RateCallback):
    """Raises the learning rate from a small one to that of the optimizer, step by step.

    The rate is set inside the training step, so it is exact even with `steps_per_execution`; in
    stock Keras it then changes only between calls. After `fit` the optimizer has the target rate,
    or the schedule that it was compiled with.

    A second `fit` with the same object continues where the first one stopped. A new object starts
    a new warm-up.

    The logs get `learning_rate`: that of the epoch's last step.

    Args:
        epochs: How long it lasts, in epochs of their initial size; may be a fraction. By default 5.
        steps: How long it lasts in optimizer steps, instead of `epochs`.
        initial_rate: The rate of the first step. By default the unscaled rate of
            `BatchSizeScaling`; without that, the first of equal steps from zero.
        curve: `"linear"`, `"exponential"` (equal ratios) or `"cosine"` (slow at both ends).
        momentum_correction: Whether SGD's velocity, which contains the rate, is multiplied like it.
            `"auto"` does so for SGD with momentum.
    """

    after = (BatchSizeScaling,)

    def __init__(
        self,
        epochs: float | None = None,
        *,
        steps: int | None = None,
        initial_rate: float | None = None,
        curve: str = "linear",
        momentum_correction: bool | str = "auto",
    ) -> None:
        require_choice("curve", curve, CURVES)
        self._probe = WarmupProbe(curve)
        super().__init__(momentum_correction, self._probe)
        if steps is not None:
            require_positive_integer("steps", steps)
        bad = epochs is not None and not 0 < real_number(epochs) < math.inf
        if bad or (epochs is not None and steps is not None):
            raise value_error(
                "The length of the warm-up is not defined.",
                "Expected a positive number of `epochs`, or a number of `steps`, not both.",
                "Pass for example `epochs=5` or `steps=1000`.",
                epochs=epochs,
                steps=steps,
            )
        require_rate(initial_rate, curve)
        self.epochs, self.steps = epochs, steps
        self.initial_rate, self.curve = initial_rate, curve
        self._optimizer: Any = None
        # What was reached in an earlier `fit`, or in the run that is resumed.
        self._known: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        """How far the warm-up is."""
        if self._rate is None or not self._begun:
            return {}
        warmup = self._probe.state
        return {"warmup": warmup, "last": self._probe.last, "rate": self._rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Applied immediately: `BatchSizeScaling` may multiply before the next epoch begins. The
        # second time, in the middle of an epoch, nothing has changed.
        if not state or self._rate is None or self._begun:
            return
        self._begun = True
        self._rate.state = state["rate"]
        self._probe.give(**state["warmup"])
        self._probe.go_on(state["last"])

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
            return
        run.watch(self._probe)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        assert self._rate is not None
        if not self._begun:
            self._begin(self._rate)
            self._begun = True
            self._probe.begin()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # With a run this happens later, and also if `fit` fails.
        if self.run_or_none is None:
            self._end()

    def _watch_stock_steps(self) -> None:
        """Let the warm-up run before each call of the stock step."""
        optimizer = self._optimizer
        with graph_internals.single_device():
            self._probe.build(self.model.distribute_strategy)
        compiled = tf.function(self._probe.before_step, autograph=False)

        def on_train_batch_begin(batch: int, logs: dict[str, Any] | None = None) -> None:
            # Before its first step the optimizer has no velocity to compile.
            (compiled if optimizer.built else self._probe.before_step)()
            self._probe.passed(1)

        # Not a method, because even one that does nothing has a cost.
        self.__dict__["on_train_batch_begin"] = on_train_batch_begin

    def _begin(self, rate: Rate) -> None:
        """Set the variables of the probe for a warm-up that begins, or that is continued."""
        now, target = int(rate.steps().numpy()), float(rate.lever.numpy())
        known = self._known
        # An optimizer that counts from zero again is warmed up again.
        if not known or known["start"] > now:
            length = self._length()
            known = {"start": now, "length": length, "over": False}
            known["first"] = self._first(rate.next, length)
        self._probe.give(**known, target=target, left=target, used=target)
        if not known["over"]:
            first = float(self._probe.part(tf.constant(now - known["start"], tf.int64)).numpy())
            # Code that reads the rate before the first step gets the one that this step will use.
            rate.lever.assign(first * target)
            self._probe.give(left=rate.lever.numpy())

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

    def _first(self, target: float, length: int) -> float:
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
        found = float(rate.lever.numpy())
        # If it is not what the last step left, it was assigned.
        lowered = found < values["left"]
        target = values["target"] if found == values["left"] else found
        if not values["over"] and not lowered:
            rate.lever.assign(target)
            if self._probe.corrects:
                back = target / values["used"] if values["used"] else 0.0
                multiply_velocities(rate.velocities(), back)
        self._known = {name: values[name] for name in ("start", "length", "first")}
        self._known["over"] = values["over"] or lowered
        self._probe.active.assign(False)
        self._probe.read()


def require_rate(rate: Any, curve: str) -> None:
    if rate is None:
        return
    number = real_number(rate)
    if not 0 <= number < math.inf or (number == 0 and curve == "exponential"):
        raise value_error(
            "The warm-up cannot begin with this `initial_rate`.",
            "Expected a non-negative number; a positive one for an exponential curve.",
            "Pass for example 0.001, or leave it out.",
            initial_rate=rate,
            curve=curve,
        )


class WarmupProbe(RateProbe):
    """Sets and keeps the rate of each step of a warm-up; SGD's velocity may follow."""

    corrects = False

    def __init__(self, curve: str) -> None:
        super().__init__()
        self._curve = CURVES[curve]

    def make(self) -> None:
        """Make the variables."""
        super().make()
        self._at = SimpleNamespace(
            over=tf.Variable(True),
            # The number of the first step, and of the steps to the target.
            start=tf.Variable(0, dtype=tf.int64),
            length=tf.Variable(1, dtype=tf.int64),
            # The rate of the first step, as a fraction of the target.
            first=tf.Variable(1.0),
            target=tf.Variable(1.0),
            # What the last step left in the lever: another value there was assigned.
            left=tf.Variable(1.0),
            # What the velocity was last multiplied by.
            used=tf.Variable(1.0),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {name: variable.numpy().item() for name, variable in vars(self._at).items()}

    def give(self, **values: Any) -> None:
        """Assign to some of the variables of `state`."""
        for name, value in values.items():
            getattr(self._at, name).assign(value)

    def multiply(self, factor: float) -> None:
        # Not an assignment that ends the warm-up.
        for variable in (self._at.target, self._at.left, self._at.used):
            variable.assign(variable * tf.constant(factor, tf.float32))

    def part(self, step: Any) -> tf.Tensor:
        """The rate of a step as a fraction of the target; one after the end of the warm-up."""
        progress = tf.cast(step, tf.float32) / tf.cast(self._at.length, tf.float32)
        part = self._curve(tf.identity(self._at.first), tf.clip_by_value(progress, 0.0, 1.0))
        # Exactly one at the end, however the curve is rounded.
        return tf.where(step >= self._at.length, 1.0, part)

    def before_step(self) -> None:
        """Set the rate of this step, unless the warm-up is over, and keep it."""
        warms = tf.logical_and(self.active, tf.logical_not(self._at.over))
        tf.cond(warms, self._warm, nothing)
        super().before_step()

    def _warm(self) -> bool:
        copies = self.rate.lever_copies()
        found = tf.identity(copies[0].read_value())
        lower = found < self._at.left
        target = tf.where(tf.equal(found, self._at.left), self._at.target, found)
        step = self.rate.steps() - self._at.start
        new = tf.where(lower, found, target * self.part(step))
        if self.corrects:
            change = tf.where(lower, 1.0, tf.math.divide_no_nan(new, self._at.used))
            self._correct(change)
        for copy in copies:
            with tf.device(copy.device):
                copy.assign(new, read_value=False)
        self._at.target.assign(target)
        self._at.left.assign(new)
        self._at.used.assign(new)
        self._at.over.assign(tf.logical_or(lower, step >= self._at.length))
        return True

    def _correct(self, change: tf.Tensor) -> None:
        velocities = self.rate.velocities()

        def correct() -> bool:
            multiply_velocities(velocities, change)
            return True

        tf.cond(tf.not_equal(change, 1.0), correct, nothing)
