"""`Exchange`: what travels between replicas, whether they share a process or not.

Its verbs take and return the tensors of all replicas of this process, by place, so one plain loop
makes a step for all of them:

    parts[place][number] ──> sum, gather ──> wholes[place][number]

A step calls a verb where all replicas have come to the same point. TensorFlow runs operations with
side effects, timestamps and collectives among them, in the order in which they were made: if one
replica's step were made after another's, they could wait for each other for ever.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.partition.emission.exchange import ShardedAxis, arrived, travelling

T = TypeVar("T")

Parts = Sequence[Sequence[tf.Tensor]]
"""The tensors of each replica of this process, by its place."""


def on_each(
    devices: Sequence[str], function: Callable[..., T], *of_replicas: Sequence[Any]
) -> list[T]:
    """The results of a function on each device, given what belongs to its replica."""
    found = []
    for device, *own in zip(devices, *of_replicas, strict=True):
        with tf.device(device):
            found.append(function(*own))
    return found


class Transport(Protocol):
    """Carries one tensor at a time between all replicas.

    Every process calls the same methods in the same order. They take what each replica of the
    process has, and return what each gets.
    """

    def all_reduce(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum over all replicas."""

    def all_gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of all replicas, of equal shapes, one after another."""


class LocalTransport(Transport, Protocol):
    """Carries tensors between the replicas of one process."""

    def all_to_all(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows that all replicas have for each: of each tensor, one row for every place."""


