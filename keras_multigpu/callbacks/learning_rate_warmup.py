"""`LearningRateWarmup`: begin with a small learning rate and raise it step by step."""

import math
from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.rate_of_run import RateCallback, RateOfRun
from keras_multigpu.checks import real_number, require_positive_integer, value_error

# As in Goyal et al. 2017.
EPOCHS = 5


class LearningRateWarmup(RateCallback):
    """Raises the learning rate from a small one to that of the optimizer, step by step.

    The rate is set inside the training step, so each step has its own even with
    `steps_per_execution`. After `fit` the
    optimizer has the target rate, or the schedule that it was compiled with.

    A second `fit` with the same object continues the warm-up; a new object starts a new one.

    The logs get `learning_rate`: that of the epoch's last step.

    Args:
        epochs: The length in epochs, as long as the first one; may be a fraction. By default 5.
        steps: The length in optimizer steps, instead of `epochs`.
        initial_rate: The rate of the first step. By default the unscaled rate of
            `BatchSizeScaling`; without that, the first of equal steps from zero.
    """

    def __init__(
        self,
        epochs: float | None = None,
        *,
        steps: int | None = None,
        initial_rate: float | None = None,
    ) -> None:
        super().__init__()
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
        return {"warmup": self._rate.warmup if self._rate else {}}

    def _resume(self, state: dict[str, Any]) -> None:
        assert self._rate is not None
        self._rate.set_warmup(**state["warmup"])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end()
        super().on_train_begin(logs)
        assert self._rate is not None
        if self._rate.model_rate.optimizer is not self._optimizer:
            self._optimizer, self._known = self._rate.model_rate.optimizer, {}

    def _begin(self, rate: RateOfRun) -> None:
        """Begin or continue the warm-up."""
        variable = rate.model_rate.variable
        now, target = int(rate.model_rate.steps().numpy()), float(variable.numpy())
        known = self._known
        # An optimizer whose step counter was reset is warmed up again.
        if not known or known["start"] > now:
            length = self._length()
            first = self._first_fraction(rate, length)
            known = {"start": now, "length": length, "over": False, "first": first}
        rate.set_warmup(**known, target=target, left=target, used=target)
        if not known["over"]:
            fraction = rate.fraction(tf.constant(now - known["start"], tf.int64))
            # Code that reads the rate before the first step gets the one that this step will use.
            variable.assign(float(fraction.numpy()) * target)
            rate.set_warmup(left=variable.numpy())

    def _length(self) -> int:
        if self.steps is not None:
            return self.steps
        each = self.run.steps_per_epoch
        if each is None:
            raise value_error(
                "The warm-up is given in epochs, and the length of an epoch is not known.",
                "Expected data of a known length, or a number of steps.",
                "Pass `steps` instead of `epochs`.",
                epochs=self.epochs,
            )
        return max(1, round((EPOCHS if self.epochs is None else self.epochs) * each))

    def _first_fraction(self, rate: RateOfRun, length: int) -> float:
        if self.initial_rate is None:
            return 1.0 / (length + 1 if rate.scale is None else max(rate.scale, 1.0))
        target = rate.model_rate.next
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
        rate.model_rate.restore()
        if not begun:
            return
        values, variable = rate.warmup, rate.model_rate.variable
        found = float(variable.numpy())
        # A rate that differs from what the last step left was assigned by other code.
        lowered = found < values["left"]
        target = values["target"] if found == values["left"] else found
        if not values["over"] and not lowered:
            variable.assign(target)
            rate.model_rate.scale_velocities(target / values["used"] if values["used"] else 0.0)
        self._known = {name: values[name] for name in ("start", "length", "first")}
        self._known["over"] = values["over"] or lowered
        rate.active.assign(False)
