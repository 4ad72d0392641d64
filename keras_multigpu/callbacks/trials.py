"""Batches to try steps on, before the first epoch."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.training.loops import concatenated
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch, batch_size_of, cut, is_one_row, length_of


def repeat_batches(run: TrainingRun) -> Iterator[Batch]:
    """The batches of `fit`, from the beginning of the data and without end."""
    while True:
        found = False
        for batch in run.first_batches():
            if batch_size_of(batch):
                found = True
                yield batch
        if not found:
            raise value_error(
                "There is no batch to try a step on.",
                "Expected at least one example.",
                batches=0,
            )


def resize_batch(batch: Batch, size: int) -> Batch:
    """A batch of another size with the same examples, repeated if needed.

    Leaves of other lengths keep their ratio: of 32 labelled and 96 unlabelled rows, 64 and 192.
    """
    before = int(batch_size_of(batch) or 1)

    def repeat_rows(leaf: Any) -> Any:
        # A single row belongs to all examples, unless there is only one.
        if leaf is None or leaf.shape.rank == 0 or (is_one_row(leaf) and before > 1):
            return leaf
        rows = int(length_of(leaf) or 0)
        wanted = -(-rows * size // before)
        return cut(concatenated([leaf] * -(-wanted // max(rows, 1))), 0, wanted)

    # On the host, like batches that were read: each device receives only its part.
    with tf.device(HOST):
        return keras.tree.map_structure(repeat_rows, batch)
