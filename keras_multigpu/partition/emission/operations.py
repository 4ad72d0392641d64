"""Adds one replica's part of an operation to the local graph.

Most operations are copied, with a replica's inputs. What is cheap to make, such as a random draw,
is made when another operation asks for it, and only the rows that this one needs. An operation with
an effect or a state is run by the first replica, which sends its results to the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.emission.conversions import Conversions, Scope, Value
from keras_multigpu.partition.facts.values import COUNTS
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows, is_sharded
from keras_multigpu.partition.planning.planner import is_known
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica, nothing
from keras_multigpu.partition.rules import fails_empty
from keras_multigpu.partition.rules.plan import Plan, rows_of
from keras_multigpu.partition.sizes import Size

# TensorFlow's kernels allow no more.
MOST_AXES = 8


class Operations:
    """Adds operations that call no function and access no variable.

    Args:
        conversions: Converts their inputs.
    """

    def __init__(self, conversions: Conversions) -> None:
        self._conversions = conversions
        self._exchange, self._replica = conversions.exchange, conversions.replica

    def add(self, op: Operation, plan: Plan, inputs: Sequence[Value], scope: Scope) -> None:
        """Add a replica's part of an operation, by its plan."""
        if op.type == "Const":
            # Only on demand: half of them, shapes and axes, are replaced.
            put(op, plan.out, [lambda: self._run(op, plan, [], scope)[0]], inputs, scope)
            return
        known = [scope.facts.value(tensor) for tensor in op.outputs]
        if known and all(is_known(value) for value in known) and not wraps(op, known, inputs):
            outs = [
                lambda value=value, tensor=tensor: self._replica.tensor_of(value, tensor.dtype)
                for value, tensor in zip(known, op.outputs, strict=True)
            ]
            put(op, plan.out, outs, inputs, scope)
            return
        if not scope.planned.free.isdisjoint(op.outputs):
            # Whole only for those that ask for all of it.
            whole, out = Plan(plan.need, (REPLICATED,)), op.outputs[0]
            scope.values[out] = Value(
                REPLICATED, lambda: self._run(op, whole, inputs, scope)[0], out, scope, inputs
            )
            return
        put(op, plan.out, self._run(op, plan, inputs, scope), inputs, scope)

    def _run(
        self, op: Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> list[tf.Tensor]:
        outs = self._run_before_broadcast(op, plan, inputs, scope)
        if outs is not None:
            return outs
        given = [
            self._conversions.convert(value, need)
            for value, need in zip(inputs, plan.need, strict=True)
        ]
        if op in scope.planned.once:
            outs = self._run_once(op, given)
            rows = rows_of(plan.out)
            return outs if rows is None else [self._replica.rows_of(outs[0], rows)]
        run = run_with_rows if self._may_lack_rows(op, plan) else run_part
        outs = run(op, plan, self._replica, given)
        if PARTIAL in plan.out and is_sharded(rows_of(plan.need)):
            outs = [self._counted_once(tensor) for tensor in outs]
        return [self._conversions.combine(plan.combine, outs[0])] if plan.combine else outs

    def _counted_once(self, tensor: tf.Tensor) -> tf.Tensor:
        """An open sum over rows of a variable, which all pieces and all processes have."""
        exchange, replica = self._exchange, self._replica
        if exchange.replicas == exchange.places:
            return tensor
        counts = tf.equal(replica.index, replica.place * exchange.pieces)
        return tf.where(counts, tensor, nothing(tensor.dtype))

    def _run_before_broadcast(
        self, op: Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> list[tf.Tensor] | None:
        """An operation on inputs as they were before broadcasting; None if none was broadcast.

        The gradient of a mean is broadcast to the shape of the batch and then added to others.
        """
        if op.type not in ("Mul", "AddV2", "Sub", "AddN") or not isinstance(plan.out[0], Rows):
            return None
        if plan.emit or len(inputs) < 2 or plan.need[0] != plan.need[-1]:
            return None
        slim = [before_broadcast(value, plan.out[0].axis) for value in inputs]
        whole = [n for n, each in enumerate(slim) if each is None]
        if len(whole) in (0, len(inputs)):
            return None
        dims = scope.facts.dims(op.outputs[0])
        if any(scope.facts.dims(tensor) != dims for tensor in op.inputs):
            return None
        found = {n: self._conversions.convert(inputs[n], plan.need[n]) for n in whole}
        given = [found[n] if make is None else make() for n, make in enumerate(slim)]
        if op.type != "AddN":
            return self._replica.run(op, given)
        rest = [found[n] for n in whole]
        total = rest[0] if len(rest) == 1 else tf.add_n(rest)
        for n, each in enumerate(given):
            total = total if n in found else total + each
        return [total]

    def _may_lack_rows(self, op: Operation, plan: Plan) -> bool:
        """Whether a replica may have no rows of an operation whose kernel must have some."""
        rows = rows_of(plan.need)
        if (
            rows is None
            or self._replica.compiled
            or not fails_empty(op, plan, self._exchange.on_cpu)
        ):
            return False
        sizes = [self._replica.size_of(block.batch) for block in rows.blocks]
        # A batch of a known size is cut evenly: each replica has some of it.
        return not any(isinstance(n, int) and n >= self._exchange.replicas for n in sizes)

    def _run_once(self, op: Operation, given: list[tf.Tensor]) -> list[tf.Tensor]:
        """The results of an operation that the first replica runs for all."""
        if self._exchange.replicas == 1:
            return self._replica.run(op, given)
        first = self._replica.is_first
        if not op.outputs:
            tf.cond(
                first,
                lambda: (self._replica.run(op, given), tf.constant(True))[1],
                lambda: tf.constant(False),
            )
            return []

        def sent(tensor: tf.Tensor) -> list[tf.Tensor]:
            shape = tf.shape(tensor)
            rank = tf.size(shape)
            return [tf.reshape(tensor, [-1]), tf.pad(shape, [[0, MOST_AXES - rank]]), rank]

        def unsent(dtype: tf.DType) -> list[tf.Tensor]:
            return [tf.zeros([0], dtype), tf.zeros([MOST_AXES], tf.int32), tf.constant(0)]

        parts = tf.cond(
            first,
            lambda: [sent(tensor) for tensor in self._replica.run(op, given)],
            lambda: [unsent(tensor.dtype) for tensor in op.outputs],
        )
        results = []
        for tensor, (flat, shape, rank) in zip(op.outputs, parts, strict=True):
            # The other replicas do not know how large it is.
            shape, rank = self._conversions.sum(shape), self._conversions.sum(rank)
            size = tf.reduce_prod(tf.where(tf.range(MOST_AXES) < rank, shape, 1))
            empty = tf.fill([size], nothing(tensor.dtype))
            flat = tf.cond(first, lambda f=flat: f, lambda empty=empty: empty)
            whole = tf.reshape(self._conversions.sum(flat), shape[:rank])
            whole.set_shape(tensor.shape)
            results.append(whole)
        return results


def run_part(
    op: Operation, plan: Plan, replica: Replica, given: list[tf.Tensor]
) -> list[tf.Tensor]:
    """A replica's part of an operation, of its parts of the inputs."""
    return plan.emit(replica, given) if plan.emit else replica.run(op, given)


def run_with_rows(
    op: Operation, plan: Plan, replica: Replica, given: list[tf.Tensor]
) -> list[tf.Tensor]:
    """As `run_part`, with a row of zeros where a replica has none.

    A sum over rows stays the same, and of results in rows it is cut off. A condition around each
    kernel instead was 320 graphs of a step of MobileNetV2.
    """
    if any(tensor.shape.rank is None for tensor in (*given, *op.outputs)):
        return run_part(op, plan, replica, given)
    padded = [
        replica.padded(tensor, layout) if isinstance(layout, Rows) else tensor
        for tensor, layout in zip(given, plan.need, strict=True)
    ]
    return [
        replica.unpadded(tensor, layout) if isinstance(layout, Rows) else tensor
        for tensor, layout in zip(
            run_part(op, plan, replica.with_rows, padded), plan.out, strict=True
        )
    ]


def put(
    op: Operation, layouts: Sequence[Layout], outs: Sequence[Any], inputs: Any, scope: Scope
) -> None:
    """Note the results of an operation, or functions that make them, in their scope."""
    for tensor, layout, local in zip(op.outputs, layouts, outs, strict=True):
        scope.values[tensor] = Value(layout, local, tensor, scope, inputs)


def wraps(op: Operation, known: Sequence[Any], inputs: Sequence[Value]) -> bool:
    """Whether sizes of an operation on int64 may be wrong on one device.

    There TensorFlow has counted in int32 up to a cast, and started over from below. So only the
    operations themselves give the same, but for those that count in int64.
    """
    if not op.outputs or op.outputs[0].dtype != tf.int64 or op.type in COUNTS:
        return False
    is_open = any(isinstance(entry, Size) for value in known for entry in value.ravel())
    return is_open and all(value.layout == REPLICATED for value in inputs)


def before_broadcast(value: Value, axis: int) -> Callable[[], tf.Tensor] | None:
    """A function that makes a whole value as it was before it was broadcast along an axis.

    None if it was not broadcast along it.
    """
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
        return (lambda: first.local) if own[axis] == 1 else None
    if op.type not in ("RealDiv", "Mul") or any(v.layout != REPLICATED for v in value.made_of):
        return None
    is_number = [tensor.shape.rank == 0 for tensor in op.inputs]
    if is_number not in ([False, True], [True, False]) or (is_number[0] and op.type != "Mul"):
        return None
    make = before_broadcast(value.made_of[is_number.index(False)], axis)
    number = value.made_of[is_number.index(True)]
    if make is None:
        return None
    order = 1 if is_number[1] else -1
    return lambda: graph_internals.copy_operation(op.raw, [make(), number.local][::order])[0]
