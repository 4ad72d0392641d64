"""A training step on the cores of TPUs, written against TensorFlow's documentation alone.

    host      values ──> push          shares of equal length          logs, metrics
                           │                  │                             ↑
    cores                copies ──> pass ──> sum ──> update ──> copies, sums

Nobody has seen it run on a TPU. The tests run it on CPUs, under a `MirroredStrategy`.
`TPUStrategy.run` differs: it traces the function once for all cores, so that a core's number is a
tensor, and XLA compiles it as a whole, for shapes that are known.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.servers.connection import Elsewhere

logger = logging.getLogger("keras_multigpu")

# Without it TensorFlow would give XLA shapes that may change.
STATIC = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)


class TPUs(Elsewhere):
    """The cores of TPUs, which train on copies of the values; the model stays on the host."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, "TPUs", strategy.num_replicas_in_sync, updated_there=True)

    def on_each(self, values: Sequence[Any]) -> Any:
        """Values of which each core has one."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda core: values[core.replica_id_in_sync_group]
        )

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """What a function returns on the first core, on the host; called in a `tf.function`."""
        found = self.strategy.run(function, tuple(arguments), options=STATIC)
        with tf.device(HOST):
            return tf.nest.map_structure(
                lambda each: tf.identity(self.strategy.experimental_local_results(each)[0]), found
            )

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of tensors over all cores; called by each of them."""
        context = tf.distribute.get_replica_context()
        sent = [tf.cast(each, sent_as(each.dtype)) for each in tensors]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, sent)
        return [tf.cast(each, own.dtype) for each, own in zip(summed, tensors, strict=True)]

    def gather(self, tensor: tf.Tensor, cores: int) -> tf.Tensor:
        """The rows of the first cores, one after another; called by all of them."""
        context = tf.distribute.get_replica_context()
        everyones = context.all_gather(tf.cast(tensor, sent_as(tensor.dtype)), axis=0)
        return tf.cast(everyones[: cores * tensor.shape[0]], tensor.dtype)


def sent_as(dtype: tf.DType) -> tf.DType:
    """The dtype in which TPUs sum: `tpu.cross_replica_sum` takes no 64-bit integers."""
    return tf.int32 if dtype == tf.int64 else dtype
