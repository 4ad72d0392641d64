"""Cuts global batches into shares, which wait for the step on their replicas' devices.

    global batches ──> cut on the host ──> copied to devices ──> AHEAD batches ──> step
    a dataset          one function        with own memory       of shares wait

Each share carries the number of its rows and the global batch size.
"""

import functools
from collections.abc import Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.keras_internals import dataset_internals, graph_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    Shares,
    as_tensor,
    counted,
    normalized,
    open_spec,
    present_leaves,
    share_spec,
    shares_of,
    with_leaves,
)

AHEAD = 2
"""How many batches of shares wait for the step."""


class Cutter:
    """Cuts batches for all replicas.

    Args:
        devices: Where the replicas' rows wait for the step; by default on the host.
        here: With several processes, the replicas of this one.
    """

    def __init__(
        self, replicas: int, devices: Sequence[str] | None = None, here: range | None = None
    ) -> None:
        self.replicas = replicas
        self.here = here
        self.devices = [HOST] * replicas if devices is None else list(devices)
        self._graphs: dict[str, Any] = {}

    def __call__(self, batch: Batch) -> Shares:
        """The shares of a batch that Python has read, each on its replica's device."""
        with tf.device(HOST):
            rows = shares_of(batch, self.replicas)
        if are_copied(self.devices, batch):
            rows = tuple(map(on_device, rows, self.devices))
        return Shares(rows, open_spec(batch))

    def ahead(self, dataset: tf.data.Dataset) -> "WaitingShares":
        """The shares of a dataset's batches, which wait for the step."""
        spec = normalized(dataset.element_spec)
        graph = self._graph(spec)

        @tf.autograph.experimental.do_not_convert
        def cut_ahead(*element: Any) -> tuple[Rows, ...]:
            shares: tuple[Rows, ...] = graph(*present_leaves(normalized(element)))
            return shares

        return WaitingShares(dataset.map(cut_ahead), self.devices)

    def ahead_of_cut(self, dataset: tf.data.Dataset, spec: Batch) -> "WaitingShares":
        """The shares of batches of which this process reads only its own rows.

        Args:
            dataset: These rows, each with two numbers: the size of the whole batch, and how many
                of its rows come before.
            spec: The specs of the whole batch.
        """

        @tf.autograph.experimental.do_not_convert
        def cut_here(element: Any, numbers: tf.Tensor) -> tuple[Rows, ...]:
            size, before = tf.unstack(numbers)
            batch, form = normalized(element), share_spec(spec, self.replicas)
            return tuple(
                self._rows_of(number, batch, form, size, before) for number in range(self.replicas)
            )

        return WaitingShares(dataset.map(cut_here), self.devices)

    def _rows_of(
        self, number: int, batch: Batch, form: Rows, size: tf.Tensor, before: tf.Tensor
    ) -> Rows:
        start, stop = share_bounds(size, tf.constant(number, size.dtype), self.replicas)
        numbers = (counted(stop - start),), (counted(size),)
        if number not in (self.here or ()):
            return Rows((None, None, None), *numbers)

        def cut_leaf(leaf: Any, spec: Any) -> Any:
            own = None if leaf is None else leaf[start - before : stop - before]
            return None if own is None else tf.ensure_shape(own, spec.shape)

        data = keras.tree.map_structure(cut_leaf, batch, form.data)
        return Rows(data, *numbers)

    def _graph(self, spec: Batch) -> Any:
        """The graph that cuts batches of these specs, traced once."""
        key = str(spec)
        if key not in self._graphs:

            def on_leaves(*leaves: Any) -> tuple[Rows, ...]:
                return shares_of(with_leaves(spec, leaves), self.replicas)

            with graph_internals.single_device(), tf.device(HOST):
                function = tf.function(on_leaves, autograph=False)
                self._graphs[key] = function.get_concrete_function(*present_leaves(spec))
        return self._graphs[key]


class WaitingShares:
    """A dataset of shares, each made ahead of the step on its replica's device."""

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._copied = are_copied(devices, dataset.element_spec)
        # TensorFlow's iterator for several devices gives each the next element in turn.
        with tf.device(HOST):
            self._dataset = (
                dataset.flat_map(one_by_one) if self._copied else dataset.prefetch(AHEAD)
            )

    def __iter__(self) -> "SharesInGraph":
        if not self._copied:
            return SharesInGraph(iter(self._dataset))
        return SharesInGraph(
            dataset_internals.multi_device_iterator(self._dataset, self._devices, HOST, AHEAD)
        )


class SharesInGraph:
    """An iterator over shares, which Python may read, or a graph as `iterator`.

    Attributes:
        in_graph: Whether a graph may read them.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.in_graph = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Shares:
        return Shares(tuple(next(self.iterator)), None)


def replayed(rows: Sequence[Rows], spec: Any, devices: Sequence[str]) -> Any:
    """An iterator that yields one batch again; None if TensorFlow gives it another element spec.

    Args:
        rows: The shares of the batch.
        spec: The element spec of the iterator that yielded them.
        devices: Where they wait for the step.
    """
    # An iterator for several devices has the spec of one device's element.
    whole = (spec,) * len(rows) if isinstance(spec, Rows) else spec
    leaves = [leaf for leaf in tf.nest.flatten(rows, expand_composites=True) if leaf is not None]
    specs = [form for form in tf.nest.flatten(whole, expand_composites=True) if form is not None]
    with tf.device(HOST):
        moving = tuple(tf.identity(leaf) for leaf in leaves)

    @tf.autograph.experimental.do_not_convert
    def in_form(*tensors: tf.Tensor) -> Any:
        # Lengths that differ from batch to batch must be open.
        opened = [
            tf.compat.v1.placeholder_with_default(tensor, form.shape)
            for tensor, form in zip(tensors, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(whole, opened, expand_composites=True)

    dataset = tf.data.Dataset.from_tensors(moving).map(in_form)
    iterator = iter(WaitingShares(dataset, devices)).iterator
    return iterator if iterator.element_spec == spec else None


def are_copied(devices: Sequence[str], specs: Any) -> bool:
    """Whether tensors like these are copied to the devices before the step asks for them."""
    # Logical CPUs share the host's memory. Strings cannot leave it, and batches with composite
    # tensors stay there.
    return any(map(has_own_memory, devices)) and all(
        isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.string
        for leaf in present_leaves(keras.tree.map_structure(as_tensor, specs))
    )


def has_own_memory(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type != "CPU"


@tf.autograph.experimental.do_not_convert
def one_by_one(*shares: Rows) -> tf.data.Dataset:
    datasets = map(tf.data.Dataset.from_tensors, shares)
    return functools.reduce(lambda first, more: first.concatenate(more), datasets)


def on_device(rows: Rows, device: str) -> Rows:
    with tf.device(device):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), rows
        )
