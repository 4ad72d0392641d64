"""Turns whatever Keras's `fit` accepts into shares of batches, each batch exactly once."""

import collections
import collections.abc
import contextlib
import itertools
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error, warn
from keras_multigpu.identities import identify_dataset, identity_of
from keras_multigpu.keras_internals import dataset_internals
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.epoch_source import EpochSource, refuse_what_batches_bring
from keras_multigpu.training.feed.sources import (
    Anchor,
    BatchSource,
    DatasetSource,
    PythonSource,
    knows_epochs,
    whole,
)
from keras_multigpu.training.fit_arguments import is_empty, require_tensors
from keras_multigpu.training.shares import Batch, Shares

RAN_OUT = (
    "Your input ran out of data; interrupting training. Make sure that your dataset or "
    "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use "
    "the `.repeat()` function when building your dataset."
)


class Execution(NamedTuple):
    """Batches that run between two callbacks: `size` of them, from number `first` of the epoch."""

    first: int
    size: int
    batches: Iterable[Shares]


class Feed:
    """The shares of global batches, epoch after epoch.

    Args:
        x: Inputs in any form that `keras.Model.fit` takes, or a `DistributedDataset`, or
            `keras_multigpu.data.Batches`.
        steps: How many batches make an epoch; the next epoch continues where one stopped.
        use: "training", where epochs may differ; "evaluation"; or "prediction", where each example
            needs a row.
        order_seed: Decides the order in which arrays are shuffled; None for any order.
        epochs: The epoch before which training ends, if known.

    Attributes:
        waited: How many seconds were spent waiting for batches.
        done: How many batches of the epoch were read, including those without examples.
        has_come: Whether any batch with examples was read, in any epoch.
    """

    def __init__(
        self,
        cutter: Cutter,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: Any = False,
        class_weight: dict[int, float] | None = None,
        use: str = "evaluation",
        order_seed: int | None = None,
        epochs: int | None = None,
    ) -> None:
        most = keras.config.max_steps_per_epoch()
        if most and (steps is None or most < steps):  # As in Keras.
            warn(f"Limiting steps_per_epoch to {most}", stacklevel=3)
            steps = most
        if steps is None and is_generator(x) and hasattr(x, "__len__"):
            steps = len(x)
        self._steps = steps
        require_tensors(x, y, sample_weight)
        if steps and is_empty(x):
            raise value_error(
                "`x` has no examples.",
                "Expected at least one.",
                "Look at how it was cut off the data.",
                x=x,
            )
        self._brought = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        given = {"batch_size": batch_size, "steps_per_epoch": steps, "shuffle": shuffle}
        arguments = {"x": x, **self._brought, **given}
        self.source = source_of(cutter, use, order_seed, epochs, **arguments)
        self.data = x
        self._shuffle = shuffle
        self.waited = 0.0
        self._iterator: Any = None
        self._drawn = 0
        self.done = 0
        self.has_come = False
        self._begin = 0
        self._counted: int | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of batches of an epoch; None while it is not known."""
        return self._steps or self.source.num_batches or self._counted

    def rewind(self, epoch: int = 0) -> None:
        """Start at this epoch, as Keras does before training and evaluation.

        A generator continues where it stopped.
        """
        self._iterator = None
        self.source.start(epoch)

    def identity(self) -> dict[str, Any]:
        """What determines the examples and their order, as far as it is known."""
        if knows_epochs(self.data):
            known = self.data.reading().identity()
        elif isinstance(self.data, tf.data.Dataset):
            known = identify_dataset(self.data)
        else:
            known = {"x": identity_of(self.data), "shuffle": self._shuffle}
        return {**known, **identity_of(self._brought)}

    def resize(self, batch_size: int, epoch: int) -> None:
        """Change the batch size from this epoch on; call `rewind` or `go_to` afterwards."""
        self.source.resize(batch_size, epoch)
        self._counted = None

    def go_to(self, epoch: int, step: int, anchor: Sequence[int] | None = None) -> Batch | None:
        """Go to a step of an epoch, with the `anchor` that the source had there.

        Returns:
            The specs of the last batch that had to be read on the way, if there was any.
        """
        self._iterator, self._begin = None, step
        is_known = self.source.anchor is not None
        if is_known:
            self.source.anchor = Anchor(*(anchor or (0, 0, 0)))
        self.source.start(epoch, step)
        if is_known:
            return None
        caches = isinstance(self.data, tf.data.Dataset) and dataset_internals.caches(self.data)
        for earlier in range(epoch if self._steps is None else 0):
            # A dataset's order depends on how many iterators were made of it before.
            self.source.on_epoch_begin()
            batches = self.source.iterator()
            next(batches, None)
            if not earlier and caches:
                # A cache keeps the order of the first complete pass.
                collections.deque(batches, maxlen=0)
            self.source.skip_order()
            self.source.on_epoch_end()
        last: Shares | None = None
        for _ in range(step if self._steps is None else epoch * self._steps + step):
            if self._iterator is None or self._left() == 0:
                self._restart()
            last = next(self._iterator, last)
            self._drawn += 1
        return None if last is None else last.spec

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Name the true cause if reading fails, and stop reading ahead at the end."""
        try:
            yield
        except tf.errors.OpError as error:
            cause = self.source.cause(error)
            if cause is None:
                raise
            # The frames hold the iterator. Deleting it waits for pending reads, whose threads may
            # be gone if that happens at Python's exit.
            traceback.clear_frames(error.__traceback__)
            raise cause from error
        finally:
            self._iterator = None

    def epoch(self, steps_per_execution: int) -> Iterator[Execution]:
        """Yield an epoch's batches, as many at a time as a full execution has."""
        self.source.on_epoch_begin()
        first, self._begin = self._begin, 0
        restarts = self._steps is None and not self.source.endless and not first
        if self._iterator is None or restarts:
            self._restart()
        total = self._steps or self.source.num_batches
        while total is None or first < total:
            # A resumed epoch first completes the execution in which it was interrupted.
            size = steps_per_execution - first % steps_per_execution
            size = size if total is None else min(size, total - first)
            drawn, batches = self._draw(size)
            self.done = first + drawn
            count = drawn
            if self.source.may_be_empty:
                batches = [shares for shares in batches if any(shares.counts)]
                count = len(batches)
            if count:
                self.has_come = True
                yield Execution(first, count, batches)
            first += drawn
            if drawn < size:
                self._iterator = None
                break
        # Without a number of steps an epoch may be of any length, but not empty after a full one.
        if first < (self._steps or int(self.has_come)):
            warn(RAN_OUT, stacklevel=3)
        self._counted = first or self._counted
        if self._left() == 0:
            self._iterator = None
        if self._steps is None:
            self.source.skip_order()
        self.source.on_epoch_end()

    def _restart(self) -> None:
        self._iterator = self.source.iterator()
        self._drawn = 0

    def _left(self) -> int | None:
        """How many batches the iterator still has, if known."""
        if self.source.num_batches is None or self.source.endless:
            return None
        return max(self.source.num_batches - self._drawn, 0)

    def _draw(self, size: int) -> tuple[int, Iterable[Shares]]:
        """So many batches of the epoch, or those that are left, and how many they are."""
        left = self._left()
        size = size if left is None else min(size, left)
        batches: Iterable[Shares] = self._timed(itertools.islice(self._iterator, size))
        if not self.source.is_countable:
            batches = list(batches)
            size = len(batches)
        # Otherwise each is read when its step comes, while those after it are made.
        self._drawn += size
        return size, batches

    def _timed(self, batches: Iterator[Shares]) -> Iterator[Shares]:
        while True:
            asked = time.perf_counter()
            shares = next(batches, None)
            self.waited += time.perf_counter() - asked
            if shares is None:
                return
            yield shares


