"""Batches to try steps on, before training, without a trace."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.fit_run import run_of
from keras_multigpu.checks import value_error
from keras_multigpu.training.loops import concatenated
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch, batch_size_of, cut


def run_to_try(callback: keras.callbacks.Callback) -> TrainingRun:
    """The run of `fit`, in which steps can be tried; a `ValueError` where none can."""
    return run_of(callback, "elsewhere the model cannot be given back as it was")


def batches_going_round(run: TrainingRun) -> Iterator[Batch]:
    """The batches of `fit`, from the beginning of the data, and again when they end."""
    while True:
        some = False
        for batch in run.first_batches():
            if rows_of(batch):
                some = True
                yield batch
        if not some:
            raise value_error(
                "There is no batch to try a step on.",
                "Expected at least one example.",
                "Check that the dataset is not empty.",
                batches=0,
            )


def rows_of(batch: Batch) -> int:
    return int(batch_size_of(batch) or 0)


def of_size(batch: Batch, size: int) -> Batch:
    """A batch of another size, of the same examples, repeated as often as it takes."""
    copies = -(-size // rows_of(batch))

    def resized(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        return cut(concatenated([leaf] * copies), 0, size)

    # As batches that are read: a device receives its share only, and in the step.
    with tf.device(HOST):
        return keras.tree.map_structure(resized, batch)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Give Python's and NumPy's random numbers back as they were: reading data may draw some."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
