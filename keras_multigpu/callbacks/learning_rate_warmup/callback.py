"""`LearningRateWarmup`: begin with a small learning rate and raise it step by step."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.learning_rate_warmup.probe import CURVES, WarmupProbe
from keras_multigpu.callbacks.rates.probe import multiply_velocities
from keras_multigpu.callbacks.rates.rates import Rate, corrects_momentum
from keras_multigpu.callbacks.scaling_order import require_order, scaling_of
from keras_multigpu.checks import real_number, require_choice, require_positive_integer, value_error
from keras_multigpu.keras_internals import graph_internals

# As in Goyal et al. 2017.
EPOCHS = 5


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate from a small one to that of the optimizer, step by step.

    Large batches with a large rate diverge in the first steps, when weights change quickly
    (Goyal et al. 2017). The rate may be a number or a schedule; a schedule is multiplied by the
    part of the warm-up. The rate is set inside the training step, so it is exact also with
    `steps_per_execution`; in stock Keras it then changes between calls only.

    With a plain rate others may assign to `optimizer.learning_rate`, and they win: a lower rate
    than the present one is used as it is, and ends the warm-up; a higher one becomes the rate
    that the warm-up leads to. After `fit` the optimizer has the rate that the warm-up leads to,
    and the schedule that it was compiled with.

    A second `fit` with the same object goes on where the first one stopped. A new object warms
    up anew.

    The logs have `learning_rate`: the rate of the epoch's last step.

    Args:
        epochs: How long it lasts, in epochs of the size that they have in the beginning; may be a
            fraction. By default 5.
        steps: How long it lasts in optimizer steps, instead of `epochs`.
        initial_rate: The rate of the first step. By default that of `BatchSizeScaling` before it
            is scaled; without that, one step's part of the way from zero.
        curve: `"linear"`, `"exponential"` (equal ratios) or `"cosine"` (slow at both ends).
        momentum_correction: Whether the velocity of SGD is multiplied as the rate is, because it
            contains the rate. `"auto"` does so for SGD with momentum.

    Example:

    ```python
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(batches, epochs=90, callbacks=[kmg.callbacks.LearningRateWarmup(epochs=5)])
    ```
    """

    def __init__(
        self,
        epochs: float | None = None,
        *,
        steps: int | None = None,
        initial_rate: float | None = None,
        curve: str = "linear",
        momentum_correction: bool | str = "auto",
    ) -> None:
        super().__init__()
        if steps is not None:
            require_positive_integer("steps", steps)
        bad = epochs is not None and not 0 < real_number(epochs) < math.inf
        if bad or (epochs is not None and steps is not None):
            raise value_error(
                "The length of the warm-up is not clear.",
                "Expected a positive number of `epochs`, or a number of `steps`, not both.",
                "Pass for example `epochs=5` or `steps=1000`.",
                epochs=epochs,
                steps=steps,
            )
        require_rate(initial_rate, curve)
        require_choice("curve", curve, CURVES)
        require_choice("momentum_correction", momentum_correction, ["auto", True, False])
        self.epochs, self.steps = epochs, steps
        self.initial_rate, self.curve = initial_rate, curve
        self.momentum_correction = momentum_correction
        self._probe = WarmupProbe(curve)
        self._rate: Rate | None = None
        self._optimizer: Any = None
        self._begun = False
        self._step = 0
        # What was reached in an earlier `fit`, or in the run that is resumed.
        self._known: dict[str, Any] = {}

    @property
    def learning_rates(self) -> np.ndarray:
        """The rate of each step of this `fit`, or of the last one; those of a resumed run only."""
        return self._probe.read()

    @property
    def state(self) -> dict[str, Any]:
        """Where the warm-up stands; `ResumableCheckpoint` saves it."""
        if self._rate is None or not self._begun:
            return {}
        warmup = self._probe.state
        return {"warmup": warmup, "last": self._probe.last, "rate": self._rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Taken up at once: `BatchSizeScaling` may multiply before the next epoch begins. The
        # second time, in the middle of an epoch, nothing has changed.
        if not state or self._rate is None or self._begun:
            return
        self._begun = True
        self._rate.state = state["rate"]
        self._probe.give(**state["warmup"])
        self._probe.go_on(state["last"])

    @property
    def record(self) -> WarmupProbe:
        """What keeps the rates of the steps."""
        return self._probe

    def multiplied(self, factor: float) -> None:
        """Somebody has multiplied rate and velocity, which is not meant to end the warm-up."""
        if self._begun:
            self._probe.multiply(factor)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end()
        self._rate = Rate(self.model).adjust()
        self._probe.corrects = corrects_momentum(self.momentum_correction, self._rate)
        self._probe.rate = self._rate
        if self._rate.optimizer is not self._optimizer:
            self._optimizer, self._known = self._rate.optimizer, {}
        run = getattr(self.model, "training_run", None)
        self.__dict__.pop("on_train_batch_begin", None)
        if run is None:
            self._watch_stock_steps()
            return
        require_order(run.callbacks)
        run.watch(self._probe)
        run.after_each("on_train_batch_end", lambda: self._passed(run.step))
        run.after_end(self._end)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = 0
        assert self._rate is not None
        run = getattr(self.model, "training_run", None)
        if run is not None:
            self._step = run.step
        if self._begun:
            return
        self._begin(self._rate)
        self._begun = True
        self._probe.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self._probe.last

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # With a `training_run` this happens later, and also where `fit` fails.
        if getattr(self.model, "training_run", None) is None:
            self._end()

    def _watch_stock_steps(self) -> None:
        """Let the warm-up run before each call of Keras's own step."""
        optimizer = self._optimizer
        with graph_internals.single_device():
            self._probe.build(self.model.distribute_strategy)
        compiled = tf.function(self._probe.before_step, autograph=False)

        def on_train_batch_begin(batch: int, logs: dict[str, Any] | None = None) -> None:
            # Before its first step the optimizer has no velocity that could be compiled.
            (compiled if optimizer.built else self._probe.before_step)()
            self._probe.passed(1)

        # Not a method, because one that does nothing also costs.
        self.__dict__["on_train_batch_begin"] = on_train_batch_begin

    def _begin(self, rate: Rate) -> None:
        """Set the variables of the probe for a warm-up that begins, or that `fit` interrupted."""
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
            # Who reads the rate before the first step finds the one that it will have.
            rate.lever.assign(first * target)
            self._probe.give(left=rate.lever.numpy())

    def _length(self) -> int:
        if self.steps is not None:
            return self.steps
        run = getattr(self.model, "training_run", None)
        each = self.params.get("steps") if run is None else run.steps_per_epoch
        if each is None:
            raise value_error(
                "The warm-up lasts some epochs, and nobody knows how long an epoch is.",
                "Expected data of a known length, or a number of steps.",
                "Pass `steps` instead of `epochs`.",
                epochs=self.epochs,
            )
        return max(1, round((EPOCHS if self.epochs is None else self.epochs) * each))

    def _first(self, target: float, length: int) -> float:
        if self.initial_rate is None:
            scaling = scaling_of(self.model)
            return 1.0 / (length + 1) if scaling is None else 1.0 / max(scaling.factor, 1.0)
        if not self.initial_rate <= target:
            raise value_error(
                "The warm-up would begin above the rate that it leads to.",
                "Expected an initial rate that is at most that of the optimizer.",
                "Pass a lower `initial_rate`; a schedule that has a warm-up of its own needs "
                "no other.",
                initial_rate=self.initial_rate,
                learning_rate=target,
            )
        return self.initial_rate / target if target else 1.0

    def _passed(self, step: int) -> None:
        self._probe.passed(step - self._step)
        self._step = step

    def _end(self) -> None:
        rate, begun = self._rate, self._begun
        self._rate, self._begun = None, False
        if rate is None or not begun:
            return
        values = self._probe.state
        found = float(rate.lever.numpy())
        # Where it is not what the last step has left, somebody has assigned it.
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
        rate.restore()


def require_rate(rate: Any, curve: str) -> None:
    if rate is None:
        return
    number = real_number(rate)
    if not 0 <= number < math.inf or (number == 0 and curve == "exponential"):
        raise value_error(
            "The warm-up cannot begin with this `initial_rate`.",
            "Expected a number from zero on; above zero for an exponential curve.",
            "Pass for example 0.001, or leave it out.",
            initial_rate=rate,
            curve=curve,
        )
