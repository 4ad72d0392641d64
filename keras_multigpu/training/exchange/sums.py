"""Sums over replicas, which travel in few packs.

A step calls `sum_over_replicas` while it is traced or runs; `summing` says which function adds up:

    ReplicaGroup.sum     on a replica of a strategy
    a cut                while a step is traced in stages, see `stages`
    list                 where there is nothing to add
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.exchange.packing import Packing, has_room

SumAll = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""Sums each of some tensors over all replicas, when all of them call it."""

# `MirroredStrategy` runs each replica on a thread of its own.
_thread = threading.local()


@contextlib.contextmanager
def summing(function: Any) -> Iterator[None]:
    """Sum with this function in the context."""
    before = current_sum()
    _thread.sum = function
    try:
        yield
    finally:
        _thread.sum = before


def current_sum() -> SumAll | None:
    """The function that sums now; None outside of replicas."""
    return getattr(_thread, "sum", None)


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors over replicas, which pass no gradient on."""
    # TensorFlow walks back from a sum to look for variables, through the graphs of all replicas,
    # which takes minutes where there are many sums. It stops where nothing is differentiated.
    result: list[tf.Tensor] = _thread.sum([tf.stop_gradient(tensor) for tensor in tensors])
    return result


def sum_over_pieces(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over the pieces of one replica's share, while stages are traced."""
    return _thread.sum([tf.identity(tensor)], over_pieces=True)[0]


class SumExchange:
    """What replicas exchange in a step: sums, at which `stages` cut its graph."""

    has_equal_shares = False

    def __init__(self, replicas: int, on_cpu: bool = True, compiled: bool = False) -> None:
        self.replicas, self.on_cpu, self.compiled = replicas, on_cpu, compiled

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor if self.replicas == 1 else sum_over_replicas([tensor])[0]


@contextlib.contextmanager
def riding_along(numbers: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Sum a few float32 numbers in a pack that is sent in this context anyway.

    Their sums are then in the list. It stays empty without numbers, or where no pack has room.
    """
    sums: list[tf.Tensor] = []
    _thread.riders = (numbers, sums) if numbers.shape[0] else None
    try:
        yield sums
    finally:
        _thread.riders = None


def sum_packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors, packed."""
    if len(tensors) < 2:
        return _thread.sum(list(tensors)) if tensors else []
    packing = Packing(tensors)
    return packing.unpack(_thread.sum(packing.pack(tensors)))


def sum_with_riders(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """As `sum_packed`, in one pack with the numbers of `riding_along`, if it has room."""
    riders = getattr(_thread, "riders", None)
    if riders is None or not any(map(has_room, tensors)):
        return sum_packed(tensors)
    numbers, sums = riders
    _thread.riders = None
    of_riders, *summed = sum_packed([numbers, *tensors])
    sums.append(of_riders)
    return summed