class Hub:
    """Carries tensors within a process without collectives: the first device adds up.

    Args:
        devices: Those of the replicas, by place.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def all_reduce(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._copies(lambda: tf.add_n(parts))

    def all_gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._copies(lambda: tf.concat(parts, axis=0))

    def all_to_all(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._devices[0]):
            rows = [tf.stack(own) for own in zip(*map(tf.unstack, parts), strict=True)]
        return on_each(self._devices, tf.identity, rows)

    def _copies(self, make: Callable[[], tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._devices[0]):
            whole = make()
        return on_each(self._devices, lambda: tf.identity(whole))


class Exchange:
    """Sums and gathers tensors over replicas.

    Args:
        devices: Those of this process's replicas, by place; "" leaves the choice to TensorFlow.
        count: How many replicas there are in all processes.
        transport: Carries tensors; by default a `Hub`, within this process.
    """

    def __init__(
        self,
        devices: Sequence[str],
        count: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.devices = devices
        self._transport = transport or Hub(devices)
        self.count = count or len(devices)
        self._within: Any = self._transport if self.count == len(devices) else Hub(devices)

    def on_each(self, function: Callable[..., T], *of_replicas: Sequence[Any]) -> list[T]:
        """The results of a function on each device, given what belongs to its replica."""
        return on_each(self.devices, function, *of_replicas)

    def sum(self, parts: Parts) -> list[list[tf.Tensor]]:
        """The sums of tensors over all replicas. Each travels by itself, as soon as it is there."""
        if self.count == 1:
            return [list(own) for own in parts]
        return self._each(self._transport.all_reduce, parts, lambda shape: shape, 1)

    def all_gather(self, parts: Parts) -> list[list[tf.Tensor]]:
        """The tensors of all replicas, of equal shapes with at least a row, one after another."""
        transport = self._transport.all_gather
        return self._each(transport, parts, lambda shape: shape[1:], self.count)

    def gather(self, parts: Parts) -> list[list[tf.Tensor]]:
        """The rows of all replicas, in the order of their ids."""
        if self.count == 1 or not parts[0]:
            return [list(own) for own in parts]
        refuse_to_send(parts[0])

        def lengths_of(own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [travelling(tf.stack([tf.shape(tensor)[0] for tensor in own])[tf.newaxis])]

        def sent(own: Sequence[tf.Tensor], lengths: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            most = most_of(lengths)
            return [padded(travelling(tensor), 0, most[n]) for n, tensor in enumerate(own)]

        def present(
            wholes: Sequence[tf.Tensor], own: Sequence[tf.Tensor], lengths: Sequence[tf.Tensor]
        ) -> list[tf.Tensor]:
            found, most = [], most_of(lengths)
            for n, (whole, part) in enumerate(zip(wholes, own, strict=True)):
                are_rows = tf.reshape(tf.sequence_mask(lengths[0][:, n], most[n]), [-1])
                found.append(arrived(tf.boolean_mask(whole, are_rows), part.dtype))
                found[-1].set_shape([None, *part.shape[1:]])
            return found

        lengths = self.all_gather(self.on_each(lengths_of, parts))
        wholes = self.all_gather(self.on_each(sent, parts, lengths))
        return self.on_each(present, wholes, parts, lengths)

    def gather_rows(self, parts: Sequence[tf.Tensor], axis: ShardedAxis) -> list[tf.Tensor]:
        """The whole of a tensor of which the replicas of this process have their rows."""
        bounds, most = self._bounds(axis)

        def sent(part: tf.Tensor) -> tf.Tensor:
            return tf.reshape(padded(part, axis.axis, most), [1, -1])

        wholes = self._within.all_gather(self.on_each(sent, parts))

        def put_together(whole: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
            if is_plain(axis, len(bounds)):
                return tf.reshape(whole, with_length(part, 0, axis.length))
            shape, rows = with_length(part, axis.axis, most), tf.unstack(whole, num=len(bounds))
            found = [
                cut_to(tf.reshape(own, shape), axis.axis, stop - start)
                for own, (start, stop) in zip(rows, bounds, strict=True)
            ]
            return tf.concat(found, axis.axis)

        return self.on_each(put_together, wholes, parts)

    def scatter_rows(self, parts: Sequence[tf.Tensor], axis: ShardedAxis) -> list[tf.Tensor]:
        """The rows of this process's replicas of the sum of a tensor over all."""
        bounds, most = self._bounds(axis)
        places = len(bounds)
        if self.count > len(self.devices):
            wholes = [whole for (whole,) in self.sum([[part] for part in parts])]
            own_rows = functools.partial(rows_of, places=places)
            return self.on_each(own_rows, wholes, [axis] * places, range(places))

        def sent(part: tf.Tensor) -> tf.Tensor:
            if is_plain(axis, places):
                return tf.reshape(part, [places, -1])
            own = [rows_of(part, axis, place, places) for place in range(places)]
            return tf.stack([tf.reshape(padded(each, axis.axis, most), [-1]) for each in own])

        rows = self._within.all_to_all(self.on_each(sent, parts))

        def added(own: tf.Tensor, part: tf.Tensor, span: tuple[int, int]) -> tf.Tensor:
            total = tf.reduce_sum(own, axis=0)
            total = tf.reshape(total, with_length(part, axis.axis, most))
            return cut_to(total, axis.axis, span[1] - span[0])

        return self.on_each(added, rows, parts, bounds)

    def _bounds(self, axis: ShardedAxis) -> tuple[list[tuple[int, int]], int]:
        """Each replica's rows of a variable, and how many the most of them has."""
        places = len(self.devices)
        bounds = [axis.bounds(place, places) for place in range(places)]
        return bounds, max(stop - start for start, stop in bounds)

    def _each(
        self,
        exchange: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        parts: Parts,
        decides: Callable[[tf.TensorShape], tf.TensorShape],
        count: int,
    ) -> list[list[tf.Tensor]]:
        """Exchange each tensor by itself.

        Args:
            decides: What of a shape decides whether there are elements.
            count: How many times as many rows come back.
        """

        def is_filled(tensor: tf.Tensor) -> bool:
            return bool(decides(tensor.shape).num_elements())

        def sent(own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # An exchange has to begin on the replica's device.
            return [tf.identity(each) if is_filled(each) else filled(each) for each in own]

        def present(wholes: Sequence[tf.Tensor], own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [
                whole if is_filled(each) else unfilled(whole, each, count)
                for whole, each in zip(wholes, own, strict=True)
            ]

        found = [exchange(of_all) for of_all in zip(*self.on_each(sent, parts), strict=True)]
        wholes = [list(own) for own in zip(*found, strict=True)] or [[] for _ in self.devices]
        return self.on_each(present, wholes, parts)


def filled(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor as a row of its elements, or of one if it has none.

    TensorFlow's collectives end the process where a tensor has none (2.21).
    """
    missing = tf.cast(tf.equal(tf.size(tensor), 0), tf.int32)
    return tf.pad(tf.reshape(tensor, [1, -1]), [[0, 0], [0, missing]])


def unfilled(whole: tf.Tensor, tensor: tf.Tensor, count: int) -> tf.Tensor:
    """So many such rows as a tensor again."""
    shape = tf.shape(tensor)
    rows = tf.reshape(whole, [count, -1])[:, : tf.size(tensor)]
    return tf.reshape(rows, tf.concat([count * shape[:1], shape[1:]], axis=0))


def rows_of(whole: tf.Tensor, axis: ShardedAxis, place: int, places: int) -> tf.Tensor:
    """A replica's rows of a whole tensor."""
    start, stop = axis.bounds(place, places)
    begin, size = [0] * whole.shape.rank, [-1] * whole.shape.rank
    begin[axis.axis], size[axis.axis] = start, stop - start
    return tf.slice(whole, begin, size)


def is_plain(axis: ShardedAxis, places: int) -> bool:
    """Whether the rows of all replicas, one after another, are the whole tensor."""
    return axis.axis == 0 and axis.length == axis.bounds(0, places)[1] * places


def padded(tensor: tf.Tensor, axis: int, length: int | tf.Tensor) -> tf.Tensor:
    """A tensor with zeros behind it, up to this length of an axis."""
    if isinstance(length, int) and tensor.shape[axis] == length:
        return tensor
    missing = [
        [0, length - tf.shape(tensor)[axis] if n == axis else 0] for n in range(tensor.shape.rank)
    ]
    return tf.pad(tensor, missing)


def cut_to(tensor: tf.Tensor, axis: int, length: int) -> tf.Tensor:
    """The first rows of a tensor, along an axis."""
    if tensor.shape[axis] == length:
        return tensor
    size = [length if n == axis else -1 for n in range(tensor.shape.rank)]
    return tf.slice(tensor, [0] * len(size), size)


def with_length(tensor: tf.Tensor, axis: int, length: int) -> tf.Tensor:
    """The shape of a tensor if it were this long along an axis."""
    shape = tf.unstack(tf.shape(tensor), num=tensor.shape.rank)
    known = [own if dim is None else dim for own, dim in zip(shape, tensor.shape, strict=True)]
    known[axis] = length
    return tf.stack(known)


def most_of(lengths: Sequence[tf.Tensor]) -> tf.Tensor:
    """How many rows the replica with the most has of each tensor, and one if none has any."""
    return tf.maximum(tf.cast(tf.reduce_max(lengths[0], axis=0), tf.int32), 1)


def refuse_to_send(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
            raise value_error(
                "Workers cannot exchange values of this type.",
                "Expected dense tensors of numbers.",
                "Let the model return dense numbers, or run it in one process.",
                values=tf.type_spec_from_value(tensor),
            )
