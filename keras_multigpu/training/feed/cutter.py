"""Cuts global batches into shares, which wait for the step on their replicas' devices.

    global batches ──> cut on the host ──> copied, where a device ──> AHEAD batches of ──> step
    a dataset          one function        has memory of its own      shares wait

With a share come the number of its rows and the global batch size.
"""

import functools
from collections.abc import Sequence
from typing import Any
from typing import Self

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals import dataset_internals
from keras_multigpu.training.global_batch import Batch
from keras_multigpu.training.global_batch import as_tensor
from keras_multigpu.training.global_batch import normalized
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_group import Replica
from keras_multigpu.training.replica_pass.pure_model import Rows
from keras_multigpu.training.shares import Shares
from keras_multigpu.training.shares import filled
from keras_multigpu.training.shares import open_spec
from keras_multigpu.training.shares import present
from keras_multigpu.training.shares import shares_of

AHEAD = 2
"""How many batches of shares wait for the step."""


class Cutter:
    """Cuts whatever batches come for the replicas of this process, always in the same way.

    Args:
        replicas: The number of all replicas.
        local: Those of this process; all of them, on the host, if left out.
    """

    def __init__(self, replicas: int, local: Sequence[Replica] | None = None) -> None:
        self.replicas = replicas
        local = [Replica(i, i, HOST) for i in range(replicas)] if local is None else local
        self.devices = [replica.device for replica in local]
        self._ids = [replica.id for replica in local]
        self._graphs: dict[str, Any] = {}

    def __call__(self, batch: Batch) -> Shares:
        """The shares of a batch that Python has read, each on its replica's device."""
        with tf.device(HOST):
            rows = shares_of(batch, self.replicas, self._ids)
        if are_copied(self.devices, batch):
            rows = tuple(map(on_device, rows, self.devices))
        return Shares(rows, open_spec(batch))

    def ahead(self, dataset: tf.data.Dataset) -> "WaitingShares":
        """The shares of a dataset's batches, which wait for the step."""
        spec = normalized(dataset.element_spec)
        graph = self._graph(spec)

        @tf.autograph.experimental.do_not_convert
        def cut_ahead(*element: Any) -> tuple[Rows, ...]:
            shares: tuple[Rows, ...] = graph(*present(normalized(element)))
            return shares

        return WaitingShares(dataset.map(cut_ahead), self.devices)

    def _graph(self, spec: Batch) -> Any:
        """The cut as a graph, traced once for all datasets of these batches."""
        key = str(spec)
        if key not in self._graphs:

            def on_leaves(*leaves: Any) -> tuple[Rows, ...]:
                return shares_of(filled(spec, leaves), self.replicas, self._ids)

            with keras_internals.single_device(), tf.device(HOST):
                function = tf.function(on_leaves, autograph=False)
                self._graphs[key] = function.get_concrete_function(*present(spec))
        return self._graphs[key]


class WaitingShares:
    """Batches of shares that are made ahead of the step, on the replicas' devices.

    Args:
        dataset: Yields the shares of a batch, on the host.
        devices: The replicas' devices, by place.
    """

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._copied = are_copied(devices, dataset.element_spec)
        self._dataset = dataset.flat_map(one_by_one) if self._copied else dataset.prefetch(AHEAD)

    def __iter__(self) -> "SharesInGraph":
        if not self._copied:
            return SharesInGraph(iter(self._dataset))
        return SharesInGraph(
            dataset_internals.multi_device_iterator(self._dataset, self._devices, HOST, AHEAD)
        )


class SharesInGraph:
    """The shares of a dataset's batches, one batch after another.

    Args:
        iterator: What yields them, inside a graph too.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Shares:
        return Shares(tuple(next(self.iterator)), None)


def are_copied(devices: Sequence[str], specs: Any) -> bool:
    """Whether tensors like these are copied to the devices before the step asks for them.

    Logical CPUs share the host's memory. Strings cannot leave it, and what is made of tensors
    of several kinds stays there with all of its batch.
    """
    return any(map(has_own_memory, devices)) and all(
        isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.string
        for leaf in present(keras.tree.map_structure(as_tensor, specs))
    )


def has_own_memory(device: str) -> bool:
    """Whether a device has memory of its own."""
    return tf.DeviceSpec.from_string(device).device_type != "CPU"


@tf.autograph.experimental.do_not_convert
def one_by_one(*shares: Rows) -> tf.data.Dataset:
    """A dataset of a batch's shares."""
    datasets = map(tf.data.Dataset.from_tensors, shares)
    return functools.reduce(lambda first, more: first.concatenate(more), datasets)


def on_device(rows: Rows, device: str) -> Rows:
    """The same rows on a device."""
    with tf.device(device):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), rows
        )
