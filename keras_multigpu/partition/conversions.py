"""Converts tensors of a replica from one layout to another.

A sum is taken, rows are gathered by a sum of what all replicas have at their places, and of what is
whole a replica takes its rows; or it makes them, where that is cheap, as its own random numbers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_multigpu.partition import randomness
from keras_multigpu.partition.account import Account, Moved, bytes_of
from keras_multigpu.partition.families import ELEMENTWISE
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout, Partial, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.planner import CannotSplit, Scope
from keras_multigpu.partition.site import Site, copied, with_entry
from keras_multigpu.partition.sizes import AnySize, Size

# What they make is cheap, so a replica makes its own rows of it.
MAKERS = {"Fill", "BroadcastTo", "Tile", "Range", *randomness.SLICED}
UNSENT = (tf.string, tf.resource, tf.variant)
# How replicas send numbers that they cannot add up.
SENT_AS = {
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


class Exchange(Protocol):
    """How replicas exchange values in the local graph.

    Attributes:
        replicas: How many there are.
        on_cpu: Whether some are CPUs, where more kernels fail without rows.
        has_equal_shares: Whether all have as many examples, a number that is known in the graph,
            while XLA is to compile that for all of them.
        compiled: Whether XLA compiles what they do.
    """

    replicas: int
    on_cpu: bool
    has_equal_shares: bool
    compiled: bool

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of a tensor over replicas, on each of them."""


class Value:
    """A tensor of the global graph, as the local graph has it.

    Args:
        layout: How it lies.
        local: What this replica has of it; made only when it is asked for, if it is a function.
        source: The tensor of the global graph.
        scope: The graph of that.
        made_of: The values of the inputs of its operation.
        variable: Which variable, if it is the handle of one.
    """

    def __init__(
        self,
        layout: Layout,
        local: Any,
        source: tf.Tensor | None = None,
        scope: Scope | None = None,
        made_of: "Sequence[Value]" = (),
        variable: int | None = None,
    ) -> None:
        self.layout = layout
        self._local = local
        self.source, self.scope, self.made_of = source, scope, made_of
        self.variable = variable
        self.home = tf.compat.v1.get_default_graph()
        self.converted: dict[Layout, tf.Tensor] = {}
        self.after_gather = False
        """Whether every replica computes the whole of it, because it needs rows of all."""

    @property
    def is_lazy(self) -> bool:
        """Whether it has not been made yet, so that a replica can make its rows alone."""
        is_constant = self.source is not None and self.source.op.type == "Const"
        return callable(self._local) and not is_constant

    @property
    def local(self) -> tf.Tensor:
        if callable(self._local):
            with self.home.as_default():
                self._local = self._local()
        return self._local


