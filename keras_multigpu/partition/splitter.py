"""Splits the graph of one device's step over replicas.

`Splitter` walks a graph once. For each operation it asks the rules how inputs have to lie, converts
those that lie otherwise, and adds the operation to the graph that is being traced. That is a local
graph: every replica runs it on its own rows, and where it needs something of the others it calls an
`Exchange`.

Variables are values here: an assignment gives a variable another value, which later reads see, and
what comes out in the end is assigned by whoever runs the step. So a step that fails leaves nothing
half done.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_multigpu.partition import randomness
from keras_multigpu.partition.facts import BRANCHES, CALLS, LOOPS, GraphFacts, is_call, passed_on
from keras_multigpu.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Items,
    Layout,
    Partial,
    Rows,
    joined,
)
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.moments import Moments, axes_of, joined_moments, moments_in
from keras_multigpu.partition.plan import RULES, Plan
from keras_multigpu.partition.rules import skipped_empty
from keras_multigpu.partition.rules.elementwise import (
    BROADCASTING,
    SAME_SHAPES,
    UNARY,
    elements,
)
from keras_multigpu.partition.rules.sums import LINEAR, LINEAR_IN_FLOATS, SCALED, SUMMED
from keras_multigpu.partition.site import LocalSite, with_entry
from keras_multigpu.partition.sizes import Size

HEAVY = {
    "MatMul",
    "BatchMatMul",
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Einsum",
    "Conv2D",
    "Conv3D",
    "DepthwiseConv2dNative",
    "Conv2DBackpropInput",
    "Conv2DBackpropFilter",
    "Conv3DBackpropInputV2",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
}
ELEMENTWISE = {*UNARY, *BROADCASTING, *SAME_SHAPES}
# What they make is cheap, so a replica makes its own rows of it.
MAKERS = {"Fill", "BroadcastTo", "Tile", "Range", *randomness.SLICED}
ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
SCATTERED = {
    "ResourceScatterAdd": tf.tensor_scatter_nd_add,
    "ResourceScatterSub": tf.tensor_scatter_nd_sub,
    "ResourceScatterUpdate": tf.tensor_scatter_nd_update,
    "ResourceScatterMax": tf.tensor_scatter_nd_max,
    "ResourceScatterMin": tf.tensor_scatter_nd_min,
}
WRITES = {*ASSIGNMENTS, *SCATTERED}
# All that may stand between an open sum and the place where it is taken.
OPEN = {*LINEAR, *LINEAR_IN_FLOATS, *SCALED, "Cast", *WRITES, *CALLS}
ADDED = {"AddN", "AddV2", "Add", "Sub"}
SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
# What runs once and not on each replica: it has effects, or draws from a state of its own.
COUNTED_AS_EFFECTS = {"PrintV2", "Print", "PyFunc", "EagerPyFunc", "PyFuncStateless"}
# As many as a tensor has at most in TensorFlow's kernels.
AXES = 8
UNSENT = (tf.string, tf.resource, tf.variant)
SENT_AS = {
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


class CannotSplit(Exception):
    """A step has an operation that replicas cannot share, nor each compute whole.

    Args:
        reason: What stands in the way.
        op: The operation.
    """

    def __init__(self, reason: str, op: tf.Operation | None = None) -> None:
        super().__init__(reason if op is None else f"{reason}: {op.type} ({op.name})")
        self.op = op


class Exchange(Protocol):
    """How replicas exchange values inside of the local graph."""

    replicas: int

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
        scope: "Scope | None" = None,
        made_of: "Sequence[Value]" = (),
        variable: int | None = None,
    ) -> None:
        self.layout = layout
        self._local = local
        self.source, self.scope, self.made_of = source, scope, made_of
        self.variable = variable
        self.home = tf.compat.v1.get_default_graph()
        self.converted: dict[Layout, tf.Tensor] = {}

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has asked for it yet."""
        return callable(self._local)

    @property
    def local(self) -> tf.Tensor:
        if callable(self._local):
            with self.home.as_default():
                self._local = self._local()
        return self._local


