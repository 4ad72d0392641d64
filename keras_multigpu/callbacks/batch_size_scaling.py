"""`BatchSizeScaling`: a learning rate that fits the global batch, and batches that grow."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.rates import (
    RateCallback,
    RateProbe,
    multiply_velocities,
)
from keras_multigpu.checks import require_choice, require_positive_integer, value_error
from keras_multigpu.training.run import TrainingRun

Schedule = dict[int, int] | Callable[[int, dict[str, Any]], int]

POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""The rate grows with this power of the batch size."""


class BatchSizeScaling(RateCallback):
    """Scales the learning rate with the global batch, and lets the batch grow.

    The compiled rate suits batches of `base_batch_size`. For others it is multiplied by
    `global_batch_size / base_batch_size`, or by the square root of that. After `fit` the optimizer
    has the unscaled rate again, with the changes of others, such as `ReduceLROnPlateau`.

    With `schedule` the batch grows between epochs, and with it the rate, the steps per epoch and
    the progress bar.

    The logs get `global_batch_size`, and `learning_rate`: that of the epoch's last step.

    Args:
        base_batch_size: The global batch size that the compiled rate suits.
        rule: `"linear"`, `"sqrt"` or `"none"`.
        schedule: `{epoch: global_batch_size}` with epochs counted from zero, or a function
            `(epoch, logs)` of the epoch that begins and the logs of the previous one, which returns
            the global batch size. By default the batch keeps its size.
        max_replica_batch_size: The most examples that a replica processes at a time. It splits a
            larger part of the batch into micro-batches.
        momentum_correction: Whether SGD's velocity, which contains the rate, is multiplied like it.
            `"auto"` does so for SGD with momentum.

    Attributes:
        factor: What the rate is currently multiplied by.

    Example:

    ```python
    scaling = kmg.callbacks.BatchSizeScaling(256, schedule={30: 2048, 60: 8192})
    warmup = kmg.callbacks.LearningRateWarmup(epochs=5)
    model.fit(batches, epochs=90, callbacks=[scaling, warmup])
    ```
    """

    needs = "run"
    writes = ("global_batch_size", "learning_rate")

    def __init__(
        self,
        base_batch_size: int,
        *,
        rule: str = "linear",
        schedule: dict[int, int] | Callable[[int, dict[str, Any]], int] | None = None,
        max_replica_batch_size: int | None = None,
        momentum_correction: bool | str = "auto",
    ) -> None:
        super().__init__(momentum_correction, RateProbe())
        require_positive_integer("base_batch_size", base_batch_size)
        require_choice("rule", rule, POWERS)
        if max_replica_batch_size is not None:
            require_positive_integer("max_replica_batch_size", max_replica_batch_size)
        self.base_batch_size, self.rule = base_batch_size, rule
        self.max_replica_batch_size = max_replica_batch_size
        self.factor = 1.0
        self._schedule = BatchSchedule(schedule)
        self._probe = self.rate_probe
        self._warmup: RateCallback | None = None
        self._sizes: list[tuple[int, int]] = []

    @property
    def batch_sizes(self) -> np.ndarray:
        """The global batch size of each of these steps."""
        sizes = [np.full(steps, size) for size, steps in self._sizes]
        return np.concatenate([np.zeros(0, int), *sizes])[: len(self.learning_rates)]

    @property
    def state(self) -> dict[str, Any]:
        """What the rate is scaled by."""
        if self._rate is None or not self._begun:
            return {}
        return {"factor": self.factor, "last": self.rate_probe.last, "rate": self._rate.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Applied immediately: a warm-up may multiply before the next epoch begins. The second time,
        # in the middle of an epoch, nothing has changed.
        if not state or self._rate is None or self._begun:
            return
        self._begun, self.factor = True, state["factor"]
        self._rate.state = state["rate"]
        if self._warmup is None:
            self._probe.go_on(state["last"])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = self.run
        present_size = known_size(run)
        if self.rule != "none":
            refuse_scheduler(run.callbacks)
        super().on_train_begin(logs)
        assert self._rate is not None
        self._sizes, self._probe.rate = [], self._rate
        others = [c for c in run.callbacks if isinstance(c, RateCallback) and c is not self]
        self._warmup = others[0] if others else None
        self.rate_probe = self._probe if self._warmup is None else self._warmup.rate_probe
        if self._warmup is None:
            run.watch(self._probe)
        size = self._schedule.first(run)
        if size is not None or self.max_replica_batch_size is not None:
            run.set_batch_size(size or present_size, self.max_replica_batch_size)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        size = known_size(self.run)
        self._sizes.append((size, 0))
        self._multiply((size / self.base_batch_size) ** POWERS[self.rule])
        if not self._begun:
            self._begun = True
            if self._warmup is None:
                self._probe.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        super().on_epoch_end(epoch, logs)
        run = self.run
        size = logs["global_batch_size"] = run.global_batch_size
        next_size = self._schedule.next(epoch + 1, logs, run)
        if next_size is not None and next_size != size:
            # What `BatchSizeFinder` found applies, unless this callback was given another limit.
            largest = self.max_replica_batch_size or run.state["largest_share"]
            run.set_batch_size(next_size, largest)

    def _multiply(self, factor: float) -> None:
        # By the change, not from the compiled rate, so that the changes of others stay.
        change, self.factor = factor / self.factor, factor
        if change == 1.0 or self._rate is None:
            return
        self._rate.scale(change)
        if self._corrects:
            multiply_velocities(self._rate.velocities(), change)
        if self._warmup is not None:
            self._warmup.rate_probe.multiply(change)

    def _passed(self, steps: int) -> None:
        size, before = self._sizes[-1]
        self._sizes[-1] = size, before + steps
        if self._warmup is None:
            super()._passed(steps)

    def _end(self) -> None:
        if self._rate is not None:
            self._multiply(1.0)
            self._rate.restore()
            if self._begun and self._warmup is None:
                self._probe.active.assign(False)
                self._probe.read()
        self._rate, self._begun, self.factor = None, False, 1.0


class BatchSchedule:
    """The sizes that the user asked for, checked."""

    def __init__(self, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            require_growing(schedule)
        self._schedule = schedule

    def first(self, run: Any) -> int | None:
        """The size in the first epoch; None for that of the data."""
        if self._schedule is None:
            return None
        if callable(self._schedule):
            return self._asked(self._schedule, run.epoch, {}, run, grows=False)
        begun = [epoch for epoch in self._schedule if epoch <= run.epoch]
        for size in self._schedule.values():
            require_examples(size, run)
        if begun:
            return self._schedule[max(begun)]
        require_no_less(min(self._schedule.values()), run.global_batch_size)
        return None

    def next(self, epoch: int, logs: dict[str, Any], run: Any) -> int | None:
        """The size in the next epoch; None for the present one."""
        if self._schedule is None:
            return None
        if not callable(self._schedule):
            # Also after the last epoch: the run may be resumed there with more epochs.
            return self._schedule.get(epoch)
        if epoch >= run.epochs:
            return None
        return self._asked(self._schedule, epoch, logs, run, grows=True)

    def _asked(
        self, function: Callable[..., Any], epoch: int, logs: Any, run: Any, grows: bool
    ) -> int:
        size = function(epoch, dict(logs))
        if not is_size(size):
            raise value_error(
                "The function `schedule` did not return a batch size.",
                "Expected a positive integer for each epoch.",
                "Return for example `256 * 2 ** (epoch // 30)`.",
                epoch=epoch,
                returned=size,
            )
        if grows:
            require_no_less(int(size), run.global_batch_size)
        require_examples(int(size), run)
        return int(size)


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    return is_integer(value) and value > 0


def require_growing(schedule: Any) -> None:
    usable = isinstance(schedule, dict) and len(schedule) > 0
    epochs = list(schedule) if usable else []
    good = all(is_integer(epoch) and epoch >= 0 for epoch in epochs)
    if not usable or not good or not all(is_size(size) for size in schedule.values()):
        raise value_error(
            "`schedule` does not map epochs to batch sizes.",
            "Expected `{epoch: global_batch_size}` with epochs from zero on and positive "
            "integers, or a function `(epoch, logs)`.",
            "Pass for example {30: 1024, 60: 4096}.",
            schedule=schedule,
        )
    sizes = [schedule[epoch] for epoch in sorted(epochs)]
    for before, after in zip(sizes, sizes[1:], strict=False):
        require_no_less(after, before)


def require_no_less(size: int, before: int) -> None:
    if size < before:
        raise value_error(
            "The batch would shrink.",
            "Expected sizes that stay or grow: smaller batches need a lower rate and cost "
            "more steps.",
            "Check `schedule`, and the batch size of the data that it begins with.",
            global_batch_size=size,
            before=before,
        )


def require_examples(size: int, run: Any) -> None:
    examples = run.feed.source.num_examples
    if examples is not None and size > examples:
        raise value_error(
            "A batch would have more examples than the data.",
            "Expected at most the number of examples, because the rate is scaled for full batches.",
            "Let the batch grow less.",
            global_batch_size=size,
            examples=examples,
        )


def known_size(run: TrainingRun) -> int:
    """The size of the batches; a `ValueError` if it is not known."""
    size = run.global_batch_size
    if size is None:
        raise value_error(
            "The number of examples in a batch is not known.",
            "Expected `keras_multigpu.data` batches, arrays or a batched `tf.data.Dataset`.",
            "Make the data with one of the `keras_multigpu.data.from_*` functions.",
            data=type(run.data).__name__,
        )
    return size


def refuse_scheduler(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    if any(isinstance(callback, keras.callbacks.LearningRateScheduler) for callback in callbacks):
        raise value_error(
            "`LearningRateScheduler` sets the rate in every epoch, which undoes the scaling.",
            "Expected a rate or a `keras.optimizers.schedules` object, which are scaled.",
            "Pass the schedule to the optimizer, or leave one of the two callbacks out.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )
