"""How a global batch becomes one share for each replica, and shares a batch again.

Shares are contiguous and in replica order; see `keras_multigpu.batch_sizes`. A leaf whose first
axis is known to be 1 belongs to all examples, as in broadcasting: every replica has it whole.
(Of a batch of one example it is the row that replicas without examples borrow.)
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.global_batch import Batch
from keras_multigpu.training.replica_pass.pure_model import Rows
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import with_length

COUNT = tf.int64
"""The type of numbers of examples: TensorFlow keeps scalars of int32 off GPUs."""


class Shares(NamedTuple):
    """A batch as the rows of the replicas of this process.

    Attributes:
        rows: The replicas' rows, by place.
        spec: The specs of the global batch; None where its source has one spec for all.
    """

    rows: tuple[Rows, ...]
    spec: Batch | None


def present(structure: Any) -> list[Any]:
    """The leaves of a structure that are not None."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def filled(structure: Any, leaves: Sequence[Any]) -> Any:
    """The structure with other leaves in place of those that are not None."""
    remaining = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else next(remaining), structure
    )


def shares_of(batch: Batch, replicas: int, ids: Sequence[int] | None = None) -> tuple[Rows, ...]:
    """The rows of a global batch that belong to each replica.

    Args:
        batch: The batch.
        replicas: The number of all replicas.
        ids: The replicas whose rows are wanted; all of them if left out.
    """
    size = batch_size_of(batch)
    total = tf.constant(size, COUNT) if isinstance(size, int) else tf.cast(size, COUNT)
    if replicas == 1:
        return (Rows(batch, total, total),)
    bounds = Bounds(size, replicas, list(range(replicas)) if ids is None else ids)
    parts = [bounds.parts(leaf) for leaf in keras.tree.flatten(batch)]
    return tuple(
        Rows(keras.tree.pack_sequence_as(batch, list(leaves)), examples, total)
        for *leaves, examples in zip(*parts, bounds.examples, strict=True)
    )


