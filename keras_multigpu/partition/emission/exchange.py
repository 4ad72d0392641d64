"""`LocalExchange`: what a replica's graph asks of the others, and in which types it travels."""

from typing import NamedTuple, Protocol

import tensorflow as tf

from keras_multigpu.partition.layouts import Shard

SENT_AS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys([tf.bool, tf.int8, tf.int16, tf.int32, tf.uint8, tf.uint16], tf.int64),
    **dict.fromkeys([tf.uint32, tf.uint64], tf.int64),
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}
"""How the dtypes travel that NCCL does not carry, and int32, which TensorFlow keeps off GPUs.

TensorFlow gives NCCL float16, float32, float64, int32 and int64 (`kValidDataTypes` in its
nccl_manager.cc). The same types travel on all devices, so that CPUs show what GPUs do.
"""


class ShardedAxis(NamedTuple):
    """An axis of a tensor whose rows are those of a variable that replicas divide.

    Args:
        axis: The axis.
        shard: How the variable is divided.
        factor: How many rows of the tensor each row of the variable has.
    """

    axis: int
    shard: Shard
    factor: int = 1

    def bounds(self, place: int, places: int) -> tuple[int, int]:
        """The first row of a replica's part, and the one after its last."""
        first, stop = self.shard.bounds(place, places)
        return first * self.factor, stop * self.factor

    @property
    def length(self) -> int:
        return self.shard.length * self.factor


class LocalExchange(Protocol):
    """What the local graph, which every replica runs, asks of all of them.

    Attributes:
        replicas: How many there are.
        places: How many of them divide variables: those of one process.
        pieces: How many of them are pieces of one replica's share.
        on_cpu: Whether some are CPUs, where more kernels fail without rows.
        has_equal_shares: Whether XLA compiles one graph for all, in which all replicas have the
            same known number of examples.
        compiled: Whether XLA compiles the graph.
    """

    replicas: int
    places: int
    pieces: int
    on_cpu: bool
    has_equal_shares: bool
    compiled: bool

    def sum(self, tensor: tf.Tensor, due: tf.Tensor | None = None) -> tf.Tensor:
        """The sum of a tensor over replicas, on each of them.

        Args:
            due: If the sum may wait, whether it is due; otherwise a replica keeps its own term.
        """

    def gather(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        """The whole of a tensor of which those that divide variables have their rows."""

    def scatter(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        """A replica's rows of the sum of a tensor over replicas."""


def travelling(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor as it travels, which changes no number."""
    dtype = SENT_AS.get(tensor.dtype, tensor.dtype)
    # A complex number is a real and an imaginary one.
    return tf.bitcast(tensor, dtype) if tensor.dtype.is_complex else tf.cast(tensor, dtype)


def arrived(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor that has travelled, in its own dtype."""
    return tf.bitcast(tensor, dtype) if dtype.is_complex else tf.cast(tensor, dtype)