def source_of(
    cutter: Cutter, use: str, order_seed: int | None, epochs: int | None, **arguments: Any
) -> BatchSource:
    """The reader for the arguments of `Feed`, under their names in Keras."""
    x, y, sample_weight = (arguments[name] for name in ("x", "y", "sample_weight"))
    steps, class_weight = arguments["steps_per_epoch"], arguments["class_weight"]
    if x is None:
        raise value_error(
            "There is no data.",
            "Expected `x`: arrays, a dataset, a `PyDataset` or a generator.",
            "Pass the inputs as the first argument.",
            x=x,
        )
    if knows_epochs(x):
        size = arguments["batch_size"]
        refuse_what_batches_bring(x, y=y, sample_weight=sample_weight, batch_size=size)
        return EpochSource(cutter, x.reading(use), steps, class_weight, epochs)
    if isinstance(x, tf.distribute.DistributedDataset):
        return PythonSource(cutter, lambda: map(whole, x), class_weight)
    if is_generator(x):
        if y is not None or sample_weight is not None:
            raise value_error(
                "`y` or `sample_weight` was given with a generator.",
                "Expected the generator to yield `(x, y)` or `(x, y, sample_weight)`.",
                "Leave out `y` and `sample_weight`.",
                x=x,
                y=y,
                sample_weight=sample_weight,
            )
        return PythonSource(cutter, lambda: x, class_weight)
    if isinstance(x, tf.data.Dataset):
        # The default of `fit` is True, but Keras warns that it cannot shuffle a dataset.
        arguments["shuffle"] = False
    return DatasetSource(cutter, order_seed, **arguments)


def is_generator(x: Any) -> bool:
    """Whether `x` is an iterator that can be read only once."""
    # A flow of Keras's `ImageDataGenerator` is an endless iterator, but also a `PyDataset`.
    return isinstance(x, collections.abc.Iterator) and not isinstance(
        x, (tf.data.Iterator, keras.utils.PyDataset)
    )
