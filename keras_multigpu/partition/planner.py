"""Decides the layout of each tensor of a step.

`Planner` walks a graph without adding anything to one. It asks the rules; where none knows an
operation, its inputs are gathered. Loops and conditions are entered: what goes round in a loop gets
a layout that fits both its start and what the body makes of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts import (
    BRANCHES,
    CALLS,
    LOOPS,
    GraphFacts,
    is_call,
    passed_through,
)
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout, Rows, joined
from keras_multigpu.partition.moments import moments_in
from keras_multigpu.partition.plan import RULES, Plan
from keras_multigpu.partition.randomness import drawn, has_slices, rows_drawn
from keras_multigpu.partition.rules.elementwise import elements
from keras_multigpu.partition.rules.shapes import COUNTS, counted
from keras_multigpu.partition.rules.sums import LINEAR, LINEAR_IN_FLOATS, SCALED, SUMMED
from keras_multigpu.partition.sizes import AnySize
from keras_multigpu.partition.source_line import place_of

ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
SCATTERED = {
    f"ResourceScatter{kind}{name}": combine
    for kind in ("", "Nd")
    for name, combine in {
        "Add": tf.tensor_scatter_nd_add,
        "Sub": tf.tensor_scatter_nd_sub,
        "Update": tf.tensor_scatter_nd_update,
        "Max": tf.tensor_scatter_nd_max,
        "Min": tf.tensor_scatter_nd_min,
    }.items()
}
WRITES = {*ASSIGNMENTS, *SCATTERED, "ResourceStridedSliceAssign", "RngReadAndSkip"}
# All that may come between an open sum and the place where it is taken.
OPEN = {*LINEAR, *LINEAR_IN_FLOATS, *SCALED, "Cast", *WRITES, *CALLS}
ADDED = {"AddN", "AddV2", "Add", "Sub"}


# What replicas may each do with a table, unless the step changes one.
TABLE_READS = {"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"}
TABLE_WRITES = {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"}


class CannotSplit(Exception):
    """An operation of a step can neither be shared by replicas nor computed whole by each.

    Args:
        reason: What prevents the split.
        op: The operation, of the step of one device.
    """

    def __init__(self, reason: str, op: tf.Operation | None = None) -> None:
        super().__init__(reason if op is None else f"{reason}: {op.type} ({place_of(op)})")
        self.op = op


class Scope:
    """One graph of the global step, with the facts, layouts and values of its tensors.

    Args:
        facts: What is known.
        state: The values of variables, by number.
        in_loop: Whether it is the body of a loop.
        is_called: Whether its results are used where it is called.
    """

    def __init__(
        self,
        facts: GraphFacts,
        state: dict[int, Any],
        in_loop: bool = False,
        is_called: bool = False,
    ) -> None:
        self.facts, self.state, self.in_loop = facts, state, in_loop
        self.is_called = is_called
        self.may_exchange = False
        """Whether replicas may exchange something in it, which not all loops and branches can."""
        self.times: AnySize = 1
        """How often it runs in a step, as far as that is known."""
        self.layouts: dict[str, Layout] = {}
        self.values: dict[str, Any] = {}
        self.exchanges = False
        """Whether replicas need something of each other in it."""
        self._needed = {op.name for op in facts.operations}
        self._outputs = {tensor.name for tensor in facts.graph.outputs}
        self._open: dict[str, bool] = {}
        self.moments = {} if in_loop else moments_in(facts.operations)
        self.wanted: set[int] | None = None
        """The numbers of the variables that may get new values in it; None for all."""
        self.only: set[str] | None = None
        """The names of the operations that belong to it; None for all."""

    def of_call(self, op: tf.Operation, state: dict[int, Any]) -> "Scope":
        """The scope of the function that an operation calls."""
        inner = Scope(self.facts.inner[op.name][0], state, self.in_loop, is_called=True)
        inner.may_exchange = self.may_exchange and not is_compiled(op)
        inner.times = self.times
        return inner

    def stays_open(self, tensor: tf.Tensor) -> bool:
        """Whether it is better to pass parts of a tensor on than to sum them.

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