def joined_shares(parts: Sequence[Batch]) -> Shares:
    """The shares of a batch that somebody else has cut; of no examples, with a borrowed row.

    Args:
        parts: Each replica's rows.
    """
    sizes: list[Any] = [batch_size_of(part) for part in parts]
    donor = parts[int(np.argmax(sizes))]
    total = tf.constant(sum(sizes), COUNT)
    shares = [
        Rows(part if size else rows(donor, 0, 1), tf.constant(size, COUNT), total)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return Shares(tuple(shares), open_spec(donor))


class Bounds:
    """Where some replicas' rows begin in a batch, and how many they are.

    A replica without examples borrows the first row, if there is one.

    Args:
        size: The number of examples, an integer or a tensor.
        replicas: The number of replicas.
        ids: Those whose rows are wanted.
    """

    def __init__(self, size: int | tf.Tensor, replicas: int, ids: Sequence[int]) -> None:
        self._static = isinstance(size, int)
        self._all = len(ids) == replicas
        on = np if self._static else tf
        numbers = np.asarray(ids, "int64") if self._static else tf.constant(ids, tf.int32)
        starts, stops = share_bounds(size, numbers, replicas)
        counts = stops - starts
        self.examples = tf.unstack(tf.cast(counts, COUNT), len(ids))
        self._borrowed = self._static and size < replicas
        self._starts = on.where(counts > 0, starts, 0)
        self._lengths = on.minimum(on.maximum(counts, 1), size)
        self._corners: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {}

    def parts(self, leaf: Any) -> list[Any]:
        """Each replica's rows of one leaf of the batch."""
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf):
            return [leaf] * len(self.examples)
        if not isinstance(leaf, tf.Tensor) or self._borrowed:
            begins, counts = tf.unstack(self._starts), tf.unstack(self._lengths)
            return [cut(leaf, begin, begin + n) for begin, n in zip(begins, counts, strict=True)]
        if self._static and self._all:
            return list(tf.split(leaf, self._lengths))
        parts = [tf.slice(leaf, begin, size) for begin, size in self._corners_of(leaf.shape.rank)]
        for part in parts:
            part.set_shape([None, *leaf.shape[1:]])
        return parts

    def _corners_of(self, rank: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Where a tensor of this rank is cut for each replica, as `tf.slice` takes it."""
        if rank not in self._corners:
            others = [[0, 0], [0, rank - 1]]
            begins = tf.unstack(tf.pad(self._starts[:, None], others))
            sizes = tf.unstack(tf.pad(self._lengths[:, None], others, constant_values=-1))
            self._corners[rank] = list(zip(begins, sizes, strict=True))
        return self._corners[rank]


def gathered(shares: Sequence[Rows], spec: Batch) -> Batch:
    """The global batch again, from the rows of all replicas.

    Args:
        shares: Each replica's rows.
        spec: The specs of the global batch, which tell what belongs to all examples.
    """
    if len(shares) == 1:
        return shares[0].data
    size = batch_size_of(spec)
    divided = isinstance(size, int) and size % len(shares) == 0

    def whole(leaf: Any, *parts: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf):
            return parts[0]
        if not divided:
            parts = tuple(
                cut(part, 0, rows.examples) for part, rows in zip(parts, shares, strict=True)
            )
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.sparse.concat(axis=0, sp_inputs=list(parts))
        return tf.concat(parts, axis=0)

    flat = (keras.tree.flatten(part) for part in (spec, *(rows.data for rows in shares)))
    leaves = [whole(*each) for each in zip(*flat, strict=True)]
    batch: Batch = keras.tree.pack_sequence_as(spec, leaves)
    return batch


def batch_size_of(batch: Any) -> int | tf.Tensor | None:
    """The number of examples in a batch: an integer where it is static, None in open specs."""
    leaves = [
        leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.shape.rank != 0
    ]
    for leaf in sorted(leaves, key=is_one_row):
        static = leaf.shape[0]
        if static is not None:
            return int(static)
        if isinstance(leaf, tf.TypeSpec):
            return None
        return leaf.nrows(tf.int32) if is_ragged(leaf) else tf.shape(leaf, tf.int32)[0]
    raise ValueError(
        "The batch holds no array with a batch axis. Expected at least one tensor of rank 1 or "
        f"more, with the examples along its first axis. Received: batch={batch}"
    )


def rows(data: Any, start: Any, stop: Any) -> Any:
    """Rows `start` to `stop` of a batch, or its first row where these are none."""
    if isinstance(start, int) and isinstance(stop, int):
        start, stop = (start, stop) if stop > start else (0, 1)
    else:
        some = stop > start
        start, stop = tf.where(some, start, 0), tf.where(some, stop, 1)
    return keras.tree.map_structure(
        lambda leaf: leaf if is_one_row(leaf) else cut(leaf, start, stop), data
    )


def cut(leaf: Any, start: Any, stop: Any) -> Any:
    """Rows of one leaf of a batch; scalars and None are shared by all."""
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        begin = tf.concat([[start], tf.zeros([leaf.shape.rank - 1], tf.int64)], axis=0)
        size = tf.concat([[stop - start], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), tf.cast(size, tf.int64))
    return leaf[start:stop]


def share_spec(spec: tuple[Any, Any, Any], replicas: int) -> Rows:
    """The specs of a replica's rows, from those of a global batch.

    The rows have a static shape where the batch has one that divides evenly.
    """
    size = batch_size_of(spec)
    rows = size // replicas if isinstance(size, int) and size % replicas == 0 and size else None

    def share(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf):
            return leaf
        return with_length(leaf, rows)

    count = tf.TensorSpec((), COUNT)
    return Rows(keras.tree.map_structure(share, spec), count, count)


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have one row, whatever the number of examples."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def is_ragged(leaf: Any) -> bool:
    """Whether a leaf has rows of different lengths."""
    return isinstance(leaf, tf.RaggedTensor)


def open_spec(batch: Batch) -> Batch:
    """The specs of a batch with its number of examples left open."""
    one_example = batch_size_of(batch) == 1

    def opened(leaf: Any) -> Any:
        spec = specs_of(leaf)
        if spec is None or not spec.shape.rank or (is_one_row(spec) and not one_example):
            return spec
        return with_length(spec, None)

    return keras.tree.map_structure(opened, batch)
