"""What the feed asks of every source of batches, and what most sources answer."""

from collections.abc import Iterator
from typing import Any
from typing import NamedTuple
from typing import NoReturn

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.training.global_batch import Batch
from keras_multigpu.training.shares import Shares


class Anchor(NamedTuple):
    """Where an epoch of `fit` begins, since the batches have their present size.

    Attributes:
        epoch: The epoch of `fit`.
        data_epoch: The epoch of the data.
        examples: How many examples of it come before.
    """

    epoch: int
    data_epoch: int
    examples: int


class BatchSource:
    """Where batches come from, already cut into shares.

    Attributes:
        num_batches: The number of batches of an epoch; None if unknown.
        spec: The specs that all batches share; None where each has its own.
        endless: Whether one iterator goes on from epoch to epoch.
        is_countable: Whether it is known when an iterator ends, so that a graph may read it.
        may_be_empty: Whether there may be batches without examples.
        marks_missing: Whether weights only say which examples could be read.
        skips_by_reading: Whether the way to a later step leads through all batches before it.
        anchor: Where the data stood when the batch size last changed.
    """

    num_batches: int | None = None
    spec: Batch | None = None
    endless = False
    is_countable = False
    may_be_empty = False
    marks_missing = False
    skips_by_reading = True
    anchor: Anchor | None = None

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None where only the batches can tell."""
        return None

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the data; None if unknown."""
        return None

    def start(self, epoch: int, step: int = 0) -> None:
        """Begin with this step of this epoch of `fit`, where epochs have numbers."""

    def iterator(self) -> Iterator[Shares]:
        """A new iterator."""
        raise NotImplementedError

    def first_batches(self, batch_size: int | None) -> Iterator[Batch]:
        """Global batches from the beginning on, of any size, apart from what `fit` reads."""
        raise NotImplementedError

    def resize(self, batch_size: int, epoch: int) -> None:
        """Take batches of another size from this epoch of `fit` on; `start` has to follow."""
        raise NotImplementedError

    def on_epoch_begin(self) -> None:
        """An epoch begins."""

    def on_epoch_end(self) -> None:
        """An epoch is over, or was left."""

    def example_at(self, epoch: int, step: int, row: int) -> str | None:
        """The name of the example in a row of a batch, where it is known."""
        return None

    def cause(self, error: tf.errors.OpError) -> Exception | None:
        """Why reading failed, if that is what `error` is about."""
        return None


def raise_fixed_size(x: Any, steps: int | None) -> NoReturn:
    """Raise because the batches of this source cannot be cut anew."""
    raise ValueError(
        problem(
            "Batches of another size are wanted from data that come in batches of their own.",
            "Expected `keras_multigpu.data` batches; or arrays or a `tf.data.Dataset`, without "
            "`steps_per_epoch`.",
            "Make the data with one of the `keras_multigpu.data.from_*` functions.",
            data=x if isinstance(x, str) else type(x).__name__,
            steps_per_epoch=steps,
        )
    )
