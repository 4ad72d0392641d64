"""Decides the layout of each tensor of a step.

`Planner` walks a graph and asks the rules. Where no rule knows an operation, its inputs are
gathered. It enters loops and conditions: a value that a loop carries gets a layout that fits both
its start and the result of the body. It adds nothing to any graph.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts import Facts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout, Rows, joined
from keras_multigpu.partition.moments import find_moments
from keras_multigpu.partition.plan import RULES, Plan
from keras_multigpu.partition.program import (
    BRANCH,
    COMPILED,
    LOOP,
    WRITES,
    Operation,
    Program,
    Tensor,
    has_effect,
)
from keras_multigpu.partition.randomness import draw_rows, has_slices, rows_drawn
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules.shapes import COUNTS, counted
from keras_multigpu.partition.rules.sums import LINEAR, SCALED, SUMMED
from keras_multigpu.partition.sizes import AnySize, elements
from keras_multigpu.partition.source_line import place_of

# Everything that may come between an open sum and the place where it is taken.
OPEN = {*LINEAR, *SCALED, "Cast", *WRITES, COMPILED}
ADDED = {"AddN", "AddV2", "Add", "Sub"}
# Each replica can read a lookup table by itself, unless the step changes one.
TABLE_READS = {"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"}
TABLE_WRITES = {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"}


class CannotSplit(Exception):
    """Replicas can neither share an operation of a step nor each compute it whole.

    Args:
        reason: What prevents it.
        op: The operation in the global graph.
        dtype: The type of the values that it is about.
    """

    def __init__(
        self, reason: str, op: Operation | None = None, dtype: tf.DType | None = None
    ) -> None:
        where = "" if op is None else f": {op.type} ({place_of(op)})"
        cure = "; move it into `dataset.map`" if op and dtype == tf.string else ""
        super().__init__(f"{reason}{where}{cure}")
        self.op = op


class Scope:
    """One program of the global step: the step itself, or one that an operation in it runs.

    Args:
        program: The program.
        facts: The facts of the step.
        state: The values of the variables, by number.
        in_loop: Whether it is the body of a loop.
        is_called: Whether its results are used where it is called.
    """

    def __init__(
        self,
        program: Program,
        facts: Facts,
        state: dict[int, Any],
        in_loop: bool = False,
        is_called: bool = False,
    ) -> None:
        self.program, self.facts = program, facts
        self.state, self.in_loop = state, in_loop
        self.is_called = is_called
        self.may_exchange = False
        """Whether replicas can exchange values in it, as they cannot in loops and branches."""
        self.exchanges = False
        """Whether the plans that were made for it exchange values."""
        self.times: AnySize = 1
        """How many times it runs in a step, if that is known."""
        self.layouts: dict[Tensor, Layout] = {}
        """The layouts of its tensors."""
        self.values: dict[Tensor, Any] = {}
        """The values of its tensors, once they are in the local graph."""
        self.moments = {} if in_loop else find_moments(program)
        self.wanted: set[int] | None = None
        """The numbers of the variables that it may assign; None for all."""
        self.only: set[Operation] | None = None
        """The operations to add to the local graph; None for all."""
        self._outputs = set(program.outputs)
        self._open: dict[Tensor, bool] = {}

    def put(self, tensor: Tensor, value: Any) -> None:
        """Note the value of a tensor."""
        self.values[tensor], self.layouts[tensor] = value, value.layout

    def of_call(self, op: Operation, state: dict[int, Any]) -> "Scope":
        """The scope of what XLA compiles."""
        inner = Scope(op.inner[0], self.facts, state, self.in_loop, is_called=True)
        inner.times = self.times
        return inner

    def stays_open(self, tensor: Tensor) -> bool:
        """Whether to pass an open sum on rather than take it.

        That is better if all its users can work with parts, and either add several of them or make
        them smaller: then one sum is enough, or a smaller one.
        """
        if tensor in self._outputs and not (self.in_loop or self.is_called):
            return False
        if tensor not in self._open:
            # In a loop no sum can be taken.
            self._open[tensor] = all(
                op.type in OPEN and (self.in_loop or self._gains(tensor, op)) for op in tensor.users
            )
        return self._open[tensor]

    def is_asserted(self, tensor: Tensor) -> bool:
        """Whether a condition serves assertions alone, as those of `tf.debugging` are."""
        return tensor not in self._outputs and all(map(self._asserts, tensor.users))

    def _asserts(self, op: Operation) -> bool:
        """Whether all that an operation does is to fail if an assertion does not hold."""
        if op.type != BRANCH:
            return op.type == "Assert"
        inside = [each for inner in op.inner for each in inner.all_operations()]
        return (
            self._outputs.isdisjoint(op.outputs)
            and not any(tensor.users for tensor in op.outputs)
            and all(each.type == "Assert" for each in inside if not each.inner and has_effect(each))
        )

    def _gains(self, tensor: Tensor, user: Operation) -> bool:
        """Whether it is better to sum the results of a user than its inputs."""
        if user.type == COMPILED or user.type in WRITES:
            return user.type == COMPILED
        others = [each for each in user.inputs if each is not tensor]
        if user.type in ADDED and others:
            return any(self.layouts.get(each, PARTIAL) == PARTIAL for each in others)
        own, *made = (elements(self.facts.dims(each) or []) for each in (tensor, *user.outputs))
        if sum(made) != own:
            return sum(made) < own
        return all(self.stays_open(each) for each in user.outputs)


class Planner:
    """Plans how replicas share operations.

    Args:
        changes_tables: Whether the step changes a lookup table, so that one replica has to read
            tables for all.
    """

    def __init__(self, changes_tables: bool) -> None:
        self.changes_tables = changes_tables
        self._loops: dict[Any, Plan] = {}

    def lay_out(self, scope: Scope, inputs: Sequence[Layout]) -> list[Layout]:
        """The layouts of a program's outputs, given those of its inputs."""
        scope.layouts.update(zip(scope.program.inputs, inputs, strict=True))
        for op in scope.program.operations:
            self.plan_in(op, scope)
        return [scope.layouts[tensor] for tensor in scope.program.outputs]

    def plan_in(self, op: Operation, scope: Scope) -> Plan:
        """Plan an operation, and note the layouts of its outputs."""
        ins = tuple(scope.layouts[tensor] for tensor in op.inputs)
        if op.type in (LOOP, BRANCH):
            key = (op, ins, scope.in_loop)
            if key not in self._loops:
                plan_inside = self._plan_loop if op.type == LOOP else self._plan_branches
                self._loops[key] = plan_inside(op, ins, scope)
            plan = self._loops[key]
        elif op.type == COMPILED:
            inner = scope.of_call(op, {})
            plan = Plan(ins, tuple(self.lay_out(inner, ins)))
            if inner.exchanges:
                # Replicas cannot exchange values inside a function that XLA compiles.
                plan = Plan((REPLICATED,) * len(ins), (REPLICATED,) * len(plan.out))
        else:
            plan = self.plan_operation(op, ins, scope)
        for tensor, layout in zip(op.outputs, plan.out, strict=True):
            scope.layouts[tensor] = layout
        scope.exchanges |= plan.combine is not None or are_exchanged(ins, plan.need)
        return plan

    def plan_operation(self, op: Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan:
        """Plan an operation that calls no function."""
        facts = scope.facts
        whole = Plan(
            tuple(layout if isinstance(layout, Items) else REPLICATED for layout in ins),
            tuple(Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs),
        )
        if op.type in ("TensorListReserve", "EmptyTensorList"):
            return Plan(whole.need, (Items(),))
        if self.changes_tables and op.type in TABLE_READS:
            return whole
        if op.type in WRITES or op.type == "ReadVariableOp":
            return whole
        if set(ins) <= {REPLICATED}:
            rows = rows_drawn(op, facts) if scope.may_exchange else None
            return whole if rows is None else draw_in_rows(op, rows)
        if op.outputs and all(is_known(facts.value(tensor)) for tensor in op.outputs):
            return Plan(ins, whole.out)
        if op.type in COUNTS:
            return counted(op, ins, facts)
        open_ins = tuple(
            REPLICATED if layout == PARTIAL and not scope.stays_open(tensor) else layout
            for layout, tensor in zip(ins, op.inputs, strict=True)
        )
        plan = self._plan_open(op, open_ins, scope) if PARTIAL in open_ins else None
        if plan is not None:
            return plan
        closed = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
        if set(closed) <= {REPLICATED}:
            return whole
        if op.type == "Assert":
            # Its data are what an error shows: the rows of the replica that fails.
            return Plan(closed, ())
        rule = RULES.get(op.type)
        plan = rule(op, closed, facts) if rule else None
        if plan is not None and plan.combine == "All" and scope.is_asserted(op.outputs[0]):
            # Whether it holds for all rows does not matter if each replica asserts its own.
            plan = replace(plan, combine=None)
        # Without a rule, lists are made whole, too.
        return plan or Plan(whole_of(ins), whole.out)

    def _plan_open(self, op: Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan | None:
        """The plan of an operation that passes an open sum on."""
        if any(isinstance(layout, Rows) for layout in ins) or op.type not in RULES:
            return None
        plan = RULES[op.type](op, ins, scope.facts)
        if plan is not None and PARTIAL in plan.out:
            return plan
        # A whole value is added by the first replica only.
        several = op.type == "AddN" and ins.count(PARTIAL) > 1
        if op.type in ("AddN", "AddV2", "Sub") and (several or scope.in_loop):
            dims = [scope.facts.dims(tensor) for tensor in (*op.inputs, op.outputs[0])]
            # `AddN` adds equal shapes, known or not.
            equal = op.type == "AddN" or all(own == dims[0] for own in dims)
            if op.outputs[0].dtype in SUMMED and equal:
                return Plan((PARTIAL,) * len(ins), (PARTIAL,))
        return None

    def _plan_loop(self, op: Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan:
        condition, body = op.inner
        fixed = body.passed_through
        # An open sum is taken before the loop: the body may not be linear in it.
        ins = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
        present, pinned = ins, set()
        while True:
            inner = Scope(body, scope.facts, {}, in_loop=True)
            outs = self.lay_out(inner, present)
            after: list[Layout] = []
            for place, (before, out) in enumerate(zip(present, outs, strict=True)):
                wanted = before if fixed[place] or place in pinned else joined(before, out)
                if wanted == REPLICATED and before != REPLICATED and not isinstance(before, Items):
                    pinned.add(place)
                after.append(wanted)
            if tuple(after) == present:
                break
            if any(
                a != b and not isinstance(b, Items) for a, b in zip(after, present, strict=True)
            ):
                # Forget what was written to lists while the values written had other layouts.
                after = [i if isinstance(i, Items) else a for i, a in zip(ins, after, strict=True)]
            present = tuple(after)
        test = Scope(condition, scope.facts, {})
        self.lay_out(test, present)
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        exchanges = (
            inner.exchanges
            or test.exchanges
            or are_exchanged([outs[n] for n in moving], [present[n] for n in moving])
        )
        if exchanges and any(layout != REPLICATED for layout in present):
            # Each replica runs the loop whole.
            return self._plan_loop(op, self._made_whole(op, ins), scope)
        return Plan(present, present)

    def _plan_branches(self, op: Operation, ins: tuple[Layout, ...], scope: Scope) -> Plan:
        need = (REPLICATED, *(REPLICATED if i == PARTIAL else i for i in ins[1:]))
        scopes = [Scope(inner, scope.facts, {}, scope.in_loop) for inner in op.inner]
        each = [self.lay_out(inner, need[1:]) for inner in scopes]
        layouts = [functools.reduce(joined, found) for found in zip(*each, strict=True)]
        out = tuple(REPLICATED if layout == PARTIAL else layout for layout in layouts)
        if any(inner.exchanges for inner in scopes) or any(
            are_exchanged(found, out) for found in each
        ):
            return self._plan_branches(op, self._made_whole(op, ins), scope)
        return Plan(need, out)

    @staticmethod
    def _made_whole(op: Operation, ins: tuple[Layout, ...]) -> tuple[Layout, ...]:
        whole = whole_of(ins)
        if whole == ins:
            raise CannotSplit("it exchanges values although all of its inputs are whole", op)
        return whole


def whole_of(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of the same values where every replica has all of them."""
    return tuple(
        Items(layout.element and REPLICATED) if isinstance(layout, Items) else REPLICATED
        for layout in layouts
    )


def draw_in_rows(op: Operation, rows: Rows) -> Plan:
    """The plan of a random draw of which each replica has its rows."""

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        if has_slices(op, replica.compiled):
            return [draw_rows(op, inputs, rows, replica)]
        return [replica.rows_of(replica.run(op, inputs)[0], rows)]

    return Plan((REPLICATED,) * len(op.inputs), (rows,), emit)


def are_exchanged(have: Sequence[Layout], need: Sequence[Layout]) -> bool:
    """Whether replicas exchange values to convert any of these layouts."""
    return any(
        one != other and one not in (REPLICATED, Items(), Items(REPLICATED))
        for one, other in zip(have, need, strict=True)
    )


def is_known(value: np.ndarray | None) -> bool:
    return value is not None and not any(entry is None for entry in value.ravel())