class Scope:
    """One graph of the global step: what is known of its tensors, and what became of them.

    Args:
        facts: What is known.
        state: The values of variables, by number.
        in_loop: Whether it is the body of a loop.
        is_called: Whether its results are used where it is called.
    """

    def __init__(
        self,
        facts: GraphFacts,
        state: dict[int, Value],
        in_loop: bool = False,
        is_called: bool = False,
    ) -> None:
        self.facts, self.state, self.in_loop = facts, state, in_loop
        self.is_called = is_called
        self.layouts: dict[str, Layout] = {}
        self.values: dict[str, Value] = {}
        self.exchanges = False
        """Whether replicas need something of each other in it."""
        self._needed = {op.name for op in facts.operations}
        self._outputs = {tensor.name for tensor in facts.graph.outputs}
        self._open: dict[str, bool] = {}
        self.moments = {} if in_loop else moments_in(facts.operations)

    def stays_open(self, tensor: tf.Tensor) -> bool:
        """Whether it is better to hand parts of a tensor on than to sum them.

        All that use it have to do with parts, and either add several of them or make them smaller:
        then one sum is enough, or a smaller one.
        """
        if tensor.name in self._outputs and not (self.in_loop or self.is_called):
            return False
        if tensor.name not in self._open:
            users = [op for op in tensor.consumers() if op.name in self._needed]
            # In a loop nothing can be summed.
            self._open[tensor.name] = all(
                op.type in OPEN and (self.in_loop or self._gains(tensor, op)) for op in users
            )
        return self._open[tensor.name]

    def _gains(self, tensor: tf.Tensor, user: tf.Operation) -> bool:
        """Whether it is better to sum what a user makes of parts."""
        if user.type in CALLS or user.type in WRITES:
            return user.type in CALLS
        others = [each for each in user.inputs if each is not tensor]
        if user.type in ADDED and others:
            return all(self.layouts.get(each.name, PARTIAL) == PARTIAL for each in others)
        own, *made = (elements(self.facts.dims(each) or []) for each in (tensor, *user.outputs))
        if sum(made) != own:
            return sum(made) < own
        return all(self.stays_open(each) for each in user.outputs)


