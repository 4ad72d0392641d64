"""`BatchSizeScaling`: a learning rate that fits the global batch, and batches that grow."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.rate_of_run import RateCallback
from keras_multigpu.checks import require_choice, require_positive_integer, value_error
from keras_multigpu.training.run import TrainingRun

POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""The rate is proportional to this power of the batch size."""


class BatchSizeScaling(RateCallback):
    """Scales the learning rate with the global batch, and lets the batch grow.

    The compiled rate suits batches of `base_batch_size`. For others it is multiplied by
    `global_batch_size / base_batch_size`, or by the square root of that. After `fit` the rate is no
    longer scaled, but keeps the changes of other callbacks, such as `ReduceLROnPlateau`.

    With `schedule` the batch grows between epochs, and with it the rate, the steps per epoch and
    the progress bar.

    The logs get `global_batch_size`, and `learning_rate`: that of the epoch's last step.

    Args:
        base_batch_size: The global batch size that the compiled rate suits.
        rule: `"linear"`, `"sqrt"` or `"none"`.
        schedule: `{epoch: global_batch_size}` with epochs counted from zero. By default the batch
            keeps its size.
        max_replica_batch_size: The most examples that a replica processes at a time; it splits a
            larger share into micro-batches.

    Attributes:
        factor: What the rate is currently multiplied by.

    Example:

    ```python
    scaling = kmg.callbacks.BatchSizeScaling(256, schedule={30: 2048, 60: 8192})
    warmup = kmg.callbacks.LearningRateWarmup(epochs=5)
    model.fit(batches, epochs=90, callbacks=[scaling, warmup])
    ```
    """

    writes = ("global_batch_size", "learning_rate")

    def __init__(
        self,
        base_batch_size: int,
        *,
        rule: str = "linear",
        schedule: dict[int, int] | None = None,
        max_replica_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        require_positive_integer("base_batch_size", base_batch_size)
        require_choice("rule", rule, POWERS)
        if max_replica_batch_size is not None:
            require_positive_integer("max_replica_batch_size", max_replica_batch_size)
        self.base_batch_size, self.rule = base_batch_size, rule
        self.max_replica_batch_size = max_replica_batch_size
        self.factor = 1.0
        if schedule is not None:
            require_schedule(schedule)
        self.schedule = schedule or {}

    @property
    def _progress(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def _resume(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = self.run
        present_size = require_known_size(run)
        if self.rule != "none":
            refuse_scheduler(run.callbacks)
        super().on_train_begin(logs)
        size = self._first_size(run)
        if size is not None or self.max_replica_batch_size is not None:
            run.set_batch_size(size or present_size, self.max_replica_batch_size)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        size = require_known_size(self.run)
        self._multiply((size / self.base_batch_size) ** POWERS[self.rule])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        super().on_epoch_end(epoch, logs)
        run = self.run
        size = logs["global_batch_size"] = run.global_batch_size
        # Even after the last epoch: the run may be resumed there with more epochs.
        next_size = self.schedule.get(epoch + 1, size)
        if next_size is not None and next_size != size:
            # Without a limit of its own, this callback keeps the one that `BatchSizeFinder` found.
            largest = self.max_replica_batch_size or run.state["largest_share"]
            run.set_batch_size(next_size, largest)

    def _first_size(self, run: TrainingRun) -> int | None:
        """The size in the first epoch; None for that of the data."""
        for size in self.schedule.values():
            require_examples(size, run)
        begun = [epoch for epoch in self.schedule if epoch <= run.epoch]
        return self.schedule[max(begun)] if begun else None

    def _multiply(self, factor: float) -> None:
        # By the change, not from the compiled rate, so that the changes of others stay.
        change, self.factor = factor / self.factor, factor
        if self._rate is not None:
            self._rate.scale = factor
            if change != 1.0:
                self._rate.multiply(change)

    def _end(self) -> None:
        if self._rate is not None:
            self._multiply(1.0)
            self._rate.model_rate.restore()
            self._rate.active.assign(False)
        self._rate, self._begun, self.factor = None, False, 1.0


def is_integer(value: Any, least: int) -> bool:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and value >= least


def require_schedule(schedule: Any) -> None:
    if not (
        isinstance(schedule, dict)
        and schedule
        and all(is_integer(epoch, 0) for epoch in schedule)
        and all(is_integer(size, 1) for size in schedule.values())
    ):
        raise value_error(
            "`schedule` does not map epochs to batch sizes.",
            "Expected `{epoch: global_batch_size}` with epochs from zero on and positive integers.",
            "Pass for example {30: 1024, 60: 4096}.",
            schedule=schedule,
        )


def require_examples(size: int, run: TrainingRun) -> None:
    examples = run.feed.source.num_examples
    if examples is not None and size > examples:
        raise value_error(
            "A batch would have more examples than the data.",
            "Expected at most the number of examples, because the rate is scaled for full batches.",
            global_batch_size=size,
            examples=examples,
        )


def require_known_size(run: TrainingRun) -> int:
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
            "Expected a rate or a `keras.optimizers.schedules` object to scale.",
            "Pass the schedule to the optimizer, or leave one of the two callbacks out.",
            callbacks=[type(callback).__name__ for callback in callbacks],
        )