class Planner:
    """Decides how operations are shared, and remembers its decisions on loops."""

    def __init__(self) -> None:
        self._loops: dict[Any, tuple[Plan, bool]] = {}
        self.changes_tables = False
        """Whether the step changes a lookup table, so that one replica alone may use it."""

    def lay_out(self, scope: Scope, inputs: Sequence[Layout]) -> list[Layout]:
        """The layouts of a graph's outputs, given those of its inputs."""
        for tensor, layout in zip(scope.facts.graph.inputs, inputs, strict=True):
            scope.layouts[tensor.name] = layout
        for op in scope.facts.operations:
            if op.type != "Placeholder":
                self.plan_in(op, scope)
        return [scope.layouts[tensor.name] for tensor in scope.facts.graph.outputs]

    def plan_in(self, op: tf.Operation, scope: Scope) -> Plan:
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
        """The plan of an operation, and whether replicas exchange something inside it."""
        if op.type in LOOPS or op.type in BRANCHES:
            key = (id(op.graph), op.name, ins, scope.in_loop)
            if key not in self._loops:
                planned = self._plan_loop if op.type in LOOPS else self._plan_branches
                self._loops[key] = planned(op, ins, scope)
            return self._loops[key]
        if is_call(op):
            inner = scope.of_call(op, {})
            out = tuple(self.lay_out(inner, ins))
            if inner.exchanges and is_compiled(op):
                # What XLA compiles cannot be cut.
                whole = (REPLICATED,) * len(ins)
                return Plan(whole, tuple(REPLICATED for _ in out)), False
            return Plan(ins, out), inner.exchanges
        return self.plan_operation(op, ins, scope), False

    def plan_operation(self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan:
        whole = Plan(
            tuple(layout if isinstance(layout, Items) else REPLICATED for layout in ins),
            tuple(Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs),
        )
        if op.type in ("TensorListReserve", "EmptyTensorList"):
            return Plan(whole.need, (Items(),))
        if self.changes_tables and op.type in TABLE_READS:
            return whole
        if op.type == "ResourceGather":
            rows = ins[1] if isinstance(ins[1], Rows) else None
            batch = op.get_attr("batch_dims")
            if rows is not None and not batch:
                return Plan((REPLICATED, rows), (rows,))
            return whole
        if op.type in WRITES or op.type == "ReadVariableOp":
            return whole
        if scope.may_exchange and set(ins) <= {REPLICATED}:
            rows = rows_drawn(op, scope.facts)
            if rows is not None:
                return Plan(whole.need, (rows,), emit=own_rows_drawn(rows))
        if set(ins) <= {REPLICATED}:
            return whole
        if op.outputs and all(is_known(scope.facts.value(tensor)) for tensor in op.outputs):
            return Plan(ins, whole.out)
        if op.type in COUNTS:
            return counted(op, ins, scope.facts)
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
            return Plan(whole_of(ins), whole.out)
        return whole

    def _open(self, op: tf.Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan | None:
        """The plan of an operation that passes an open sum on."""
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
            # The shapes that `AddN` adds are equal, known or not.
            equal = op.type == "AddN" or all(own == dims[0] for own in dims)
            if op.outputs[0].dtype in SUMMED and equal:
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
            whole = whole_of(ins)
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
            whole = whole_of(ins)
            if whole == ins:
                raise CannotSplit("a condition exchanges values although all are whole", op)
            return self._plan_branches(op, whole, scope)
        return Plan(need, out), False


def whole_of(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of the same values if every replica has all of them."""
    return tuple(
        Items(layout.element and REPLICATED) if isinstance(layout, Items) else REPLICATED
        for layout in layouts
    )


def own_rows_drawn(rows: Rows) -> Any:
    """A function that adds a replica's rows of a random draw."""

    def emit(site: Any, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        if has_slices(site.op, site.numbers.compiled):
            return [drawn(site.op, inputs, rows, site.numbers)]
        return [site.numbers.rows_of(site.run(inputs)[0], rows)]

    return emit


def is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles a function that is called."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def is_exchange(have: Layout, need: Layout) -> bool:
    """Whether this conversion needs an exchange between replicas."""
    if have == need or have == REPLICATED:
        return False
    return not (isinstance(have, Items) and have.element in (None, REPLICATED))


def is_known(value: np.ndarray | None) -> bool:
    return value is not None and not any(entry is None for entry in value.ravel())
