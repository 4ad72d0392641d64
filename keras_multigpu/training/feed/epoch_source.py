"""`EpochSource` reads data that offer their batches epoch by epoch, such as `Batches`."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import dataset_internals
from keras_multigpu.training.feed.cutter import Cutter, WaitingShares
from keras_multigpu.training.feed.sources import Anchor, BatchSource
from keras_multigpu.training.shares import Batch, Shares, normalized, with_length


class EpochSource(BatchSource):
    """Batches of a `Reading` of `keras_multigpu.data.Batches`.

    In training one dataset continues from epoch to epoch, so that the next epoch's first batches
    are read while this epoch's last ones are in use. Evaluation always reads the same epoch.

    Args:
        steps: How many batches make an epoch of `fit`; by default, those of an epoch of the data.
        epochs: The epoch before which `fit` ends, if known: nothing after it is read ahead.
    """

    def __init__(
        self,
        cutter: Cutter,
        reading: Any,
        steps: int | None = None,
        class_weight: dict[int, float] | None = None,
        epochs: int | None = None,
    ) -> None:
        self._whole = batches = reading.for_replicas(cutter.replicas)
        if steps is None and batches.is_infinite:
            raise value_error(
                "The data is infinite, and the length of an epoch is unknown.",
                "Expected a number of steps.",
                "Pass `steps_per_epoch` to `fit`, `steps` to `evaluate`.",
                data=batches,
            )
        self._cutter = cutter
        if cutter.here is not None and batches.can_be_cut:
            batches = reading.for_replicas(cutter.replicas, cutter.here)
            self.reads_own_rows = True
        self._use(batches)
        self.endless = reading.training and (self.num_batches is not None or steps is not None)
        self.may_be_empty = batches.may_lose_examples
        self.marks_missing = batches.marks_missing
        self.is_countable = self.num_batches is not None and not self.may_be_empty
        self._training = reading.training
        self._steps = steps
        self._epochs = epochs
        self._class_weight = class_weight
        self._place = (0, 0)
        self.anchor: Anchor = Anchor(0, 0, 0)
        self._made: tuple[Any, WaitingShares] | None = None
        self.start(0)

    def _use(self, batches: Any) -> None:
        self._batches = batches
        self.batch_size: int = batches.global_batch_size
        self.num_examples = batches.num_examples
        self.num_batches = batches.steps_per_epoch

    def start(self, epoch: int, step: int = 0) -> None:
        # Made now, because the model is built from its specs.
        self._place = (epoch, step) if self._training else (0, 0)
        self._shares()

    def resize(self, batch_size: int, epoch: int) -> None:
        if self._steps is not None:
            if self.num_batches is None:
                raise value_error(
                    "The batch size cannot change, because the length of the data is unknown.",
                    "Expected a known number of examples, or `fit` without `steps_per_epoch`.",
                    "Leave out `steps_per_epoch`, or state the number of examples when you make "
                    "the batches.",
                    data=self._batches,
                )
            self.anchor = Anchor(epoch, *self._position(epoch, 0))
        self._use(self._batches.with_(global_batch_size=batch_size))

    def first_batches(self, batch_size: int | None) -> Iterator[Batch]:
        batches = self._whole.with_(global_batch_size=batch_size or self.batch_size)
        first = self._weighted(batches.epochs() if self.endless else batches.epoch(0))
        return map(normalized, first)

    def iterator(self) -> Iterator[Shares]:
        """A new iterator over all epochs if the source is endless, else over the next epoch."""
        iterator = iter(self._shares())
        if self._training and not self.endless:
            self._place = (self._place[0] + 1, 0)
        return iterator

    def _shares(self) -> WaitingShares:
        key = self._place, self.batch_size, self.anchor
        if self._made is None or self._made[0] != key:
            self._made = key, self._cut_ahead() if self.reads_own_rows else self._ahead()
        return self._made[1]

    def _ahead(self) -> WaitingShares:
        made = self._weighted(
            self._endless() if self.endless else self._batches.epoch(*self._position(*self._place))
        )
        self.spec = normalized(made.element_spec)
        return self._cutter.ahead(made)

    def _cut_ahead(self) -> WaitingShares:
        epoch, start = self._position(*self._place)
        stop = self._stop() if self.endless else epoch + 1
        made = self._batches.cut_epochs(epoch, start, stop)
        if self._class_weight is not None:
            weigh = weighing(made.element_spec[0], self._class_weight)
            made = made.map(lambda element, numbers: (weigh(*element), numbers))

        def of_batch(leaf: Any) -> Any:
            size = None if leaf is None or leaf.shape[0] is None else self.batch_size
            return None if leaf is None else with_length(leaf, size)

        self.spec = keras.tree.map_structure(of_batch, normalized(made.element_spec[0]))
        return self._cutter.ahead_of_cut(made, self.spec)

    def _weighted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self._class_weight is None:
            return dataset
        return dataset.map(weighing(dataset.element_spec, self._class_weight))

    def _endless(self) -> tf.data.Dataset:
        """All batches from the current place on."""
        epoch, step = self._place
        if self._steps is not None and self.num_batches is None:
            return self._batches.epochs().skip(epoch * self._steps + step)
        return self._batches.epochs(*self._position(epoch, step), stop=self._stop())

    def _stop(self) -> int | None:
        """The epoch of the data before which `fit` ends; None if unknown."""
        if self._epochs is None:
            return None
        epoch, examples = self._position(max(self._epochs, self._place[0] + 1), 0)
        return epoch + bool(examples)

    def _position(self, epoch: int, step: int) -> tuple[int, int]:
        """Where a step of an epoch of `fit` begins: an epoch of the data, and examples in it."""
        if self._steps is None:
            over = step == self.num_batches
            return (epoch + 1, 0) if over else (epoch, step * self.batch_size)
        first, *position = self.anchor
        return self._batches.position_after(tuple(position), (epoch - first) * self._steps + step)

    def example_at(self, epoch: int, step: int, row: int) -> str | None:
        if self.num_batches is None or self.may_be_empty or not self._training:
            return None
        data_epoch, examples = self._position(epoch, step)
        name: str | None = self._batches.example_at(data_epoch, examples + row)
        return name

    def cause(self, error: tf.errors.OpError) -> Exception | None:
        failure: Exception | None = self._batches.failure_in(error)
        return failure


def refuse_what_batches_bring(x: Any, **separate: Any) -> None:
    """Raise a `ValueError` for arguments that `Batches` already determine."""
    given = {name: type(value) for name, value in separate.items() if value is not None}
    if given:
        raise value_error(
            f"{' and '.join(f'`{n}`' for n in given)} cannot be given with {type(x).__name__}.",
            "Expected batches that bring their own targets, weights and size.",
            "Leave the arguments out; `batches.with_(...)` changes the batch size.",
            **given,
        )


def weighing(spec: Any, class_weight: dict[int, float]) -> Any:
    """A function that gives batches of these specs sample weights by class."""
    if isinstance(spec, tuple) and len(spec) == 3:
        raise value_error(
            "`class_weight` was given for batches that already have sample weights.",
            "Expected one of the two.",
            'Write `batches.with_(balance="class_weight")`, which multiplies them, or leave '
            "out `balance`.",
            class_weight=class_weight,
        )
    return dataset_internals.class_weights_of_batch(class_weight)
