"""The learning rate of a `fit`, which warm-up and scaling change together."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.callbacks.rates import Rate, innermost
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.training.watching.probe import Probe


class RateOfRun(Probe):
    """The rate of each step: records that of the last one, and raises it during a warm-up.

    An optimizer has one, in the graphs that are compiled for it; `of` begins a `fit` with it.

    Attributes:
        scale: What `BatchSizeScaling` has multiplied the rate by; None without it.
    """

    def __init__(self) -> None:
        self._strategy: tf.distribute.Strategy | None = None
        self.scale: float | None = None
        self.model_rate: Rate

    @classmethod
    def of(cls, model: keras.Model) -> "RateOfRun":
        known: RateOfRun = vars(innermost(model)).setdefault("_rate_of_run", cls())
        known.model_rate = Rate(model).adjust()
        return known

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once for each strategy, because compiled steps contain them."""
        if strategy is not self._strategy:
            self._strategy = strategy
            with tf.device(self.model_rate.variable_copies()[0].device):
                self._create_variables()
        self.active.assign(False)
        self._warmup.over.assign(True)

    def _create_variables(self) -> None:
        # False during trials.
        self.active = tf.Variable(False)
        self._last = tf.Variable(0.0)
        self._warmup = SimpleNamespace(
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
    def last(self) -> float:
        return float(self._last.numpy())

    def resume(self, last: float) -> None:
        """Begin after a step with this rate, which is logged if no step follows."""
        self.active.assign(True)
        self._last.assign(last)

    @property
    def warmup(self) -> dict[str, Any]:
        return {name: variable.numpy().item() for name, variable in vars(self._warmup).items()}

    def set_warmup(self, **values: Any) -> None:
        """Assign to some of the variables of `warmup`."""
        for name, value in values.items():
            getattr(self._warmup, name).assign(value)

    def multiply(self, factor: float) -> None:
        """Multiply the rate of all steps to come, the velocity, and the target of a warm-up."""
        self.model_rate.scale(factor)
        self.model_rate.scale_velocities(factor)
        # Otherwise the new rate would look like an assignment by other code.
        for variable in (self._warmup.target, self._warmup.left, self._warmup.used):
            variable.assign(variable * tf.constant(factor, tf.float32))

    def fraction(self, step: Any) -> tf.Tensor:
        """The rate of a step as a fraction of the target; one after the end of the warm-up."""
        progress = tf.cast(step, tf.float32) / tf.cast(self._warmup.length, tf.float32)
        first = tf.identity(self._warmup.first)
        fraction = first + (1.0 - first) * tf.clip_by_value(progress, 0.0, 1.0)
        # Exactly one at the end, whatever the rounding.
        return tf.where(step >= self._warmup.length, 1.0, fraction)

    def before_step(self) -> None:
        """Set the rate of this step, unless the warm-up is over, and record it."""
        warms = tf.logical_and(self.active, tf.logical_not(self._warmup.over))
        tf.cond(warms, self._warm, lambda: False)
        tf.cond(self.active, self._record, lambda: False)

    def _record(self) -> bool:
        self._last.assign(tf.cast(self.model_rate.in_step(), tf.float32))
        return True

    def _warm(self) -> bool:
        copies = self.model_rate.variable_copies()
        found = tf.identity(copies[0].read_value())
        lower = found < self._warmup.left
        target = tf.where(tf.equal(found, self._warmup.left), self._warmup.target, found)
        step = self.model_rate.steps() - self._warmup.start
        new = tf.where(lower, found, target * self.fraction(step))
        if self.model_rate.has_velocity:
            change = tf.where(lower, 1.0, tf.math.divide_no_nan(new, self._warmup.used))
            tf.cond(tf.not_equal(change, 1.0), lambda: self._correct(change), lambda: False)
        for copy in copies:
            with tf.device(copy.device):
                copy.assign(new, read_value=False)
        self.set_warmup(
            target=target,
            left=new,
            used=new,
            over=tf.logical_or(lower, step >= self._warmup.length),
        )
        return True

    def _correct(self, change: tf.Tensor) -> bool:
        self.model_rate.scale_velocities(change)
        return True


class RateCallback(RunCallback):
    """Changes the learning rate inside the step, and logs that of an epoch's last step."""

    writes: Sequence[str] = ("learning_rate",)
    single = True

    def __init__(self) -> None:
        super().__init__()
        self._rate: RateOfRun | None = None
        self._begun = False

    @property
    def state(self) -> dict[str, Any]:
        """The progress, the last rate and a schedule's factor; empty before the first epoch."""
        if self._rate is None or not self._begun:
            return {}
        return {**self._progress, "last": self._rate.last, "rate": self._rate.model_rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Applied at once, because another callback may multiply the rate before the next epoch
        # begins. A run that resumes within an epoch sets the state twice.
        if state and self._rate is not None and not self._begun:
            self._begun, self._rate.model_rate.state = True, state["rate"]
            self._resume(state)
            self._rate.resume(state["last"])

    @property
    def _progress(self) -> dict[str, Any]:
        raise NotImplementedError

    def _resume(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._rate = RateOfRun.of(self.model)
        run = self.run
        # All change the same rate, which is watched once.
        if self is next(each for each in run.callbacks if isinstance(each, RateCallback)):
            self._rate.scale = None
            run.watch(self._rate)
        run.after_end(self._end)

    def _epoch_begun(self) -> None:
        super()._epoch_begun()
        assert self._rate is not None
        if not self._begun:
            self._begin(self._rate)
            self._begun = True
            self._rate.active.assign(True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Recorded in the step, whatever other callbacks assign when the epoch ends.
        if logs is not None and self._rate is not None:
            logs["learning_rate"] = self._rate.last

    def _begin(self, rate: RateOfRun) -> None:
        """The first epoch begins, and all callbacks have set its rate."""

    def _end(self) -> None:
        """`fit` is over, however it ended."""
        raise NotImplementedError
