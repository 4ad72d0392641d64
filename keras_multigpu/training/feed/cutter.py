"""Cuts global batches into shares, which wait for the step on their replicas' devices.

    global batches ──> cut on the host ──> copied to devices ──> AHEAD batches ──> step
    a dataset          one function        with own memory       of shares wait

A share's length says how many examples it has.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.keras_internals import dataset_internals, graph_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import (
    Batch,
    Shares,
    normalized,
    open_spec,
    present_leaves,
    share_spec,
    shares_of,
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

    def __call__(self, batch: Batch) -> Shares:
        """The shares of a batch that Python has read, each on its replica's device."""
        with tf.device(HOST):
            leaves = shares_of(batch, self.replicas)
        if are_copied(self.devices, batch):
            leaves = list(map(on_device, leaves, self.devices))
        return Shares(leaves, open_spec(batch))

    def ahead(self, dataset: tf.data.Dataset) -> "WaitingShares":
        """The shares of a dataset's batches, which wait for the step."""
        spec = normalized(dataset.element_spec)

        def cut(*element: Any) -> list[Any]:
            return [leaf for own in shares_of(normalized(element), self.replicas) for leaf in own]

        return WaitingShares(dataset, cut, spec, self)

    def ahead_of_cut(self, dataset: tf.data.Dataset, spec: Batch) -> "WaitingShares":
        """The shares of batches of which this process reads only its own rows.

        Args:
            dataset: These rows, each with two numbers: the size of the whole batch, and how many
                of its rows come before.
            spec: The specs of the whole batch.
        """
        forms = share_spec(spec, self.replicas)

        def cut(element: Any, numbers: tf.Tensor) -> list[Any]:
            size, before = tf.unstack(numbers)
            leaves = present_leaves(normalized(element))
            found = [tf.cast(size, tf.int32)]
            for number in self.here or ():
                bounds = share_bounds(size, tf.constant(number, size.dtype), self.replicas)
                start, stop = (bound - before for bound in bounds)
                for leaf, form in zip(leaves, forms, strict=True):
                    found.append(tf.ensure_shape(leaf[start:stop], form.shape))
            return found

        return WaitingShares(dataset, cut, spec, self, reads_own_rows=True)


class WaitingShares:
    """A dataset of shares, each made ahead of the step on its replica's device.

    Args:
        dataset: The batches.
        cut: Cuts one into the leaves of all replicas, one after another; before them comes the
            batch's size if only this process's are there.
        spec: The specs of the batches.
        reads_own_rows: Whether only this process's shares are there.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        cut: Callable[..., list[Any]],
        spec: Batch,
        cutter: Cutter,
        reads_own_rows: bool = False,
    ) -> None:
        self._spec, self._replicas = spec, cutter.replicas
        self._here = cutter.here if reads_own_rows else None
        self._devices = cutter.devices if are_copied(cutter.devices, spec) else []
        # Elements are flat: TensorFlow took 0.2 ms to nest those of two replicas.
        self._each = len(present_leaves(spec))
        convert = tf.autograph.experimental.do_not_convert
        with graph_internals.single_device(), tf.device(HOST):
            dataset = dataset.map(convert(lambda *element: tuple(cut(*element))))
            # TensorFlow's iterator for several devices gives each the next element in turn.
            self._dataset = (
                dataset.flat_map(convert(self._one_by_one))
                if self._devices
                else dataset.prefetch(AHEAD)
            )

    def __iter__(self) -> Iterator[Shares]:
        if not self._devices:
            return map(self._shares, self._dataset)
        return map(
            self._shares,
            dataset_internals.multi_device_iterator(self._dataset, self._devices, HOST, AHEAD),
        )

    def _shares(self, element: Sequence[Any]) -> Shares:
        if self._devices:
            return Shares(element, self._spec, is_usual=True)
        if self._here is None:
            return Shares(self._of_each(element), self._spec, is_usual=True)
        size, *leaves = element
        shares = dict(zip(self._here, self._of_each(leaves), strict=True))
        of_all = [shares.get(number, ()) for number in range(self._replicas)]
        return Shares(of_all, self._spec, is_usual=True, size=size)

    def _of_each(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """The leaves of each replica."""
        each = self._each
        return [leaves[start : start + each] for start in range(0, len(leaves), each)]

    def _one_by_one(self, *leaves: Any) -> tf.data.Dataset:
        datasets = map(tf.data.Dataset.from_tensors, self._of_each(leaves))
        return functools.reduce(lambda first, more: first.concatenate(more), datasets)


def are_copied(devices: Sequence[str], specs: Any) -> bool:
    """Whether tensors like these are copied to the devices before the step asks for them."""
    # Logical CPUs share the host's memory. Strings cannot leave it, and batches with composite
    # tensors stay there.
    return any(map(has_own_memory, devices)) and all(
        isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.string
        for leaf in present_leaves(specs)
    )


def has_own_memory(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type != "CPU"


def on_device(leaves: Sequence[Any], device: str) -> list[Any]:
    with tf.device(device):
        return [tf.identity(leaf) for leaf in leaves]