class Splitter:
    """Adds what one replica does of a global graph to the graph that is being traced.

    Args:
        exchange: How replicas exchange values.
        numbers: What the replica knows of its rows.
        evenly: Whether numbers that are added to a sum once are added by all replicas, each by its
            part of the examples, and not by the first. That rounds.
    """

    def __init__(self, exchange: Exchange, numbers: LocalNumbers, evenly: bool = False) -> None:
        self.exchange, self.numbers, self.evenly = exchange, numbers, evenly
        self.gathered: collections.Counter[str] = collections.Counter()
        """How many operations of each type took whole values although rows were there."""
        self.heavy: collections.Counter[str] = collections.Counter()
        """How many products and convolutions are shared ("rows"), and how many "whole"."""
        self.moved: collections.Counter[str] = collections.Counter()
        """How many sums and gathers there are."""
        self._loops: dict[Any, tuple[Plan, bool]] = {}

    # How tensors lie.

    def lay_out(self, scope: Scope, inputs: Sequence[Layout]) -> list[Layout]:
        """The layouts of a graph's outputs, given those of its inputs."""
        for tensor, layout in zip(scope.facts.graph.inputs, inputs, strict=True):
            scope.layouts[tensor.name] = layout
        for op in scope.facts.operations:
            if op.type != "Placeholder":
                self._plan_in(op, scope)
        return [scope.layouts[tensor.name] for tensor in scope.facts.graph.outputs]

    def _plan_in(self, op: tf.Operation, scope: Scope) -> Plan:
        """Plan one operation, and note how its outputs lie."""
        ins = tuple(scope.layouts[tensor.name] for tensor in op.inputs)
        plan, exchanges = self._plan(op, ins, scope)
        for tensor, layout in zip(op.outputs, plan.out, strict=True):
            scope.layouts[tensor.name] = layout
        scope.exchanges |= exchanges or plan.combine is not None
        scope.exchanges |= any(
            is_exchange(have, need) for have, need in zip(ins, plan.need, strict=True)
        )
        return plan

    def _plan(self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope) -> tuple[Plan, bool]:
        """The plan of an operation, and whether replicas exchange something inside of it."""
        if op.type in LOOPS or op.type in BRANCHES:
            key = (id(op.graph), op.name, ins, scope.in_loop)
            if key not in self._loops:
                planned = self._plan_loop if op.type in LOOPS else self._plan_branches
                self._loops[key] = planned(op, ins, scope)
            return self._loops[key]
        if is_call(op):
            inner = Scope(scope.facts.inner[op.name][0], {}, scope.in_loop, is_called=True)
            out = tuple(self.lay_out(inner, ins))
            if inner.exchanges and is_compiled(op):
                # What XLA compiles cannot be cut.
                whole = (REPLICATED,) * len(ins)
                return Plan(whole, tuple(REPLICATED for _ in out)), False
            return Plan(ins, out), inner.exchanges
        return self._plan_operation(op, ins, scope), False

    def _plan_operation(self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan:
        whole = Plan(
            tuple(layout if isinstance(layout, Items) else REPLICATED for layout in ins),
            tuple(Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs),
        )
        if op.type in ("TensorListReserve", "EmptyTensorList"):
            return Plan(whole.need, (Items(),))
        if op.type == "ResourceGather":
            rows = ins[1] if isinstance(ins[1], Rows) else None
            batch = op.get_attr("batch_dims")
            if rows is not None and not batch:
                return Plan((REPLICATED, rows), (rows,))
            return whole
        if op.type in WRITES or (
            op.inputs and op.inputs[0].dtype == tf.resource and op.type == "ReadVariableOp"
        ):
            return whole
        if set(ins) <= {REPLICATED}:
            return whole
        if (
            all(
                scope.facts.value(tensor) is not None and is_known(scope.facts.value(tensor))
                for tensor in op.outputs
            )
            and op.outputs
        ):
            return Plan(ins, whole.out)
        if op.type in SHAPES:
            return Plan(ins, whole.out, emit=global_shape(ins))
        if op.type in ("AddN", "AddV2") and all(isinstance(layout, Items) for layout in ins):
            found = ins[0]
            for layout in ins[1:]:
                found = joined(found, layout)
            return Plan((found,) * len(ins), (found,))
        if op.type in ("Identity", "ZerosLike") and isinstance(ins[0], Items):
            return Plan(ins, ins)
        open_ins = tuple(
            REPLICATED if layout == PARTIAL and not scope.stays_open(tensor) else layout
            for layout, tensor in zip(ins, op.inputs, strict=True)
        )
        if PARTIAL in open_ins:
            found_plan = self._open(op, open_ins, scope)
            if found_plan is not None:
                return found_plan
        closed = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
        if set(closed) <= {REPLICATED}:
            return whole
        rule = RULES.get(op.type)
        plan = rule(op, closed, scope.facts) if rule else None
        if plan is not None:
            return plan
        if any(isinstance(i, Items) and i.element not in (None, REPLICATED) for i in ins):
            need = tuple(Items(REPLICATED) if isinstance(i, Items) else REPLICATED for i in ins)
            return Plan(
                need,
                tuple(
                    Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs
                ),
            )
        return Plan(
            whole.need,
            tuple(Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs),
        )

    def _open(self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan | None:
        """The plan of an operation that passes a sum on that is still to come."""
        rule = RULES.get(op.type)
        if any(isinstance(layout, Rows) for layout in ins) or rule is None:
            return None
        plan = rule(op, ins, scope.facts)
        if plan is not None and PARTIAL in plan.out:
            return plan
        # What is added once is added by the first replica.
        several = op.type == "AddN" and ins.count(PARTIAL) > 1
        if op.type in ("AddN", "AddV2", "Sub") and (several or scope.in_loop):
            dims = [scope.facts.dims(tensor) for tensor in (*op.inputs, op.outputs[0])]
            if op.outputs[0].dtype in SUMMED and all(own == dims[0] for own in dims):
                return Plan((PARTIAL,) * len(ins), (PARTIAL,))
        return None

    def _plan_loop(
        self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope
    ) -> tuple[Plan, bool]:
        condition, body = scope.facts.inner[op.name]
        fixed = passed_through(body.graph)
        # A sum that comes in open is taken first: what the body does with it may not be linear.
        ins = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
        present, pinned = list(ins), set()
        while True:
            inner = Scope(body, {}, in_loop=True)
            outs = self.lay_out(inner, present)
            after = []
            for place, (before, out) in enumerate(zip(present, outs, strict=True)):
                wanted = before if fixed[place] or place in pinned else joined(before, out)
                if wanted == REPLICATED and before != REPLICATED and not isinstance(before, Items):
                    pinned.add(place)
                after.append(wanted)
            if after == present:
                break
            if any(
                a != b and not isinstance(b, Items) for a, b in zip(after, present, strict=True)
            ):
                # What was written to a list while its writer lay otherwise does not count.
                after = [i if isinstance(i, Items) else a for i, a in zip(ins, after, strict=True)]
            present = after
        again = Scope(condition, {})
        self.lay_out(again, present)
        exchanges = (
            inner.exchanges
            or again.exchanges
            or any(
                is_exchange(out, need)
                for place, (out, need) in enumerate(zip(outs, present, strict=True))
                if not fixed[place]
            )
        )
        if exchanges and any(layout != REPLICATED for layout in present):
            # Each replica runs the loop whole.
            whole = tuple(
                Items(REPLICATED if layout.element is not None else None)
                if isinstance(layout, Items)
                else REPLICATED
                for layout in ins
            )
            if whole == ins:
                raise CannotSplit("a loop exchanges values although all are whole", op)
            plan, _ = self._plan_loop(op, whole, scope)
            return plan, False
        layouts = tuple(present)
        return Plan(layouts, layouts), False

    def _plan_branches(
        self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope
    ) -> tuple[Plan, bool]:
        need = (REPLICATED, *(REPLICATED if i == PARTIAL else i for i in ins[1:]))
        outs: list[Layout] | None = None
        exchanges, each = False, []
        for facts in scope.facts.inner[op.name]:
            inner = Scope(facts, {}, scope.in_loop)
            found = self.lay_out(inner, need[1:])
            each.append(found)
            exchanges |= inner.exchanges
            outs = (
                found if outs is None else [joined(a, b) for a, b in zip(outs, found, strict=True)]
            )
        out = tuple(REPLICATED if layout == PARTIAL else layout for layout in outs or [])
        exchanges |= any(
            is_exchange(a, b) for found in each for a, b in zip(found, out, strict=True)
        )
        if exchanges:
            whole = tuple(
                Items(REPLICATED) if isinstance(layout, Items) else REPLICATED for layout in ins
            )
            if whole == ins:
                raise CannotSplit("a condition exchanges values although all are whole", op)
            return self._plan_branches(op, whole, scope)
        return Plan(need, out), False

    # What a replica does.

    def add(self, scope: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add a graph's operations to the graph that is being traced; its results."""
        for tensor, value in zip(scope.facts.graph.inputs, inputs, strict=True):
            scope.values[tensor.name] = value
            scope.layouts[tensor.name] = value.layout
        for op in scope.facts.operations:
            if op.type == "Placeholder":
                if op.outputs[0].name not in scope.values:
                    raise CannotSplit("a placeholder without a value", op)
                continue
            self._add_operation(op, scope)
        return [scope.values[tensor.name] for tensor in scope.facts.graph.outputs]

    def _add_operation(self, op: tf.Operation, scope: Scope) -> None:
        inputs = [scope.values[tensor.name] for tensor in op.inputs]
        if is_call(op):
            facts = scope.facts.inner[op.name][0]
            inner = Scope(facts, scope.state, scope.in_loop, is_called=True)
            if is_compiled(op):
                plan = self._plan_in(op, scope)
                pairs = zip(inputs, plan.need, strict=True)
                outs = self._add_compiled(inner, [self._laid(v, need) for v, need in pairs])
            else:
                outs = self.add(inner, inputs)
            for tensor, value in zip(op.outputs, outs, strict=True):
                scope.values[tensor.name], scope.layouts[tensor.name] = value, value.layout
            return
        if inputs and inputs[0].variable is not None and self._add_access(op, inputs, scope):
            return
        if op.name in scope.moments:
            self._add_moments(scope.moments[op.name], inputs[0], scope)
        if op.outputs and op.outputs[0].name in scope.values:
            return
        plan = self._plan_in(op, scope)
        self._count(op, plan, inputs)
        if op.type in LOOPS:
            self._add_loop(op, plan, inputs, scope)
        elif op.type in BRANCHES:
            self._add_branches(op, plan, inputs, scope)
        else:
            self._add_plain(op, plan, inputs, scope)

    def _add_compiled(self, inner: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add a function that XLA compiles, because TensorFlow has no kernels for it."""
        layouts: list[Layout] = []
        if written_inputs(inner.facts):
            return self.add(inner, inputs)
        moving = [value for value in inputs if value.variable is None]

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            own = iter(tensors)
            given = [
                value
                if value.variable is not None
                else Value(value.layout, next(own), value.source)
                for value in inputs
            ]
            outs = self.add(inner, given)
            layouts.extend(value.layout for value in outs)
            return [value.local for value in outs]

        call = tf.function(function, autograph=False, jit_compile=True)
        outs = call(*[value.local for value in moving])
        return [Value(layout, out) for layout, out in zip(layouts, outs, strict=True)]

    def _add_moments(self, moments: Moments, value: Value, scope: Scope) -> None:
        """Take a mean and a variance together, if they are taken along rows."""
        axes = axes_of(moments, value.layout, scope.facts)
        if axes is None or not isinstance(value.layout, Rows):
            return
        made = joined_moments(
            value.local, axes, value.layout, self._sum, scope.facts, moments, self.numbers
        )
        for op, tensor in zip((moments.mean, moments.variance), made, strict=True):
            out = op.outputs[0]
            scope.values[out.name] = Value(REPLICATED, tensor, out, scope)
            scope.layouts[out.name] = REPLICATED

    def _count(self, op: tf.Operation, plan: Plan, inputs: Sequence[Value]) -> None:
        lies = (*plan.need, *plan.out)
        if op.type in HEAVY:
            self.heavy["whole" if all(i == REPLICATED for i in lies) else "rows"] += 1
        if op.type in LOOPS or op.type in BRANCHES:
            return
        came = any(isinstance(value.layout, Rows) for value in inputs)
        if came and plan.combine is None and not any(isinstance(i, Rows) for i in lies):
            self.gathered[op.type] += 1

    def _set(self, op: tf.Operation, plan: Plan, outs: Any, inputs: Any, scope: Scope) -> None:
        for tensor, layout, local in zip(op.outputs, plan.out, outs, strict=True):
            scope.values[tensor.name] = Value(layout, local, tensor, scope, inputs)

    def _add_plain(self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        facts = scope.facts
        known = [facts.value(tensor) for tensor in op.outputs]
        if op.type != "Const" and known and all(is_known(value) for value in known):
            outs = [
                lambda value=value, tensor=tensor: self._known(value, tensor)
                for value, tensor in zip(known, op.outputs, strict=True)
            ]
            self._set(op, plan, outs, inputs, scope)
            return
        if set(plan.need) <= {REPLICATED} and (op.type in MAKERS or self._is_lazy(op, inputs)):
            out = op.outputs[0]
            scope.values[out.name] = Value(
                REPLICATED, lambda: self._run(op, plan, inputs, scope)[0], out, scope, inputs
            )
            return
        self._set(op, plan, self._run(op, plan, inputs, scope), inputs, scope)

    def _is_lazy(self, op: tf.Operation, inputs: Sequence[Value]) -> bool:
        """Whether nothing need be computed before somebody asks, for perhaps he asks for rows."""
        return (
            op.type in ELEMENTWISE
            and len(op.outputs) == 1
            and any(value.is_lazy and value.layout == REPLICATED for value in inputs)
        )

    def _run(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> list[tf.Tensor]:
        given = [self.convert(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        site = SplitSite(op, self.numbers)
        if runs_once(op):
            return self._once(op, site, given, scope)
        outs = self._unless_empty(op, plan, site, given, scope)
        if plan.combine:
            outs = [self._combined(plan.combine, outs[0])]
        self._tell_shapes(op, plan, outs, scope)
        return list(outs)

    def _unless_empty(
        self,
        op: tf.Operation,
        plan: Plan,
        site: "SplitSite",
        given: list[tf.Tensor],
        scope: Scope,
    ) -> list[tf.Tensor]:
        """A replica's part of an operation; nothing, where its kernel fails without rows."""

        def run() -> list[tf.Tensor]:
            return list(plan.emit(site, given) if plan.emit else site.run(given))

        dims = [scope.facts.dims(tensor) for tensor in op.outputs]
        known = all(own is not None and None not in own for own in dims)
        if not skipped_empty(op, plan) or not known:
            return run()
        rows = next(layout for layout in plan.need if isinstance(layout, Rows))
        shapes = []
        for own, layout in zip(dims, plan.out, strict=True):
            shape = [self.numbers.number(dim) for dim in own]  # type: ignore[union-attr,arg-type]
            if isinstance(layout, Rows):
                shape[layout.axis] = self.numbers.local_length(layout.blocks)
            shapes.append(tf.stack(shape) if shape else tf.zeros([0], tf.int32))

        def nothing() -> list[tf.Tensor]:
            return [
                tf.zeros(shape, tensor.dtype)
                for shape, tensor in zip(shapes, op.outputs, strict=True)
            ]

        some = self.numbers.local_length(rows.blocks) > 0
        return list(tf.nest.flatten(tf.cond(some, run, nothing)))

    def _tell_shapes(
        self, op: tf.Operation, plan: Plan, outs: Sequence[tf.Tensor], scope: Scope
    ) -> None:
        for tensor, layout, out in zip(op.outputs, plan.out, outs, strict=True):
            dims = scope.facts.dims(tensor)
            if dims is None or tensor.dtype in (tf.resource, tf.variant):
                continue
            own = [dim if isinstance(dim, int) else None for dim in dims]
            if isinstance(layout, Rows):
                own[layout.axis] = None
            if out.shape.rank is None or not out.shape.is_fully_defined():
                out.set_shape(own)

    def _known(self, value: np.ndarray, tensor: tf.Tensor) -> tf.Tensor:
        return tensor_of_sizes(value, tensor.dtype, self.numbers)

    def again(self, value: Value, inputs: Sequence[tf.Tensor], whole: bool) -> tf.Tensor:
        """What the operation that made a value makes of other inputs, which lie as its own do.

        Args:
            value: The value.
            inputs: The other inputs.
            whole: Whether they are whole instead, for the operation itself.
        """
        assert value.source is not None and value.scope is not None
        op, site = value.source.op, SplitSite(value.source.op, self.numbers)
        plan = self._plan_operation(op, tuple(each.layout for each in value.made_of), value.scope)
        outs = plan.emit(site, list(inputs)) if plan.emit and not whole else site.run(inputs)
        return outs[value.source.value_index]

    def _once(
        self, op: tf.Operation, site: "SplitSite", given: list[tf.Tensor], scope: Scope
    ) -> list[tf.Tensor]:
        """What the first replica alone computes; the others get it."""
        if self.exchange.replicas == 1:
            return site.run(given)
        if not op.outputs:
            tf.cond(
                self.numbers.is_first,
                lambda: (site.run(given), tf.constant(True))[1],
                lambda: tf.constant(False),
            )
            return []
        if any(tensor.dtype in UNSENT for tensor in op.outputs):
            raise CannotSplit("its result cannot be sent to the other replicas", op)
        first = self.numbers.is_first

        def run() -> list[tf.Tensor]:
            found = site.run(given)
            shapes = [tf.shape(tensor) for tensor in found]
            padded = [tf.pad(shape, [[0, AXES - tf.size(shape)]]) for shape in shapes]
            ranks = [tf.size(shape) for shape in shapes]
            return [tf.reshape(tensor, [-1]) for tensor in found] + padded + ranks

        def nothing() -> list[tf.Tensor]:
            count = len(op.outputs)
            flat = [tf.zeros([0], tensor.dtype) for tensor in op.outputs]
            return flat + [tf.zeros([AXES], tf.int32)] * count + [tf.constant(0)] * count

        outs = list(tf.cond(first, run, nothing))
        count, results = len(op.outputs), []
        for place, tensor in enumerate(op.outputs):
            # The others do not know how large it is.
            shape, rank = self._sum(outs[count + place]), self._sum(outs[2 * count + place])
            size = tf.reduce_prod(tf.where(tf.range(AXES) < rank, shape, 1))
            flat = outs[place]
            flat = tf.cond(first, lambda f=flat: f, lambda f=flat, n=size: tf.zeros([n], f.dtype))
            whole = tf.reshape(self._sum(flat), shape[:rank])
            whole.set_shape(tensor.shape)
            results.append(whole)
        return results

    # Variables.

    def _add_access(self, op: tf.Operation, inputs: list[Value], scope: Scope) -> bool:
        """Read or assign a variable; False where it is only handed on."""
        if op.type in (*LOOPS, *BRANCHES) or is_call(op):
            return False
        number = inputs[0].variable
        if number is None:
            return False
        present = scope.state[number]
        if op.type == "ReadVariableOp":
            scope.values[op.outputs[0].name] = present
            scope.layouts[op.outputs[0].name] = present.layout
        elif op.type == "Identity":
            scope.values[op.outputs[0].name] = inputs[0]
            scope.layouts[op.outputs[0].name] = REPLICATED
        elif op.type in ASSIGNMENTS:
            if op.type != "AssignVariableOp":
                new = self.convert(inputs[1], REPLICATED)
                before = self.convert(present, REPLICATED)
                new = before + new if "Add" in op.type else before - new
                scope.state[number] = Value(REPLICATED, new, None, scope)
            else:
                scope.state[number] = inputs[1]
        elif op.type in SCATTERED:
            places, updates = (self.convert(value, REPLICATED) for value in inputs[1:])
            before = self.convert(present, REPLICATED)
            new = SCATTERED[op.type](before, places[..., tf.newaxis], updates)
            scope.state[number] = Value(REPLICATED, new, None, scope)
        elif op.type == "ResourceGather":
            plan = self._plan_in(op, scope)
            before = self.convert(present, REPLICATED)
            places = self.convert(inputs[1], plan.need[1])
            out = tf.gather(before, places, batch_dims=op.get_attr("batch_dims"))
            self._tell_shapes(op, plan, [out], scope)
            self._set(op, plan, [out], inputs, scope)
        elif op.type in ("VariableShape", "VarIsInitializedOp"):
            shape = tf.shape(self.convert(present, REPLICATED))
            out = shape if op.type == "VariableShape" else tf.constant(True)
            self._set(op, Plan((REPLICATED,), (REPLICATED,)), [out], inputs, scope)
            scope.layouts[op.outputs[0].name] = REPLICATED
        else:
            raise CannotSplit("it uses a variable in a way that is not known", op)
        return True

    # Loops and conditions.

    def _add_branches(
        self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope
    ) -> None:
        given = [self._laid(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        graphs = scope.facts.inner[op.name]
        places = {place for facts in graphs for place in written_inputs(facts)}
        written = variables_of([given[1 + place] for place in places])
        for number in written:
            scope.state[number] = self._laid(scope.state[number], REPLICATED)

        def branch(facts: GraphFacts) -> Any:
            def run() -> list[tf.Tensor]:
                inner = Scope(facts, dict(scope.state), scope.in_loop)
                outs = self.add(inner, given[1:])
                found = [
                    self.convert(value, layout)
                    for value, layout in zip(outs, plan.out, strict=True)
                ]
                found += [self.convert(inner.state[number], REPLICATED) for number in written]
                return [tf.identity(tensor) for tensor in found]

            return run

        index = given[0].local
        if "Case" in op.type:
            flat = tf.switch_case(index, [branch(facts) for facts in graphs])
        else:
            chosen = index if index.dtype == tf.bool else tf.cast(index, tf.bool)
            flat = tf.cond(chosen, *[branch(facts) for facts in graphs])
        outs = list(tf.nest.flatten(flat)) if plan.out or written else []
        for number, new in zip(written, outs[len(plan.out) :], strict=True):
            scope.state[number] = Value(REPLICATED, new, None, scope)
        outs = outs[: len(plan.out)]
        self._tell_shapes(op, plan, outs, scope)
        self._set(op, plan, outs, inputs, scope)

    def _laid(self, value: Value, layout: Layout) -> Value:
        """A value in another layout."""
        if value.variable is not None or value.layout == layout:
            return value
        return Value(layout, self.convert(value, layout), value.source, value.scope, value.made_of)

    def _add_loop(self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        given = [self._laid(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        condition, body = scope.facts.inner[op.name]
        fixed = passed_through(body.graph)
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        written = variables_of([given[place] for place in written_inputs(body)])
        start = [tf.identity(given[place].local) for place in moving]
        start += [tf.identity(self.convert(scope.state[n], REPLICATED)) for n in written]

        def inner(facts: GraphFacts, state: Sequence[tf.Tensor]) -> tuple[Scope, list[Value]]:
            own = iter(state)
            values = []
            for place, value in enumerate(given):
                if fixed[place]:
                    values.append(value)
                    continue
                tensor = next(own)
                dims = facts.dims(facts.graph.inputs[place])
                if dims is not None and tensor.dtype not in (tf.variant, tf.resource):
                    shape = [dim if isinstance(dim, int) else None for dim in dims]
                    if isinstance(value.layout, Rows):
                        shape[value.layout.axis] = None
                    tensor.set_shape(shape)
                values.append(Value(value.layout, tensor, value.source))
            variables = dict(scope.state)
            for number in written:
                variables[number] = Value(REPLICATED, next(own))
            return Scope(facts, variables, in_loop=facts is body), values

        def test(*state: tf.Tensor) -> tf.Tensor:
            own, values = inner(condition, state)
            return self.convert(self.add(own, values)[0], REPLICATED)

        def turn(*state: tf.Tensor) -> list[tf.Tensor]:
            own, values = inner(body, state)
            outs = self.add(own, values)
            found = [self.convert(outs[place], plan.out[place]) for place in moving]
            found += [self.convert(own.state[number], REPLICATED) for number in written]
            return [tf.identity(tensor) for tensor in found]

        shapes = [
            tensor.shape if tensor.dtype == tf.variant else tf.TensorShape(None) for tensor in start
        ]
        ended = list(tf.while_loop(test, turn, start, shape_invariants=shapes)) if start else []
        for place, tensor in zip(moving, ended, strict=False):
            out = op.outputs[place]
            self._tell_shapes_of(out, plan.out[place], tensor, scope)
            scope.values[out.name] = Value(plan.out[place], tensor, out, scope)
        for number, tensor in zip(written, ended[len(moving) :], strict=True):
            scope.state[number] = Value(REPLICATED, tensor, None, scope)
        for place, value in enumerate(given):
            if fixed[place]:
                scope.values[op.outputs[place].name] = value
            scope.layouts[op.outputs[place].name] = plan.out[place]

    def _tell_shapes_of(
        self, source: tf.Tensor, layout: Layout, tensor: tf.Tensor, scope: Scope
    ) -> None:
        dims = scope.facts.dims(source)
        if dims is None or source.dtype in (tf.resource, tf.variant):
            return
        own = [dim if isinstance(dim, int) else None for dim in dims]
        if isinstance(layout, Rows):
            own[layout.axis] = None
        tensor.set_shape(own)

    # Conversions.

    def convert(self, value: Value, layout: Layout) -> tf.Tensor:
        """What this replica has of a value that lies so."""
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
                return self._sum(value.local)
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
        return self._sliced(value.local, layout) if made is None else made

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        self.moved["sum"] += 1
        if tensor.dtype in UNSENT:
            raise CannotSplit(f"values of the type {tensor.dtype.name} cannot be summed")
        sent = SENT_AS.get(tensor.dtype)
        shape = tensor.shape
        summed = self.exchange.sum(tensor if sent is None else tf.cast(tensor, sent))
        summed = summed if sent is None else tf.cast(summed, tensor.dtype)
        summed.set_shape(shape)
        return summed

    def _gathered(self, value: Value) -> tf.Tensor:
        """The whole of what lies in rows: each replica puts its own at their places."""
        layout = value.layout
        assert isinstance(layout, Rows)
        self.moved["gather"] += 1
        local, axis = value.local, layout.axis
        if local.dtype in UNSENT:
            raise CannotSplit(f"rows of the type {local.dtype.name} cannot be gathered", local.op)
        rank = local.shape.rank
        if rank is None:
            raise CannotSplit("rows of an unknown number of axes cannot be gathered", local.op)
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
            pads = (
                [[0, 0]] * axis + [[before, whole - before - length]] + [[0, 0]] * (rank - axis - 1)
            )
            placed.append(tf.pad(piece, pads))
            done = done + whole
        full = placed[0] if len(placed) == 1 else tf.concat(placed, axis)
        return self._sum(full)

    def _sliced(self, whole: tf.Tensor, layout: Rows) -> tf.Tensor:
        rank, axis = whole.shape.rank, layout.axis
        parts = []
        for first, length in self.numbers.ranges(layout.blocks):
            if rank is None:
                parts.append(tf.gather(whole, tf.range(first, first + length), axis=axis))
            else:
                begin = [first if at == axis else 0 for at in range(rank)]
                size = [length if at == axis else -1 for at in range(rank)]
                parts.append(tf.slice(whole, begin, size))
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis)

    def _made_in_rows(self, value: Value, layout: Rows, depth: int) -> tf.Tensor | None:
        """A replica's rows of what is cheap to make, made by itself; None if it is not."""
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
        site = SplitSite(op, self.numbers)
        if op.type == "Fill":
            shape = inputs[0].local
            return site.run([site.local_shape(shape, layout), inputs[1].local])[0]
        if op.type == "Range" and len(layout.blocks) == 1:
            ((first, length),) = self.numbers.ranges(layout.blocks)
            start, _, delta = (each.local for each in inputs)
            offset = start + tf.cast(first, start.dtype) * delta
            return tf.cast(tf.range(length), start.dtype) * delta + offset
        if randomness.has_slices(op) and layout.axis == 0:
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
        """A list whose elements lie otherwise: what made it is made again for them."""
        have = value.layout
        if not isinstance(have, Items) or not isinstance(layout, Items):
            raise CannotSplit(f"{have} cannot become {layout}")
        if have.element in (None, REPLICATED) and layout.element in (None, REPLICATED):
            return value.local
        op = None if value.source is None else value.source.op
        if op is not None and value.made_of:
            site = SplitSite(op, self.numbers)
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

    def _combined(self, kind: str, local: tf.Tensor) -> tf.Tensor:
        """What all replicas' results of a reduction are together."""
        place = tf.one_hot(self.numbers.replica, self.exchange.replicas, dtype=tf.int32)
        place = tf.reshape(place, [-1, *[1] * local.shape.rank])
        stacked = tf.where(tf.cast(place, tf.bool), local[tf.newaxis], tf.zeros_like(local))
        everyones = self._sum(stacked)
        reductions: Mapping[str, Any] = {
            "Max": tf.reduce_max,
            "Min": tf.reduce_min,
            "Prod": tf.reduce_prod,
            "All": tf.reduce_all,
            "Any": tf.reduce_any,
        }
        return reductions[kind](everyones, axis=0)


class SplitSite(LocalSite):
    """A site whose numbers are those of the whole local graph.

    Args:
        op: The operation of the global graph.
        numbers: What the replica knows of its rows.
    """

    def __init__(self, op: tf.Operation, numbers: LocalNumbers) -> None:
        super().__init__(op, numbers.sizes, numbers.own)
        self.numbers = numbers
        self.number = numbers.number  # type: ignore[method-assign]
        self.local_length = numbers.local_length  # type: ignore[method-assign]


def variables_of(handles: Sequence[Value]) -> list[int]:
    """The numbers of the variables that handles stand for."""
    return sorted({value.variable for value in handles if value.variable is not None})


def is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles a function that is called."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def element_shape(site: LocalSite, shape: tf.Tensor, element: Layout | None) -> tf.Tensor:
    """A replica's shape of elements that lie so."""
    known = tf.get_static_value(shape)
    if not isinstance(element, Rows) or shape.shape.rank != 1:
        return shape
    if known is not None and known[element.axis] < 0:
        return shape
    return site.local_shape(shape, element)


def stacked_layout(element: Layout | None) -> Layout:
    """How the elements of a list lie as one tensor."""
    return element.at(element.axis + 1) if isinstance(element, Rows) else REPLICATED


def is_exchange(have: Layout, need: Layout) -> bool:
    """Whether replicas must hear of each other for this conversion."""
    if have == need or have == REPLICATED:
        return False
    return not (isinstance(have, Items) and have.element in (None, REPLICATED))


def tensor_of_sizes(value: np.ndarray, dtype: tf.DType, numbers: LocalNumbers) -> tf.Tensor:
    """A tensor of known sizes."""
    if not any(isinstance(entry, Size) for entry in value.ravel()):
        return tf.constant(np.array(value.tolist()).reshape(value.shape), dtype, shape=value.shape)
    entries = [tf.cast(numbers.number(e), dtype) for e in value.ravel()]
    return tf.reshape(tf.stack(entries), value.shape)


def is_known(value: np.ndarray | None) -> bool:
    return value is not None and not any(entry is None for entry in value.ravel())


def runs_once(op: tf.Operation) -> bool:
    """Whether one replica alone may run an operation: it has effects or a state of its own."""
    if op.type in COUNTED_AS_EFFECTS:
        return True
    return bool(
        op.op_def.is_stateful
        and not any(t.dtype == tf.resource for t in op.inputs)
        and op.type not in ("Assert", "StatelessWhile", "StatelessIf", "Placeholder")
        and not op.type.startswith(("TensorList", "EmptyTensorList", "Lookup", "HashTable"))
    )


def passed_through(graph: Any) -> list[bool]:
    """Which variables of a loop its body hands on as they are."""
    return [passed_on(out) is given for out, given in zip(graph.outputs, graph.inputs, strict=True)]


def written_inputs(facts: GraphFacts) -> set[int]:
    """At which places a graph takes handles of variables that it assigns."""
    places = {tensor.name: place for place, tensor in enumerate(facts.graph.inputs)}
    found: set[int] = set()
    for op in facts.operations:
        if op.type in WRITES:
            source = passed_on(op.inputs[0])
            if source.name in places:
                found.add(places[source.name])
        elif op.name in facts.inner:
            shift = 1 if op.type in BRANCHES else 0
            for inner in facts.inner[op.name]:
                for place in written_inputs(inner):
                    source = passed_on(op.inputs[place + shift])
                    if source.name in places:
                        found.add(places[source.name])
    return found


def global_shape(ins: tuple[Layout, ...]) -> Any:
    """What adds the global shape of a tensor that lies in rows."""

    def emit(site: Any, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        made = site.run(inputs)
        rows = [layout for layout in ins if isinstance(layout, Rows)]
        if site.op.type == "Rank" or not rows:
            return list(made)
        if site.op.type == "Size":
            # The whole has as many times more elements as rows, but there may be none here.
            (layout,) = rows
            shape = with_entry(tf.shape(inputs[0]), layout.axis, whole_length(site, layout))
            return [tf.cast(tf.reduce_prod(shape), made[0].dtype)]
        return [
            with_entry(shape, layout.axis, whole_length(site, layout))
            if isinstance(layout, Rows)
            else shape
            for shape, layout in zip(made, ins, strict=True)
        ]

    return emit


def whole_length(site: Any, layout: Rows) -> tf.Tensor:
    numbers = site.numbers
    total = [numbers.number(numbers.batches[batch] * factor) for batch, factor in layout.blocks]
    return tf.add_n(total)
