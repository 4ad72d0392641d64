"""Splits the arguments of a call into a batch, whose rows replicas share, and constants."""

import collections
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.training.shares import is_one_row


class CallArguments:
    """The arguments of a call.

    A tensor's rows are shared if its first axis is as long as that of most tensors; other tensors
    go to all replicas whole. Everything else is a constant, as in `tf.function`.

    Attributes:
        leaves: The tensors; whole ones get an extra first axis of length 1.
        key: Equal for two calls if their steps differ only in shapes.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        flat = [as_tensor(leaf) for leaf in tf.nest.flatten((args, kwargs))]
        size = most_common_length([leaf for leaf in flat if tf.is_tensor(leaf)])
        # None for a constant.
        self._whole = [is_whole(leaf, size) if tf.is_tensor(leaf) else None for leaf in flat]
        self._constants = [None if tf.is_tensor(leaf) else leaf for leaf in flat]
        self.leaves = [
            with_axis(leaf) if whole else leaf
            for leaf, whole in zip(flat, self._whole, strict=True)
            if whole is not None
        ]
        if size is None:
            # A batch needs an array with rows.
            self.leaves.append(tf.zeros([1]))
        self._structure = tf.nest.map_structure(lambda leaf: 0, (args, kwargs))
        constants = tuple(map(constant_key, self._constants))
        self.key: Hashable = str(self._structure), constants, tuple(self._whole)

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The positional and keyword arguments, with other tensors."""
        rest, again = iter(leaves), []
        for whole, constant in zip(self._whole, self._constants, strict=True):
            leaf = constant if whole is None else next(rest)
            again.append(without_axis(leaf) if whole else leaf)
        args, kwargs = tf.nest.pack_sequence_as(self._structure, again)
        return args, kwargs


def as_tensor(leaf: Any) -> Any:
    """An array as a tensor; anything else as it is."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def most_common_length(tensors: Sequence[Any]) -> int | None:
    """The most common length of first axes, in doubt that of the earlier tensor, or None."""
    lengths = [int(t.shape[0]) for t in tensors if t.shape.rank and t.shape[0] is not None]
    found = collections.Counter(length for length in lengths if length != 1)
    return found.most_common(1)[0][0] if found else (1 if lengths else None)


def is_whole(tensor: Any, size: int | None) -> bool:
    """Whether a tensor has axes, but no rows of the batch."""
    return bool(tensor.shape.rank) and not is_one_row(tensor) and tensor.shape[0] != size


def with_axis(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.expand_dims(tensor, 0)
    return tf.expand_dims(tensor, 0)


def without_axis(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.reshape(tensor, tensor.dense_shape[1:])
    return tensor[0]


def constant_key(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf
