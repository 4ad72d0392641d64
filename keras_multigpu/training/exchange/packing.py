"""Packs many small tensors into few, so that a step needs few all-reduces.

A MobileNet has 156 gradients and 104 moving statistics, most of them tiny; reducing them
one by one costs more in dispatch than in bytes. Large tensors travel alone: copying
them into a pack would cost memory and save nothing.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

LARGE = 2**20
"""Tensors of at least so many elements are reduced on their own."""


class Packing:
    """The layout of a list of tensors inside a shorter list of packs.

    Args:
        tensors: The tensors, or anything with their `shape` and `dtype`; the shapes
            are static.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._members: list[list[int]] = []
        packs: dict[tf.DType, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if math.prod(tensor.shape) >= LARGE:
                self._members.append([index])
            else:
                packs.setdefault(tensor.dtype, []).append(index)
        self._members += packs.values()

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Join the tensors into flat packs."""
        flat = [[tf.reshape(tensors[i], [-1]) for i in members] for members in self._members]
        return [parts[0] if len(parts) == 1 else tf.concat(parts, axis=0) for parts in flat]

    def unpack(self, packs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors again, in their first order and shapes."""
        tensors: dict[int, tf.Tensor] = {}
        for members, pack in zip(self._members, packs, strict=True):
            sizes = [math.prod(self._shapes[index]) for index in members]
            parts = [pack] if len(members) == 1 else tf.split(pack, sizes)
            for index, part in zip(members, parts, strict=True):
                tensors[index] = tf.reshape(part, self._shapes[index])
        return [tensors[index] for index in range(len(self._shapes))]

    def one(self, packs: Sequence[tf.Tensor], index: int) -> tf.Tensor:
        """One of the tensors, without taking the others out."""
        place = next(n for n, members in enumerate(self._members) if index in members)
        sizes = [math.prod(self._shapes[i]) for i in self._members[place] if i <= index]
        flat = tf.reshape(packs[place], [-1])
        return tf.reshape(flat[sum(sizes[:-1]) : sum(sizes)], self._shapes[index])

    def beginnings(self, packs: Sequence[tf.Tensor], count: int) -> list[tf.Tensor]:
        """The part of each pack that holds the first `count` tensors."""
        parts = []
        for members, pack in zip(self._members, packs, strict=True):
            sizes = [math.prod(self._shapes[index]) for index in members if index < count]
            if len(sizes) == len(members):
                parts.append(pack)
            elif sizes:
                # The members of a pack are in the tensors' order.
                parts.append(tf.reshape(pack, [-1])[: sum(sizes)])
        return parts
