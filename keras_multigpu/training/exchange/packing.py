"""Packs tensors into buckets, so that a step needs few sums and the first ones start early.

A MobileNet has 156 gradients and 104 moving statistics, most of them tiny; summing them one by one
costs more in dispatch than in bytes. One pack of all of them would have to wait for the last
gradient. So they are packed in the order in which a backward pass yields them, and whenever a
bucket is full the next one begins:

    backward pass     last layer ──────────> ... ──────────> first layer
    buckets           [ losses, statistics, gradients ][ gradients ][ gradients ]
    sums                                               └─ 1 ──┘     └─ 2 ──┘     └─ 3 ──┘

A bucket depends on nothing but its tensors: while it is summed, the backward pass continues. A sum
costs something, so buckets are large; but all wait for the sum that begins last, when the backward
pass is over and nothing is left to hide it, so the last ones are small:

    40 MiB of gradients, from the last layer to the first    [  20  ][ 10 ][ 5 ][2.5][1.3][1.2]
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# As PyTorch's DistributedDataParallel has them for GPUs, where a copy is almost free. No run on
# GPUs has compared sizes yet.
BUCKET = 25 * 2**20
"""The size of a full bucket, in bytes."""

# The bytes that are worth a sum of their own.
SMALLEST = 2**20

# Above this many bytes a tensor travels alone: copying it into a bucket costs more than a sum.
LARGE = 4 * 2**20


def filling(left: float) -> float:
    """How many bytes fill the next bucket, if this many are left."""
    # Two workers at 200 Mbit/s take 466 ms a step with these, 521 ms with buckets of 25 MiB alone.
    return min(BUCKET, max(SMALLEST, left / 2))


def flattened(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def split(pack: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """The parts of a pack, one after another."""
    if pack.dtype.is_integer:
        # GPUs have no kernel that splits int64.
        starts = itertools.accumulate(sizes, initial=0)
        return [tf.slice(pack, [start], [size]) for start, size in zip(starts, sizes, strict=False)]
    return list(tf.split(pack, sizes))


def has_room(tensor: tf.Tensor) -> bool:
    """Whether a few float32 numbers can share a pack with a tensor."""
    elements = tensor.shape.num_elements()
    return tensor.dtype == tf.float32 and elements is not None and 4 * elements < LARGE


class Packing:
    """How a list of tensors is laid out in a shorter list of packs.

    Args:
        tensors: The tensors, in the order in which they are computed.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._static = [tensor.shape for tensor in tensors]
        # Where a tensor is as long as the batch, its size is known only when the step runs.
        is_open = [not shape.is_fully_defined() for shape in self._static]
        self._shapes: list[Any] = [
            tf.shape(tensor) if open_one else tuple(tensor.shape)
            for tensor, open_one in zip(tensors, is_open, strict=True)
        ]
        self._members: list[list[int]] = []
        small: dict[tuple[tf.DType, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not is_open[index] and self._size(index) * tensor.dtype.size >= LARGE:
                self._members.append([index])
            else:
                small.setdefault((tensor.dtype, is_open[index]), []).append(index)
        for (dtype, open_ones), members in small.items():
            self._members += [members] if open_ones else self._buckets(members, dtype)
        # What fills up first is not what is ready first: a large tensor may have come between.
        self._members.sort(key=lambda members: members[-1])

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        flat = [[flattened(tensors[i]) for i in members] for members in self._members]
        return [parts[0] if len(parts) == 1 else tf.concat(parts, axis=0) for parts in flat]

    def unpack(self, packs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        tensors: dict[int, tf.Tensor] = {}
        for members, pack in zip(self._members, packs, strict=True):
            sizes = [self._size(index) for index in members]
            parts = [pack] if len(members) == 1 else split(pack, sizes)
            for index, part in zip(members, parts, strict=True):
                is_flat = self._static[index].rank == 1
                tensors[index] = part if is_flat else tf.reshape(part, self._shapes[index])
                tensors[index].set_shape(self._static[index])
        return [tensors[index] for index in range(len(self._shapes))]

    def _buckets(self, members: Sequence[int], dtype: tf.DType) -> list[list[int]]:
        """The buckets that these tensors of one dtype fill."""
        buckets: list[list[int]] = [[]]
        left = size = sum(map(self._size, members)) * dtype.size
        for index in members:
            buckets[-1].append(index)
            left -= self._size(index) * dtype.size
            if left and size - left >= filling(size):
                buckets.append([])
                size = left
        return buckets

    def _size(self, index: int) -> Any:
        shape = self._shapes[index]
        return math.prod(shape) if isinstance(shape, tuple) else tf.reduce_prod(shape)
