"""`BatchSizeScaling`: a learning rate that fits the global batch, and batches that grow."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.batch_size_scaling.schedule import BatchSchedule, known_size
from keras_multigpu.callbacks.fit_run import run_of
from keras_multigpu.callbacks.rates.probe import RateProbe, multiply_velocities
from keras_multigpu.callbacks.rates.rates import Rate, corrects_momentum
from keras_multigpu.callbacks.scaling_order import WARMUP, among, refuse_scheduler, require_order
from keras_multigpu.checks import require_choice, require_positive_integer

POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""The rate grows with this power of the batch size."""


class BatchSizeScaling(keras.callbacks.Callback):
    """Scales the learning rate with the global batch, and lets the batch grow.

    Compile the model with the rate that is good for batches of `base_batch_size`. For other
    batches it is multiplied by `global_batch_size / base_batch_size` (`"linear"`, for SGD) or
    by the square root of that (`"sqrt"`, for the Adam family). After `fit` the optimizer has the
    unscaled rate again, times what others have changed, such as `ReduceLROnPlateau`.

    With `schedule` the batch grows between epochs, and the rate with it. For batches that grow
    instead of a rate that falls, pass `rule="none"`. Steps per epoch and progress bar follow.

    It needs a model of `kmg.distribute`. `LearningRateWarmup` comes behind it, and then leads
    from the unscaled rate to the scaled one.

    The logs have `global_batch_size`, and `learning_rate`: the rate of the epoch's last step.

    Args:
        base_batch_size: The global batch size that the compiled rate is good for.
        rule: `"linear"`, `"sqrt"` or `"none"`.
        schedule: `{epoch: global_batch_size}` with epochs counted from zero; or a function
            `(epoch, logs)` of the epoch that begins and the logs of the one before, which returns
            the global batch size. By default the batches keep their size.
        max_replica_batch_size: The most examples that a replica takes at once. Above it, it
            takes its share in micro-batches.
        momentum_correction: Whether the velocity of SGD is multiplied as the rate is, because it
            contains the rate. `"auto"` does so for SGD with momentum.

    Attributes:
        factor: What the rate is multiplied by at present.

    Example:

    ```python
    scaling = kmg.callbacks.BatchSizeScaling(256, schedule={30: 2048, 60: 8192})
    warmup = kmg.callbacks.LearningRateWarmup(epochs=5)
    model.fit(batches, epochs=90, callbacks=[scaling, warmup])
    ```
    """

    def __init__(
        self,
        base_batch_size: int,
        *,
        rule: str = "linear",
        schedule: dict[int, int] | Callable[[int, dict[str, Any]], int] | None = None,
        max_replica_batch_size: int | None = None,
        momentum_correction: bool | str = "auto",
    ) -> None:
        super().__init__()
        require_positive_integer("base_batch_size", base_batch_size)
        require_choice("rule", rule, POWERS)
        require_choice("momentum_correction", momentum_correction, ["auto", True, False])
        if max_replica_batch_size is not None:
            require_positive_integer("max_replica_batch_size", max_replica_batch_size)
        self.base_batch_size, self.rule = base_batch_size, rule
        self.max_replica_batch_size = max_replica_batch_size
        self.momentum_correction = momentum_correction
        self.factor = 1.0
        self._schedule = BatchSchedule(schedule)
        self._probe = RateProbe()
        self._record: RateProbe = self._probe
        self._warmup: Any = None
        self._rate: Rate | None = None
        self._corrects = False
        self._begun = False
        self._step = 0
        self._sizes: list[tuple[int, int]] = []

    @property
    def learning_rates(self) -> np.ndarray:
        """The rate of each step of this `fit`, or of the last one."""
        return self._record.read()

    @property
    def batch_sizes(self) -> np.ndarray:
        """The global batch size that was set for each of these steps."""
        sizes = [np.full(steps, size) for size, steps in self._sizes]
        return np.concatenate([np.zeros(0, int), *sizes])[: len(self.learning_rates)]

    @property
    def state(self) -> dict[str, Any]:
        """What the rate is scaled by; `ResumableCheckpoint` saves it."""
        if self._rate is None or not self._begun:
            return {}
        return {"factor": self.factor, "last": self._record.last, "rate": self._rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Taken up at once: a warm-up may multiply before the next epoch begins. The second time,
        # in the middle of an epoch, nothing has changed.
        if not state or self._rate is None or self._begun:
            return
        self._begun, self.factor = True, state["factor"]
        self._rate.state = state["rate"]
        if self._record is self._probe:
            self._probe.go_on(state["last"])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = run_of(self, "elsewhere `fit` tells nobody the batch size")
        present_size = known_size(run)
        require_order(run.callbacks)
        if self.rule != "none":
            refuse_scheduler(run.callbacks)
        self._rate = Rate(self.model).adjust()
        self._corrects = corrects_momentum(self.momentum_correction, self._rate)
        self._sizes, self._probe.rate = [], self._rate
        self._warmup = next(iter(among(run.callbacks, WARMUP)), None)
        self._record = self._probe if self._warmup is None else self._warmup.record
        if self._warmup is None:
            run.watch(self._probe)
        run.after_each("on_train_batch_end", lambda: self._passed(run))
        run.after_end(self._end)
        size = self._schedule.first(run)
        if size is not None or self.max_replica_batch_size is not None:
            run.set_batch_size(size or present_size, self.max_replica_batch_size)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._rate is not None
        run = self.model.training_run
        self._step = run.step
        self._sizes.append((run.global_batch_size, 0))
        self._multiply((run.global_batch_size / self.base_batch_size) ** POWERS[self.rule])
        if not self._begun:
            self._begun = True
            if self._record is self._probe:
                self._probe.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        run = self.model.training_run
        size = run.global_batch_size
        logs["global_batch_size"] = size
        logs["learning_rate"] = self._record.last
        next_size = self._schedule.next(epoch + 1, logs, run)
        if next_size is not None and next_size != size:
            # What `BatchSizeFinder` has found holds, unless this callback was told otherwise.
            largest = self.max_replica_batch_size or run.state["largest_share"]
            run.set_batch_size(next_size, largest)

    def _multiply(self, factor: float) -> None:
        # By what has changed, and not from the compiled rate: what others have made of it stays.
        change, self.factor = factor / self.factor, factor
        if change == 1.0 or self._rate is None:
            return
        self._rate.scale(change)
        if self._corrects:
            multiply_velocities(self._rate.velocities(), change)
        if self._warmup is not None:
            self._warmup.multiplied(change)

    def _passed(self, run: Any) -> None:
        size, steps = self._sizes[-1]
        self._sizes[-1] = size, steps + run.step - self._step
        if self._record is self._probe:
            self._probe.passed(run.step - self._step)
        self._step = run.step

    def _end(self) -> None:
        if self._rate is not None and self._begun:
            self._multiply(1.0)
            self._rate.restore()
            if self._record is self._probe:
                self._probe.active.assign(False)
                self._probe.read()
        self._rate, self._begun, self.factor = None, False, 1.0