class Conversions:
    """Converts values in the graph that is being traced.

    Args:
        exchange: How replicas exchange values.
        numbers: What the replica knows of its rows.
        evenly: Whether numbers that are added to a sum once are added by all replicas, each by its
            part of the examples, and not by the first. That rounds.
    """

    def __init__(self, exchange: Exchange, numbers: LocalNumbers, evenly: bool = False) -> None:
        self.exchange, self.numbers, self.evenly = exchange, numbers, evenly
        self.sums_of_parts: list[tf.Tensor] = []
        """What came of the sums that are not gathers."""
        self.account = Account()
        self._asking: tuple[tf.Operation | None, AnySize] = (None, 1)

    @contextlib.contextmanager
    def asked_by(self, op: tf.Operation, times: AnySize) -> Iterator[None]:
        """Count what is converted here for this operation, which runs this often in a step."""
        before, self._asking = self._asking, (op, times)
        try:
            yield
        finally:
            self._asking = before

    def convert(self, value: Value, layout: Layout) -> tf.Tensor:
        """This replica's part of a value in this layout."""
        have = value.layout
        if have == layout or value.variable is not None:
            return value.local
        if layout not in value.converted:
            with value.home.as_default():
                value.converted[layout] = self._converted(value, layout)
        return value.converted[layout]

    def _converted(self, value: Value, layout: Layout) -> tf.Tensor:
        have = value.layout
        if isinstance(layout, Items) or isinstance(have, Items):
            return self._converted_list(value, layout)
        if layout == REPLICATED:
            if have == PARTIAL:
                self.sums_of_parts.append(self.sum(value.local, value))
                return self.sums_of_parts[-1]
            return self._gathered(value)
        if have != REPLICATED:
            whole = Value(REPLICATED, self.convert(value, REPLICATED), value.source, value.scope)
            return self.convert(whole, layout)
        if isinstance(layout, Partial):
            if self.evenly and value.local.dtype in (tf.float32, tf.float64):
                return value.local * tf.cast(self.numbers.fraction, value.local.dtype)
            return tf.where(self.numbers.is_first, value.local, tf.zeros_like(value.local))
        if not isinstance(layout, Rows):
            raise CannotSplit(f"{have} cannot become {layout}")
        made = self._made_in_rows(value, layout, 0)
        return self.numbers.rows_of(value.local, layout) if made is None else made

    def sum(self, tensor: tf.Tensor, value: Value | None = None, kind: str = "summed") -> tf.Tensor:
        """The sum of a tensor over replicas.

        Args:
            tensor: What this replica has.
            value: What the sum is in the global graph, if it is something there.
            kind: What is noted of it.
        """
        if tensor.dtype in UNSENT:
            raise CannotSplit(
                f"values of the type {tensor.dtype.name} cannot be summed", self._asking[0]
            )
        if not self.numbers.is_outermost:
            # Replicas meet between stages, which the body of a loop is not cut into.
            raise CannotSplit(
                "replicas cannot exchange values inside a loop or a condition", self._asking[0]
            )
        sent = SENT_AS.get(tensor.dtype)
        shape = tensor.shape
        op, times = self._asking
        if value is not None and value.source is not None and value.scope is not None:
            size = bytes_of(value.source, value.scope.facts)
            op = op or value.source.op
        else:
            elements = shape.num_elements()
            size = None if elements is None else elements * tensor.dtype.size
        self.account.moved.append(Moved(kind, size, op, times))
        summed = self.exchange.sum(tensor if sent is None else tf.cast(tensor, sent))
        summed = summed if sent is None else tf.cast(summed, tensor.dtype)
        summed.set_shape(shape)
        return summed

    def _gathered(self, value: Value) -> tf.Tensor:
        """The whole of a tensor in rows: each replica puts its own in their places, among zeros."""
        layout = value.layout
        assert isinstance(layout, Rows)
        local, axis = value.local, layout.axis
        if local.dtype in UNSENT:
            raise CannotSplit(
                f"rows of the type {local.dtype.name} cannot be gathered", self._asking[0]
            )
        rank = local.shape.rank
        if rank is None:
            raise CannotSplit(
                "rows of a tensor of unknown rank cannot be gathered", self._asking[0]
            )
        sizes = [length for _, length in self.numbers.ranges(layout.blocks)]
        pieces = (
            tf.split(local, tf.stack(sizes), axis, num=len(sizes)) if len(sizes) > 1 else [local]
        )
        placed, done = [], tf.constant(0, tf.int32)
        for piece, (first, length), block in zip(
            pieces, self.numbers.ranges(layout.blocks), layout.blocks, strict=True
        ):
            whole = self.numbers.number(self.numbers.batches[block.batch] * block.factor)
            before = first - done
            # To XLA, sizes must not depend on which replica it is.
            start = 0 if self.exchange.has_equal_shares else before
            pads = (
                [[0, 0]] * axis + [[start, whole - start - length]] + [[0, 0]] * (rank - axis - 1)
            )
            full = tf.pad(piece, pads)
            placed.append(tf.roll(full, before, axis) if start is not before else full)
            done = done + whole
        full = placed[0] if len(placed) == 1 else tf.concat(placed, axis)
        return self.sum(full, value, "gathered")

    def _made_in_rows(self, value: Value, layout: Rows, depth: int) -> tf.Tensor | None:
        """A replica's rows of a value that it can make by itself cheaply; None for other values."""
        if layout in value.converted:
            return value.converted[layout]
        op = None if value.source is None else value.source.op
        if op is None or value.scope is None or depth > 30 or not value.made_of:
            return None
        facts = value.scope.facts
        dims = facts.dims(value.source)
        if dims is None or dims[layout.axis] != facts.length(layout.blocks):
            return None
        if any(own.layout != REPLICATED or own.variable is not None for own in value.made_of):
            return None
        with value.home.as_default():
            made = self._own_rows(op, value, layout, dims, depth)
        if made is not None:
            value.converted[layout] = made
        return made

    def _own_rows(
        self, op: tf.Operation, value: Value, layout: Rows, dims: list[Any], depth: int
    ) -> tf.Tensor | None:
        inputs, facts = value.made_of, value.scope.facts  # type: ignore[union-attr]
        site = Site(op, self.numbers)
        if op.type == "Fill":
            shape = inputs[0].local
            return site.run([site.local_shape(shape, layout), inputs[1].local])[0]
        if op.type == "Range" and len(layout.blocks) == 1:
            ((first, length),) = self.numbers.ranges(layout.blocks)
            start, _, delta = (each.local for each in inputs)
            offset = start + tf.cast(first, start.dtype) * delta
            return tf.cast(tf.range(length), start.dtype) * delta + offset
        if randomness.has_slices(op, self.numbers.compiled) and layout.axis == 0:
            return randomness.drawn(op, [each.local for each in inputs], layout, self.numbers)
        if op.type in ("BroadcastTo", "Tile"):
            own = facts.dims(op.inputs[0])
            place = layout.axis - (len(dims) - len(own)) if own is not None else 0
            if own is None or (place >= 0 and own[place] != 1):
                return None
            changed = with_entry(
                inputs[1].local, layout.axis, self.numbers.local_length(layout.blocks)
            )
            return site.run([inputs[0].local, changed])[0]
        if op.type in ELEMENTWISE and len(op.outputs) == 1:
            given = []
            for own_value, tensor in zip(inputs, op.inputs, strict=True):
                own = facts.dims(tensor)
                if own is None:
                    return None
                place = layout.axis - (len(dims) - len(own))
                if place < 0 or own[place] == 1:
                    given.append(own_value.local)
                elif own[place] == dims[layout.axis]:
                    rows = layout.at(place)
                    part = self._made_in_rows(own_value, rows, depth + 1)
                    given.append(self.convert(own_value, rows) if part is None else part)
                else:
                    return None
            return site.run(given)[0]
        return None

    def _converted_list(self, value: Value, layout: Layout) -> tf.Tensor:
        """A list with another layout of elements: made again, by the operations that made it."""
        have = value.layout
        if not isinstance(have, Items) or not isinstance(layout, Items):
            raise CannotSplit(f"{have} cannot become {layout}")
        if have.element in (None, REPLICATED) and layout.element in (None, REPLICATED):
            return value.local
        op = None if value.source is None else value.source.op
        if op is not None and value.made_of:
            site = Site(op, self.numbers)
            if op.type == "Identity":
                return self.convert(value.made_of[0], layout)
            if op.type in ("TensorListReserve", "EmptyTensorList"):
                shape, count = (each.local for each in value.made_of)
                return site.run([element_shape(site, shape, layout.element), count])[0]
            places = {"TensorListSetItem": 2, "TensorListPushBack": 1}
            if op.type in places:
                given = [
                    each.local if isinstance(each.layout, Items) else self.convert(each, REPLICATED)
                    for each in value.made_of
                ]
                item = value.made_of[places[op.type]]
                given[0] = self.convert(value.made_of[0], layout)
                given[places[op.type]] = self.convert(item, layout.element or REPLICATED)
                return site.run(given)[0]
        return self._through_a_tensor(value, have, layout)

    def _through_a_tensor(self, value: Value, have: Items, layout: Items) -> tf.Tensor:
        known = None
        if value.scope is not None and value.source is not None:
            known = value.scope.facts.elements.get(value.source.name)
        if known is None or known.dims is None or None in known.dims or known.dtype is None:
            raise CannotSplit(f"a list of {have.element} cannot become one of {layout.element}")

        def shape(element: Layout | None) -> tf.Tensor:
            whole = [self.numbers.number(dim) for dim in known.dims]
            if isinstance(element, Rows):
                whole[element.axis] = self.numbers.local_length(element.blocks)
            return tf.stack(whole) if whole else tf.zeros([0], tf.int32)

        stacked = tf.raw_ops.TensorListStack(
            input_handle=value.local, element_shape=shape(have.element), element_dtype=known.dtype
        )
        stacked.set_shape([None] * (1 + len(known.dims)))
        own = Value(stacked_layout(have.element), stacked)
        tensor = self.convert(own, stacked_layout(layout.element))
        return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=shape(layout.element))

    def combined(self, kind: str, local: tf.Tensor) -> tf.Tensor:
        """The reduction of all replicas' results of a reduction."""
        place = tf.one_hot(self.numbers.replica, self.exchange.replicas, dtype=tf.int32)
        place = tf.reshape(place, [-1, *[1] * local.shape.rank])
        stacked = tf.where(tf.cast(place, tf.bool), local[tf.newaxis], tf.zeros_like(local))
        everyones = self.sum(stacked)
        reductions: Mapping[str, Any] = {
            "Max": tf.reduce_max,
            "Min": tf.reduce_min,
            "Prod": tf.reduce_prod,
            "All": tf.reduce_all,
            "Any": tf.reduce_any,
        }
        return reductions[kind](everyones, axis=0)


