"""The run of `fit` that a callback is part of, if there is one, and batches to try steps on."""

import contextlib
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.training.loops import concatenated
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch, batch_size_of, cut


def run_of(callback: keras.callbacks.Callback, why: str = "", instead: str = "") -> TrainingRun:
    """The run of `fit`; a `ValueError`, with the reason, for a model of stock Keras."""
    run: TrainingRun | None = getattr(callback.model, "training_run", None)
    if run is None:
        raise value_error(
            f"`{type(callback).__name__}` needs a running `fit` of a distributed model.",
            f"Expected a model of `keras_multigpu.distribute`: {why}.",
            "Write `model = kmg.distribute(model)` before `compile`, which also works on one "
            f"device, or {instead or 'leave out the callback'}.",
            model=type(callback.model).__name__,
        )
    return run


def require_before_readers(
    callback: keras.callbacks.Callback,
    callbacks: Sequence[keras.callbacks.Callback],
    logged: Collection[str],
) -> None:
    name = type(callback).__name__
    for other in callbacks[: callbacks.index(callback)]:
        # `EarlyStopping` and its like name what they read; these two write all that is there by
        # then.
        writes_all = isinstance(other, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard))
        if writes_all or getattr(other, "monitor", None) in logged:
            raise value_error(
                f"{type(other).__name__} stands before {name} and would miss "
                f"{' and '.join(f'`{one}`' for one in logged)}.",
                f"Expected {name} before all callbacks that read the logs.",
                "Move it to the front of `callbacks`.",
                callbacks=[type(each).__name__ for each in callbacks],
            )


def run_to_try(callback: keras.callbacks.Callback) -> TrainingRun:
    """The run of `fit`, in which steps can be tried; a `ValueError` where none can."""
    return run_of(callback, "elsewhere the model cannot be given back as it was")


def batches_going_round(run: TrainingRun) -> Iterator[Batch]:
    """The batches of `fit`, from the beginning of the data, and again when they end."""
    while True:
        some = False
        for batch in run.first_batches():
            if batch_size_of(batch):
                some = True
                yield batch
        if not some:
            raise value_error(
                "There is no batch to try a step on.",
                "Expected at least one example.",
                "Check that the dataset is not empty.",
                batches=0,
            )


def of_size(batch: Batch, size: int) -> Batch:
    """A batch of another size, of the same examples, repeated as often as it takes."""
    copies = -(-size // int(batch_size_of(batch) or 1))

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
