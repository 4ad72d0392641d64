"""Converts a replica's tensors from one layout to another.

Replicas add up an open sum. To gather rows, each puts its own in their places among zeros, and they
add these up. Of a whole tensor a replica takes its rows, or it computes only these, as with random
numbers, if that is cheap.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.emission.exchange import (
    LocalExchange,
    ShardedAxis,
    arrived,
    travelling,
)
from keras_multigpu.partition.facts.axes import AXES
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import ELEMENTWISE, LIST_WRITES
from keras_multigpu.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Items,
    Layout,
    Rows,
    Shard,
    is_sharded,
    stacked,
)
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.planning.planner import CannotSplit, require_sendable
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.replica import Replica, nothing
from keras_multigpu.partition.rules import randomness


class Value:
    """A tensor of the global graph, as a replica has it in the local graph.

    Args:
        layout: Its layout.
        local: This replica's part; or a function that makes it, called when it is first needed.
        source: The tensor of the global graph.
        scope: The scope of that tensor.
        made_of: The values of the inputs of its operation.
    """

    def __init__(
        self,
        layout: Layout,
        local: Any,
        source: Tensor | None = None,
        scope: "Scope | None" = None,
        made_of: "Sequence[Value]" = (),
    ) -> None:
        self.layout = layout
        self._local = local
        self.source, self.scope, self.made_of = source, scope, made_of
        self.home = tf.compat.v1.get_default_graph()
        self.converted: dict[Any, tf.Tensor] = {}
        if not callable(local):
            self._tell_shape()

    @property
    def variable(self) -> int | None:
        """The number of the variable whose handle it is, if it is one."""
        return None if self.source is None else self.source.variable

    @property
    def is_lazy(self) -> bool:
        """Whether it has not been made yet, so that a replica can make only its own rows."""
        is_constant = self.source is not None and self.source.op.type == "Const"
        return callable(self._local) and not is_constant

    @property
    def local(self) -> tf.Tensor:
        if callable(self._local):
            with self.home.as_default():
                self._local = self._local()
            self._tell_shape()
        return self._local

    def _tell_shape(self) -> None:
        if self.source is not None and self.scope is not None:
            tell_shape(self.scope.facts, self.source, self.layout, self._local)


class Scope:
    """What has become of the tensors and variables of a program in the local graph.

    Args:
        planned: The program, planned.
        state: The present values of the variables, by number.

    Attributes:
        values: The values of its tensors.
    """

    def __init__(self, planned: Planned, state: dict[int, Value]) -> None:
        self.planned, self.state = planned, state
        self.program, self.facts = planned.program, planned.facts
        self.values: dict[Tensor, Value] = {}


class Conversions:
    """Converts values in the default graph.

    Args:
        exchange: How replicas exchange values.
        replica: This replica.
    """

    def __init__(self, exchange: LocalExchange, replica: Replica) -> None:
        self.exchange, self.replica = exchange, replica
        self._asking: Operation | None = None
        self._bucket: int | None = None
        self._used: dict[int, tf.Tensor] = {}

    @contextlib.contextmanager
    def asked_by(self, op: Operation, bucket: int | None) -> Iterator[None]:
        """Convert values for this operation.

        Args:
            bucket: The bucket of what it gathers.
        """
        before = self._asking, self._bucket
        self._asking, self._bucket = op, bucket
        try:
            yield
        finally:
            self._asking, self._bucket = before

    def note_use(self, results: Iterable[Value]) -> None:
        """Note the results of an operation that has used what its bucket has gathered."""
        made = None if self._bucket is None else next((v for v in results if not v.is_lazy), None)
        if made is not None and self._bucket is not None:
            self._used[self._bucket] = made.local

    def convert(self, value: Value, layout: Layout) -> tf.Tensor:
        """This replica's part of a value in this layout."""
        have = value.layout
        if have == layout or value.variable is not None:
            return value.local
        # Of what replicas divide, the whole is not kept for long.
        key = layout, self._bucket if is_sharded(have) else None
        if key not in value.converted:
            with value.home.as_default():
                made = value.converted[key] = self._converted(value, layout)
            # Some operations want a length that they are told to be known: MatrixDiagV3.
            if value.source is not None and value.scope is not None:
                tell_shape(value.scope.facts, value.source, layout, made)
        return value.converted[key]

    def _converted(self, value: Value, layout: Layout) -> tf.Tensor:
        have = value.layout
        if isinstance(layout, Items) or isinstance(have, Items):
            return self._converted_list(value, layout)
        if layout == REPLICATED:
            if have == PARTIAL:
                return self.sum(value.local)
            return self._gathered(value)
        if have == PARTIAL and is_sharded(layout) and self._is_scattered(value):
            return self._scattered(value.local, layout)
        if have != REPLICATED:
            whole = Value(REPLICATED, self.convert(value, REPLICATED), value.source, value.scope)
            return self.convert(whole, layout)
        if layout == PARTIAL:
            return tf.where(self.replica.is_first, value.local, nothing(value.local.dtype))
        assert isinstance(layout, Rows)
        made = self._own_rows(value, layout)
        return self.replica.rows_of(value.local, layout) if made is None else made

    def sum(self, tensor: tf.Tensor, due: tf.Tensor | None = None) -> tf.Tensor:
        """The sum of a tensor over replicas; if it may wait and is not due, a replica's own."""
        require_sendable(PARTIAL, tensor.dtype, None, self._asking)
        self._require_outermost()
        may_wait = () if due is None else (due,)
        summed = arrived(self.exchange.sum(travelling(tensor), *may_wait), tensor.dtype)
        summed.set_shape(tensor.shape)
        return summed

    def _require_outermost(self) -> None:
        if not self.replica.is_outermost:
            # Replicas exchange values between stages, and the body of a loop is all in one.
            raise CannotSplit(
                "replicas cannot exchange values inside a loop or a condition", self._asking
            )

    def _gathered(self, value: Value) -> tf.Tensor:
        """The whole of a tensor in rows."""
        layout = value.layout
        assert isinstance(layout, Rows)
        local, axis = value.local, layout.axis
        if is_sharded(layout):
            return self._gathered_shards(local, layout)
        rank = local.shape.rank
        require_sendable(layout, local.dtype, rank, self._asking)
        ranges = self.replica.ranges(layout.blocks)
        sizes = [length for _, length in ranges]
        pieces = (
            tf.split(local, tf.stack(sizes), axis, num=len(sizes)) if len(sizes) > 1 else [local]
        )
        placed, done = [], tf.constant(0, tf.int32)
        for piece, (first, length), block in zip(pieces, ranges, layout.blocks, strict=True):
            whole = self.replica.scalar(self.replica.size_of(block.batch) * block.factor)
            before = first - done
            # To XLA, sizes must not depend on the replica.
            start = 0 if self.exchange.has_equal_shares else before
            pads: list[Any] = [[0, 0]] * rank
            pads[axis] = [start, whole - start - length]
            full = tf.pad(piece, pads, constant_values=nothing(piece.dtype))
            placed.append(tf.roll(full, before, axis) if start is not before else full)
            done = done + whole
        full = placed[0] if len(placed) == 1 else tf.concat(placed, axis)
        return self.sum(full)

    def _gathered_shards(self, local: tf.Tensor, layout: Rows) -> tf.Tensor:
        """The whole of a tensor in rows of variables."""
        axes = sharded_axes(layout)
        before = self._used.get(-1 if self._bucket is None else self._bucket - 2)
        if before is not None:
            with tf.control_dependencies([before]):
                local = tf.identity(local)
        lengths = [self.replica.local_length((block,)) for block in layout.blocks]
        pieces = [local]
        if len(axes) > 1:
            pieces = tf.split(local, tf.stack(lengths), layout.axis, num=len(lengths))
        wholes = []
        for piece, axis in zip(pieces, axes, strict=True):
            whole = self._exchanged(self.exchange.gather, piece, axis)
            wholes.append(whole)
        return wholes[0] if len(wholes) == 1 else tf.concat(wholes, layout.axis)

    def _is_scattered(self, value: Value) -> bool:
        """Whether replicas need no more of an open sum than their rows."""
        scope = value.scope
        return scope is not None and value.source in scope.planned.scattered

    def _scattered(self, local: tf.Tensor, layout: Layout) -> tf.Tensor:
        """A replica's rows of an open sum."""
        assert isinstance(layout, Rows)
        (axis,) = sharded_axes(layout)
        return self._exchanged(self.exchange.scatter, local, axis)

    def _exchanged(
        self,
        exchange: Callable[[tf.Tensor, ShardedAxis], tf.Tensor],
        tensor: tf.Tensor,
        axis: ShardedAxis,
    ) -> tf.Tensor:
        self._require_outermost()
        return arrived(exchange(travelling(tensor), axis), tensor.dtype)

    def _own_rows(self, value: Value, layout: Rows) -> tf.Tensor | None:
        """This replica's rows of a whole value; None unless it can compute them cheaply."""
        if value.source is None or value.scope is None or not value.made_of:
            return None
        if any(each.layout != REPLICATED or each.variable is not None for each in value.made_of):
            return None
        facts = value.scope.facts
        dims = facts.dims(value.source)
        if dims is None or dims[layout.axis] != facts.length(layout.blocks):
            return None
        return self._compute_rows(value.source.op, value.made_of, layout, facts)

    def _compute_rows(
        self, op: Operation, inputs: Sequence[Value], layout: Rows, facts: Facts
    ) -> tf.Tensor | None:
        replica, dims = self.replica, facts.dims(op.outputs[0]) or []
        if op.type == "Fill":
            shape = replica.local_shape(inputs[0].local, layout)
            return replica.run(op, [shape, inputs[1].local])[0]
        # Floats are added up from the start, each rounded, so that their rows come after others.
        is_counted = op.outputs[0].dtype.is_integer
        if op.type == "Range" and len(layout.blocks) == 1 and is_counted:
            ((first, length),) = replica.ranges(layout.blocks)
            start, _, delta = (each.local for each in inputs)
            offset = start + tf.cast(first, start.dtype) * delta
            return tf.cast(tf.range(length), start.dtype) * delta + offset
        if randomness.has_slices(op, replica.compiled) and layout.axis == 0:
            return randomness.draw_rows(op, [each.local for each in inputs], layout, replica)
        if op.type in ("BroadcastTo", "Tile"):
            own = facts.dims(op.inputs[0])
            place = layout.axis - (len(dims) - len(own)) if own is not None else 0
            if own is None or (place >= 0 and own[place] != 1):
                return None
            changed = replica.local_shape(inputs[1].local, layout)
            return replica.run(op, [inputs[0].local, changed])[0]
        axes = AXES[op.type](op, facts) if op.type in ELEMENTWISE else None
        label = None if axes is None else axes.out[layout.axis]
        if axes is None or not isinstance(label, int):
            return None
        needs = axes.layouts(label, layout, len(inputs))
        given = [self.convert(own, need) for own, need in zip(inputs, needs, strict=True)]
        return replica.run(op, given)[0]

    def _converted_list(self, value: Value, layout: Layout) -> tf.Tensor:
        """A list with another layout of elements: the operations that made it make it again."""
        have = value.layout
        if not isinstance(have, Items) or not isinstance(layout, Items):
            raise CannotSplit(f"{have} cannot become {layout}")
        if have.element in (None, REPLICATED) and layout.element in (None, REPLICATED):
            return value.local
        op = None if value.source is None else value.source.op
        if op is not None and value.made_of:
            if op.type == "Identity":
                return self.convert(value.made_of[0], layout)
            if op.type in ("TensorListReserve", "EmptyTensorList"):
                shape, count = (each.local for each in value.made_of)
                return self.replica.run(op, [self._element_shape(shape, layout.element), count])[0]
            if op.type in LIST_WRITES:
                given = [
                    each.local if isinstance(each.layout, Items) else self.convert(each, REPLICATED)
                    for each in value.made_of
                ]
                place = LIST_WRITES[op.type]
                given[0] = self.convert(value.made_of[0], layout)
                given[place] = self.convert(value.made_of[place], layout.element or REPLICATED)
                return self.replica.run(op, given)[0]
        return self._through_a_tensor(value, have, layout)

    def _through_a_tensor(self, value: Value, have: Items, layout: Items) -> tf.Tensor:
        known = None
        if value.scope is not None and value.source is not None:
            known = value.scope.facts.elements.get(value.source)
        if known is None or known.dims is None or None in known.dims or known.dtype is None:
            raise CannotSplit(f"a list of {have.element} cannot become one of {layout.element}")
        before, after = (self.replica.shape_of(known.dims, each.element) for each in (have, layout))
        whole = tf.raw_ops.TensorListStack(
            input_handle=value.local, element_shape=before, element_dtype=known.dtype
        )
        whole.set_shape([None] * (1 + len(known.dims)))
        own = Value(stacked(have.element), whole)
        tensor = self.convert(own, stacked(layout.element))
        return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=after)

    def _element_shape(self, shape: tf.Tensor, element: Layout | None) -> tf.Tensor:
        """The shape of this replica's part of an element in this layout."""
        known = tf.get_static_value(shape)
        if not isinstance(element, Rows) or shape.shape.rank != 1:
            return shape
        if known is not None and known[element.axis] < 0:
            return shape
        return self.replica.local_shape(shape, element)

    def combine(self, kind: str, local: tf.Tensor) -> tf.Tensor:
        """The reduction, such as "Max", of all replicas' results of one."""
        place = tf.one_hot(self.replica.index, self.exchange.replicas, dtype=tf.int32)
        place = tf.reshape(place, [-1, *[1] * local.shape.rank])
        placed = tf.where(tf.cast(place, tf.bool), local[tf.newaxis], nothing(local.dtype))
        return getattr(tf, f"reduce_{kind.lower()}")(self.sum(placed), axis=0)


def sharded_axes(layout: Rows) -> list[ShardedAxis]:
    """The blocks of a tensor in rows of variables."""
    found = []
    for batch, factor in layout.blocks:
        assert isinstance(batch, Shard) and isinstance(factor, int)
        found.append(ShardedAxis(layout.axis, batch, factor))
    return found


def tell_shape(facts: Facts, source: Tensor, layout: Layout, tensor: tf.Tensor) -> None:
    """Set the static shape of a replica's part of a tensor."""
    dims = facts.dims(source)
    if dims is None or source.dtype in (tf.resource, tf.variant):
        return
    own = [dim if isinstance(dim, int) else None for dim in dims]
    if isinstance(layout, Rows):
        own[layout.axis] = None
    if not tensor.shape.is_fully_defined():
        tensor.set_shape(own)