def slim_of(value: Value, axis: int) -> Callable[[], tf.Tensor] | None:
    """A function that makes a value as it was before it was broadcast; None if it was not."""
    op = None if value.source is None else value.source.op
    if op is None or value.layout != REPLICATED or not value.is_lazy or not value.made_of:
        return None
    first = value.made_of[0]
    if op.type in ("Tile", "BroadcastTo"):
        facts = value.scope.facts  # type: ignore[union-attr]
        own, dims = facts.dims(op.inputs[0]), facts.dims(op.outputs[0])
        if first.layout != REPLICATED or own is None or dims is None or len(own) != len(dims):
            return None
        if any(a is None or a not in (1, b) for a, b in zip(own, dims, strict=True)):
            return None
        # Else it has the rows of all replicas there.
        return (lambda: first.local) if own[axis] == 1 else None
    if op.type not in ("RealDiv", "Mul") or any(v.layout != REPLICATED for v in value.made_of):
        return None
    is_number = [tensor.shape.rank == 0 for tensor in op.inputs]
    if is_number not in ([False, True], [True, False]) or (is_number[0] and op.type != "Mul"):
        return None
    make = slim_of(value.made_of[is_number.index(False)], axis)
    number = value.made_of[is_number.index(True)]
    if make is None:
        return None
    order = 1 if is_number[1] else -1
    return lambda: copied(op, [make(), number.local][::order])[0]


def element_shape(site: Site, shape: tf.Tensor, element: Layout | None) -> tf.Tensor:
    """A replica's shape of elements in this layout."""
    known = tf.get_static_value(shape)
    if not isinstance(element, Rows) or shape.shape.rank != 1:
        return shape
    if known is not None and known[element.axis] < 0:
        return shape
    return site.local_shape(shape, element)


def stacked_layout(element: Layout | None) -> Layout:
    """The layout of a list's elements, stacked into one tensor."""
    return element.at(element.axis + 1) if isinstance(element, Rows) else REPLICATED


def tensor_of_sizes(value: np.ndarray, dtype: tf.DType, numbers: LocalNumbers) -> tf.Tensor:
    """A tensor whose entries are these sizes."""
    if not any(isinstance(entry, Size) for entry in value.ravel()):
        return tf.constant(np.array(value.tolist()).reshape(value.shape), dtype, shape=value.shape)
    entries = [tf.cast(numbers.number(e), dtype) for e in value.ravel()]
    return tf.reshape(tf.stack(entries), value.shape)
