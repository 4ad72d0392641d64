"""Cuts global batches into one share for each replica, on the host and ahead of the step.

    global batches ──> cut on the host ──> AHEAD batches of shares wait ──> step
    a dataset          one function        each replica's rows, the number of them
                                           and the global batch size

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

from keras_multigpu import keras_internals
from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.global_batch import Batch
from keras_multigpu.training.global_batch import normalized
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_pass.pure_model import Rows
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import with_length

AHEAD = 2
"""How many batches of shares wait for the step."""


class Shares(NamedTuple):
    """A batch as the rows of its replicas.

    Attributes:
        rows: The replicas' rows, in replica order.
        spec: The specs of the global batch; None where its source has one spec for all.
    """

    rows: tuple[Rows, ...]
    spec: Batch | None


class Cutter:
    """Cuts whatever batches come for some replicas, always in the same way.

    Args:
        replicas: The number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._graphs: dict[str, Any] = {}

    def __call__(self, batch: Batch) -> Shares:
        """The shares of a batch that Python has read."""
        with tf.device(HOST):
            return Shares(shares_of(batch, self.replicas), open_spec(batch))

    def ahead(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset of global batches as one of their shares, which wait for the step."""
        spec = normalized(dataset.element_spec)
        graph = self._graph(spec)

        @tf.autograph.experimental.do_not_convert
        def cut_ahead(*element: Any) -> tuple[Rows, ...]:
            shares: tuple[Rows, ...] = graph(*present(normalized(element)))
            return shares

        return dataset.map(cut_ahead).prefetch(AHEAD)

    def _graph(self, spec: Batch) -> Any:
        """The cut as a graph, traced once for all datasets of these batches."""
        key = str(spec)
        if key not in self._graphs:

            def on_leaves(*leaves: Any) -> tuple[Rows, ...]:
                return shares_of(filled(spec, leaves), self.replicas)

            with keras_internals.single_device(), tf.device(HOST):
                function = tf.function(on_leaves, autograph=False)
                self._graphs[key] = function.get_concrete_function(*present(spec))
        return self._graphs[key]


def present(structure: Any) -> list[Any]:
    """The leaves of a structure that are not None."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def filled(structure: Any, leaves: Sequence[Any]) -> Any:
    """The structure with other leaves in place of those that are not None."""
    remaining = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else next(remaining), structure
    )


def shares_of(batch: Batch, replicas: int) -> tuple[Rows, ...]:
    """The rows of a global batch that belong to each replica."""
    size = batch_size_of(batch)
    total = tf.convert_to_tensor(size, tf.int32)
    if replicas == 1:
        return (Rows(batch, total, total),)
    bounds = Bounds(size, replicas)
    parts = [bounds.parts(leaf) for leaf in keras.tree.flatten(batch)]
    return tuple(
        Rows(keras.tree.pack_sequence_as(batch, list(leaves)), examples, total)
        for *leaves, examples in zip(*parts, bounds.examples, strict=True)
    )


class Bounds:
    """Where each replica's rows begin in a batch, and how many they are.

    A replica without examples borrows the first row, if there is one.

    Args:
        size: The number of examples, an integer or a tensor.
        replicas: The number of replicas.
    """

    def __init__(self, size: int | tf.Tensor, replicas: int) -> None:
        self._static = isinstance(size, int)
        numbers = np.arange(replicas + 1) if self._static else tf.range(replicas + 1)
        on = np if self._static else tf
        edges, _ = share_bounds(size, numbers, replicas)
        counts = edges[1:] - edges[:-1]
        self.examples = tf.unstack(tf.cast(counts, tf.int32), replicas)
        self._borrowed = self._static and size < replicas
        self._starts = on.where(counts > 0, edges[:-1], 0)
        self._lengths = on.minimum(on.maximum(counts, 1), size)
        self._corners: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {}

    def parts(self, leaf: Any) -> list[Any]:
        """Each replica's rows of one leaf of the batch."""
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf):
            return [leaf] * len(self.examples)
        if not isinstance(leaf, tf.Tensor) or self._borrowed:
            begins, counts = tf.unstack(self._starts), tf.unstack(self._lengths)
            return [cut(leaf, begin, begin + n) for begin, n in zip(begins, counts, strict=True)]
        if self._static:
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

    integer = tf.TensorSpec((), tf.int32)
    return Rows(keras.tree.map_structure(share, spec), integer, integer)


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
