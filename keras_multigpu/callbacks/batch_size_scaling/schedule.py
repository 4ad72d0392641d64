"""Which global batch size each epoch has."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.training.run import TrainingRun

Schedule = dict[int, int] | Callable[[int, dict[str, Any]], int]


class BatchSchedule:
    """The sizes that a user has asked for, checked."""

    def __init__(self, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            require_growing(schedule)
        self._schedule = schedule

    def first(self, run: Any) -> int | None:
        """The size of the epoch that training begins with; None for that of the data."""
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
        """The size of the epoch that comes next; None for the present one."""
        if self._schedule is None:
            return None
        if not callable(self._schedule):
            # Also after the last epoch: with more epochs the run may be resumed there.
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
            "`schedule` does not say which batch size begins with which epoch.",
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
    examples = run.num_examples
    if examples is not None and size > examples:
        raise value_error(
            "A batch would have more examples than the data.",
            "Expected at most the number of examples, because the rate is scaled for full batches.",
            "Let the batch grow less.",
            global_batch_size=size,
            examples=examples,
        )


def known_size(run: TrainingRun) -> int:
    """How large the batches are; a `ValueError` where nobody knows."""
    size = run.global_batch_size
    if size is None:
        raise value_error(
            "The data do not say how many examples a batch has.",
            "Expected `keras_multigpu.data` batches, arrays or a batched `tf.data.Dataset`.",
            "Make the data with one of the `keras_multigpu.data.from_*` functions.",
            data=type(run.data).__name__,
        )
    return size
