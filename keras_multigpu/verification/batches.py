"""The first global batches of the user's data, on which all participants train."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.shares import Batch, OneGiven


def first_batches(data: Any, steps: int) -> list[Batch]:
    """Read the first batches of the data that `verify` takes; shorter data is repeated."""
    if callable(data):
        data = data()
    if isinstance(data, (tuple, list)):
        require_parts(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(data))
        feed = Feed(Cutter(1), x, y, sample_weight)
    else:
        feed = Feed(Cutter(1), data)
    batches: list[Batch] = []
    # Epoch after epoch, as in `fit`; the data has run out only when an epoch is empty.
    while len(batches) < steps:
        known = len(batches)
        with feed.reading():
            for execution in feed.epoch(1):
                # One replica's share is the whole batch.
                batches += [shares.rows[0].data for shares in execution.batches]
                require_batch(batches[-1])
                if len(batches) == steps:
                    break
        if len(batches) == known:
            raise value_error(
                f"`data` ran out after {known} batches.",
                f"Expected {steps} batches, or data that can be read again.",
                "Pass arrays or a dataset; a generator must yield enough batches.",
                data=data,
                steps=steps,
            )
    return batches


def require_parts(data: Any) -> None:
    """Refuse what also holds the data of a validation, as `load_data()` of Keras returns it."""
    leaves = keras.tree.flatten(data)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    lengths = {shape[0] for shape in shapes if shape} - {None}
    whole = (tf.data.Dataset, keras.utils.PyDataset)
    if len(data) > 3 or len(lengths) > 1 or any(isinstance(leaf, whole) for leaf in leaves):
        raise value_error(
            "`data` is more than the inputs and targets of the same examples.",
            "Expected (x, y) or (x, y, sample_weight), with as many rows in each array.",
            "Leave out the data of the validation; several inputs are one x: ((a, b), y).",
            shapes=shapes[:9],
        )


def require_batch(batch: Batch) -> None:
    shapes = [leaf.shape for leaf in keras.tree.flatten(batch) if leaf is not None]
    if 0 in {shape.rank for shape in shapes} or len({shape[0] for shape in shapes} - {None}) > 1:
        raise value_error(
            "`data` gives single examples.",
            "Expected batches, in which the first dimension counts the examples.",
            "Batch the dataset: `dataset.batch(32)`.",
            shapes=[tuple(shape) for shape in shapes],
        )


def as_dataset(batch: Batch) -> tf.data.Dataset:
    """A dataset of this batch, whose static shape, as in most data, lacks the batch size."""
    # TensorFlow unbatches no None, which only a tuple of one came without.
    alone = isinstance(batch, OneGiven)
    packed = batch[:1] if alone else keras.utils.pack_x_y_sample_weight(*batch)
    return tf.data.Dataset.from_tensors(packed).unbatch().batch(number_of_examples(batch))


def number_of_examples(batch: Batch) -> int:
    for leaf in keras.tree.flatten(batch):
        if leaf is not None and leaf.shape.rank:
            # The first dimension of a ragged tensor is not in its static shape.
            size = leaf.shape[0]
            return int(leaf.bounding_shape()[0] if size is None else size)
    return 0
