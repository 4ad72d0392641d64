"""Each replica's share of every batch, on its own device ahead of time."""

from collections.abc import Callable

import tensorflow as tf

from keras_multigpu.data.pipeline import plain_options
from keras_multigpu.data.pipeline import shares_of

Read = Callable[[tuple[int, int]], tf.data.Dataset]
"""A function of `(i, n)` that gives part i of n of each batch."""


def distributed(read: Read, strategy: tf.distribute.Strategy) -> tf.distribute.DistributedDataset:
    """Global batches as a dataset of `strategy`, whose shares are copied to the devices early.

    Args:
        read: Reads a part of each batch.
        strategy: The strategy.
    """
    options = tf.distribute.InputOptions(experimental_fetch_to_device=True)
    return strategy.distribute_datasets_from_function(
        lambda context: shares_of_worker(read, context).with_options(plain_options()), options
    )


def shares_of_worker(read: Read, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The shares of one worker's replicas, batch after batch, in replica order.

    One worker cuts whole batches. Several read their replicas' shares only.

    Args:
        read: Reads a part of each batch.
        context: Which worker this is, and how many replicas there are.
    """
    replicas = context.num_replicas_in_sync
    if context.num_input_pipelines == 1:
        return shares_of(read((0, 1)), replicas)
    own = replicas // context.num_input_pipelines
    first = context.input_pipeline_id * own
    parts = [read((replica, replicas)) for replica in range(first, first + own)]
    turns = tf.data.Dataset.range(own, output_type=tf.int64).repeat()
    return tf.data.Dataset.choose_from_datasets(parts, turns, stop_on_empty_dataset=True)
