"""Decides the layout of each tensor of a step, before anything is emitted.

`Planner` walks a program and asks the rules. Where no rule knows an operation, its inputs are
gathered. It enters loops and conditions: a value that a loop carries gets a layout that fits both
its start and the result of the body. So does a variable that a loop or a condition assigns: a read
has the layout of the value assigned before. It adds nothing to any graph.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts.axes import PRODUCTS
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import ELEMENTWISE
from keras_multigpu.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Items,
    Layout,
    Rows,
    is_one_shard,
    is_sharded,
    joined,
)
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    BRANCH,
    CLOSING,
    LOOP,
    OPEN_READ,
    TABLE_READS,
    TABLE_WRITES,
    WRITES,
    Operation,
    Program,
    Tensor,
    runs_once,
)
from keras_multigpu.partition.rules.moments import find_moments, is_along_rows
from keras_multigpu.partition.rules.plan import RULES, Plan, rows_of
from keras_multigpu.partition.rules.randomness import PHILOX, STATELESS, rows_drawn
from keras_multigpu.partition.rules.sums import LINEAR, SHAPES, SUMMED
from keras_multigpu.partition.source_line import place_of

UNSENT = (tf.string, tf.resource, tf.variant)
# A replica makes of their results what is asked for, all or its rows.
MAKERS = {"Fill", "BroadcastTo", "Tile", "Range", *STATELESS}

# What costs little, and fails for no numbers but a divisor of zero.
CHEAP = {*ELEMENTWISE, *LINEAR, *SHAPES, *ASSIGNMENTS, "Const", "ReadVariableOp", "Fill", "L2Loss"}
CHEAP |= {"IdentityN"}
CHEAP -= {"CheckNumerics", "CheckNumericsV2", "GatherV2", "GatherNd"}
DIVISIONS = {"Div", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod"}

PlanOfPrograms = tuple[Plan, tuple[Planned, ...]]
"""The plan of an operation that runs programs, and these programs, planned."""


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


class Planner:
    """Plans how replicas share the operations of a step.

    Args:
        facts: The facts of the step.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        # One replica then has to read tables for all.
        types = {op.type for op in facts.program.all_operations()}
        self._changes_tables = not types.isdisjoint(TABLE_WRITES)
        self._known: dict[Any, PlanOfPrograms] = {}

    def plan(
        self,
        program: Program,
        inputs: Sequence[Layout],
        state: Mapping[int, Layout],
        **context: bool,
    ) -> Planned:
        """Plan a program, given the layouts of its inputs and of the variables.

        Args:
            context: As for `Planned`.
        """
        planned = Planned(program, self._facts, state, **context)
        planned.layouts.update(zip(program.inputs, inputs, strict=True))
        means = find_moments(program) if planned.may_exchange else {}
        for op in program.operations:
            if op.type == "Placeholder":
                raise CannotSplit("a placeholder without a value", op)
            if op in means and is_along_rows(means[op], planned.layouts, self._facts):
                planned.moments |= dict.fromkeys(means[op], means[op])
            self._plan_in(op, planned)
        return planned

    def _plan_in(self, op: Operation, planned: Planned) -> None:
        """Plan an operation, and note the layouts of its outputs."""
        ins = tuple(planned.layouts[tensor] for tensor in op.inputs)
        before = planned.state
        if op.inner:
            plan, planned.inner[op] = self._plan_programs(op, ins, planned)
        elif op.inputs and op.inputs[0].variable is not None:
            plan = self._plan_access(op, op.inputs[0].variable, ins, planned)
        elif op in planned.moments:
            plan = Plan(ins, (REPLICATED,))
        elif op.type == CLOSING:
            plan = self._whole(op, ins)
        else:
            plan = self._plan_operation(op, ins, planned)
            if runs_once(op, self._changes_tables):
                planned.once.add(op)
        planned.plans[op] = plan
        planned.layouts.update(zip(op.outputs, plan.out, strict=True))
        planned.state = {**before, **plan.assigned}
        is_whole = not op.inner and set(plan.need) <= {REPLICATED}
        if is_whole and (op.type in MAKERS or self._is_free(op, planned)):
            planned.free.update(op.outputs)
        have = [
            REPLICATED if tensor in planned.free else layout
            for tensor, layout in zip(op.inputs, ins, strict=True)
        ]
        of_variables = [before[number] for number in plan.variables]
        planned.exchanges |= (
            plan.exchanges
            or are_exchanged(have, plan.need)
            or are_exchanged(of_variables, list(plan.variables.values()))
        )

    @staticmethod
    def _is_free(op: Operation, planned: Planned) -> bool:
        """Whether an operation on whole values is worth as little as one that it takes."""
        return op.type in ELEMENTWISE and any(
            tensor in planned.free and planned.layouts[tensor] == REPLICATED for tensor in op.inputs
        )

    def _plan_programs(
        self, op: Operation, ins: tuple[Layout, ...], planned: Planned
    ) -> PlanOfPrograms:
        """Plan an operation that runs programs."""
        numbers = {each.variable: None for each in op.inputs if each.variable is not None}
        state = {number: planned.state[number] for number in numbers}
        # The outer loop asks again for each layout that it tries.
        key = (op, ins, *state.values(), planned.in_loop, planned.may_exchange)
        if key not in self._known:
            plan_one = {LOOP: self._plan_loop, BRANCH: self._plan_branches}
            self._known[key] = plan_one.get(op.type, self._plan_compiled)(op, ins, state, planned)
        return self._known[key]

    def _plan_access(
        self, op: Operation, number: int, ins: tuple[Layout, ...], planned: Planned
    ) -> Plan:
        """Plan an operation that reads or assigns a variable."""
        present = planned.state[number]
        if op.type == "ReadVariableOp":
            return Plan(ins, (present,))
        if op.type == OPEN_READ:
            return Plan(ins, (PARTIAL,))
        if op.type == "Identity":
            return Plan(ins, ins)
        if op.type == "AssignVariableOp":
            return Plan(ins, (), assigned={number: ins[1]})
        if op.type in ASSIGNMENTS:
            layout = rows_of((present, ins[1])) or REPLICATED
            own = {number: layout}
            return Plan((ins[0], layout), (), variables=own, assigned=own)
        if op.type in ("VariableShape", "VarIsInitializedOp"):
            return Plan(ins, (REPLICATED,))
        whole = {number: REPLICATED}
        is_philox = op.type == "RngReadAndSkip" and self._facts.value(op.inputs[1]) == PHILOX
        if is_philox or op.type in WRITES - {"RngReadAndSkip"}:
            return self._whole(op, ins, variables=whole, assigned=whole)
        if op.type not in ("ResourceGather", "ResourceGatherNd"):
            raise CannotSplit("it uses a variable in a way that is not supported", op)
        plan = self._plan_operation(op, ins, planned)
        return replace(plan, variables=whole)

    @staticmethod
    def _whole(op: Operation, ins: tuple[Layout, ...], **of_variables: Any) -> Plan:
        """The plan by which every replica computes an operation whole; lists stay as they are."""
        return Plan(
            tuple(layout if isinstance(layout, Items) else REPLICATED for layout in ins),
            tuple(Items(REPLICATED) if t.dtype == tf.variant else REPLICATED for t in op.outputs),
            **of_variables,
        )

    def _plan_operation(self, op: Operation, ins: tuple[Layout, ...], planned: Planned) -> Plan:
        """Plan an operation that runs no program."""
        facts, whole = self._facts, self._whole(op, ins)
        if op.type in ("TensorListReserve", "EmptyTensorList"):
            return Plan(whole.need, (Items(),))
        if self._changes_tables and op.type in TABLE_READS:
            return whole
        if op.type in WRITES or op.type == "ReadVariableOp":
            return whole
        if set(ins) <= {REPLICATED}:
            rows = rows_drawn(op, facts) if planned.may_exchange else None
            return whole if rows is None else Plan(whole.need, (rows,))
        if op.outputs and all(is_known(facts.value(tensor)) for tensor in op.outputs):
            return Plan(ins, whole.out)
        rule = RULES.get(op.type)
        if op.type not in SHAPES:
            open_ins = tuple(
                REPLICATED if layout == PARTIAL and not planned.stays_open(tensor) else layout
                for layout, tensor in zip(ins, op.inputs, strict=True)
            )
            if op.type in PRODUCTS and PARTIAL in open_ins:
                # The other factor is gathered, whatever becomes of the sum.
                open_ins = without_shards(open_ins)
            plan = self._plan_open(op, open_ins, planned) if PARTIAL in open_ins else None
            if plan is not None:
                return plan
            ins = taken(ins, op.inputs, planned)
            ins = without_gathered(ins, op.inputs)
        has_rows = any(isinstance(layout, Rows) and not is_sharded(layout) for layout in ins)
        if has_rows and op.type != "IdentityN":
            # Otherwise the batch would be gathered where it is smaller than a weight.
            ins = without_shards(ins)
        if set(ins) <= {REPLICATED}:
            return whole
        if op.type == "Assert":
            # Its data are what an error shows: the rows of the replica that fails.
            return Plan(ins, ())
        plan = rule(op, ins, facts) if rule else None
        if plan is not None and plan.combine == "All" and planned.is_asserted(op.outputs[0]):
            # Whether it holds for all rows does not matter if each replica asserts its own.
            plan = replace(plan, combine=None)
        if plan is not None and any(map(is_sharded, ins)) and not keeps_shards(plan):
            return self._plan_operation(op, without_shards(ins), planned)
        # Without a rule, lists are made whole, too.
        return plan or Plan(whole_of(ins), whole.out)

    def _plan_open(self, op: Operation, ins: tuple[Layout, ...], planned: Planned) -> Plan | None:
        """The plan of an operation that passes an open sum on."""
        if any(isinstance(layout, Rows) for layout in ins) or op.type not in RULES:
            return None
        plan = RULES[op.type](op, ins, self._facts)
        if plan is not None and PARTIAL in plan.out:
            return plan
        # A whole value is added by the first replica only.
        several = op.type == "AddN" and ins.count(PARTIAL) > 1
        if op.type in ("AddN", "AddV2", "Sub") and (several or planned.in_loop):
            dims = [self._facts.dims(tensor) for tensor in (*op.inputs, op.outputs[0])]
            # `AddN` adds equal shapes, known or not.
            equal = op.type == "AddN" or all(own == dims[0] for own in dims)
            if op.outputs[0].dtype in SUMMED and equal:
                return Plan((PARTIAL,) * len(ins), (PARTIAL,))
        return None

    def _plan_loop(
        self, op: Operation, ins: tuple[Layout, ...], state: dict[int, Layout], planned: Planned
    ) -> PlanOfPrograms:
        condition, body = op.inner
        count, numbers = len(ins), list(state)
        # What an iteration changes: values, and behind them variables.
        fixed = [*body.passed_through, *(number not in body.writes for number in numbers)]
        # An open sum is taken before the loop: the body may not be linear in it.
        start = closed((*ins, *state.values()))
        present, pinned = start, set()
        while True:
            variables = dict(zip(numbers, present[count:], strict=True))
            inner = self.plan(body, present[:count], variables, in_loop=True)
            outs = [*inner.outs, *(inner.state[number] for number in numbers)]
            after: list[Layout] = []
            for place, (before, out) in enumerate(zip(present, outs, strict=True)):
                wanted = before if fixed[place] or place in pinned else joined(before, out)
                if wanted == REPLICATED and before != REPLICATED and not isinstance(before, Items):
                    # Or it might change from one to the other for ever.
                    pinned.add(place)
                after.append(wanted)
            if tuple(after) == present:
                break
            if any(
                a != b and not isinstance(b, Items) for a, b in zip(after, present, strict=True)
            ):
                # Forget what was written to lists while the values written had other layouts.
                after = [
                    i if isinstance(i, Items) else a for i, a in zip(start, after, strict=True)
                ]
            present = tuple(after)
        test = self.plan(condition, present[:count], variables)
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        exchanges = (
            inner.exchanges
            or test.exchanges
            or are_exchanged([outs[n] for n in moving], [present[n] for n in moving])
            or are_exchanged(test.outs, [REPLICATED])
        )
        if exchanges and any(layout != REPLICATED for layout in present):
            return self._plan_loop(op, *self._gathered(op, ins, state), planned)
        assigned = {number: variables[number] for number in sorted(body.writes)}
        carried = present[:count]
        plan = Plan(carried, carried, variables=variables, assigned=assigned)
        return plan, (test, inner)

    def _plan_branches(
        self,
        op: Operation,
        ins: tuple[Layout, ...],
        state: dict[int, Layout],
        planned: Planned,
        may_exchange: bool = False,
    ) -> PlanOfPrograms:
        """Plan a condition.

        Args:
            may_exchange: Whether replicas run all branches, and then choose results.
        """
        need = (REPLICATED, *taken(ins[1:], op.inputs[1:], planned))
        variables = dict(zip(state, closed(tuple(state.values())), strict=True))
        context = {"in_loop": planned.in_loop, "may_exchange": may_exchange}
        inner = tuple(self.plan(each, need[1:], variables, **context) for each in op.inner)
        written = sorted(op.writes)
        each = [[*one.outs, *(one.state[number] for number in written)] for one in inner]
        layouts = [functools.reduce(joined, found) for found in zip(*each, strict=True)]
        out = closed(tuple(layouts))
        exchanges = any(one.exchanges for one in inner) or any(
            are_exchanged(one, out) for one in each
        )
        if exchanges and not may_exchange:
            if planned.may_exchange and any(map(is_sharded, state.values())) and are_cheap(op):
                return self._plan_branches(op, ins, state, planned, may_exchange=True)
            return self._plan_branches(op, *self._gathered(op, ins, state), planned)
        count = len(op.outputs)
        assigned = dict(zip(written, out[count:], strict=True))
        return Plan(need, out[:count], variables=variables, assigned=assigned), inner

    def _plan_compiled(
        self, op: Operation, ins: tuple[Layout, ...], state: dict[int, Layout], planned: Planned
    ) -> PlanOfPrograms:
        (program,) = op.inner
        inner = self.plan(program, ins, state, in_loop=planned.in_loop, is_called=True)
        if inner.exchanges:
            # Replicas cannot exchange values inside a function that XLA compiles.
            return self._plan_compiled(op, *self._gathered(op, ins, state), planned)
        assigned = {number: inner.state[number] for number in program.writes}
        return Plan(ins, tuple(inner.outs), variables=state, assigned=assigned), (inner,)

    @staticmethod
    def _gathered(
        op: Operation, ins: tuple[Layout, ...], state: dict[int, Layout]
    ) -> tuple[tuple[Layout, ...], dict[int, Layout]]:
        """What an operation can take instead, if its programs would exchange values.

        First the variables whole that replicas divide. Then everything: each replica runs the
        programs for the whole batch.
        """
        for are_whole in (without_shards, whole_of):
            found = are_whole(ins), dict(zip(state, are_whole([*state.values()]), strict=True))
            if found != (ins, state):
                return found
        raise CannotSplit("it exchanges values although all of its inputs are whole", op)


def scattered_in(planned: Planned, variables: Mapping[int, Layout]) -> set[Tensor]:
    """The open sums of which each replica needs its rows of a variable, and nothing else.

    Args:
        planned: The step.
        variables: The layouts in which it leaves its variables.
    """
    needs: dict[Tensor, set[Layout]] = {}
    for op in planned.program.operations:
        for tensor, need in zip(op.inputs, planned.plans[op].need, strict=True):
            if planned.layouts[tensor] == PARTIAL != need:
                needs.setdefault(tensor, set()).add(need)
        if op.type == "AssignVariableOp" and op.inputs[0].variable in variables:
            # It may be the last value, and others may read it.
            needs.setdefault(op.inputs[1], set()).add(REPLICATED)
    for tensor in planned.program.outputs:
        needs.setdefault(tensor, set()).add(REPLICATED)
    return {
        tensor
        for tensor, wanted in needs.items()
        if len(wanted) == 1 and all(map(is_one_shard, wanted))
    }


def closed(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of values whose open sums have been taken."""
    return tuple(REPLICATED if layout == PARTIAL else layout for layout in layouts)


def are_cheap(condition: Operation) -> bool:
    """Whether replicas may run all branches: they only read, compare and update numbers.

    An update whose gradients are clipped by their norm is such a branch. Otherwise each replica
    would gather all that the optimizer remembers, to run the branch alone.
    """

    def is_cheap(op: Operation) -> bool:
        if op.type in DIVISIONS:
            divisor = op.inputs[1]
            return divisor.dtype.is_floating or bool(np.all(divisor.constant))
        return op.type in CHEAP or (op.type == BRANCH and are_cheap(op))

    return all(is_cheap(op) for inner in condition.inner for op in inner.operations)


def taken(
    layouts: Sequence[Layout], tensors: Sequence[Tensor], planned: Planned
) -> tuple[Layout, ...]:
    """The layouts in which the open sums among some tensors are taken, and those of the others."""
    return tuple(
        planned.kept_of(tensor) if layout == PARTIAL else layout
        for layout, tensor in zip(layouts, tensors, strict=True)
    )


def without_gathered(layouts: Sequence[Layout], tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """The layouts of values of which rows of a variable are taken whole if a product needs them so.

    Muon multiplies what it makes of products and rows, time and again: each would be gathered. Of
    the variable itself, rows are enough for its update.
    """

    def is_gathered(tensor: Tensor) -> bool:
        is_read = tensor.op.type == "ReadVariableOp"
        return not is_read and any(user.type in PRODUCTS for user in tensor.users)

    return tuple(
        REPLICATED if is_sharded(layout) and is_gathered(tensor) else layout
        for layout, tensor in zip(layouts, tensors, strict=True)
    )


def without_shards(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of values of which replicas divide the batch, and no variables."""
    return tuple(REPLICATED if is_sharded(layout) else layout for layout in layouts)


def keeps_shards(plan: Plan) -> bool:
    """Whether replicas can share an operation on rows of a variable in this way."""
    # A product would count the rows of each process. A factor is a number wherever rows are
    # exchanged.
    blocks = [block for layout in plan.out if isinstance(layout, Rows) for block in layout.blocks]
    return plan.combine != "Prod" and all(isinstance(block.factor, int) for block in blocks)


def whole_of(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of the same values where every replica has all of them."""
    return tuple(
        Items(layout.element and REPLICATED) if isinstance(layout, Items) else REPLICATED
        for layout in layouts
    )


def require_sendable(have: Layout, dtype: tf.DType, rank: int | None, op: Operation | None) -> None:
    """Refuse an open sum or rows that replicas would have to exchange, and cannot."""
    is_summed = have == PARTIAL
    if dtype in UNSENT:
        way = "summed" if is_summed else "gathered"
        reason = f"{'values' if is_summed else 'rows'} of the type {dtype.name} cannot be {way}"
        raise CannotSplit(reason, op, dtype)
    if rank is None and not is_summed:
        raise CannotSplit("rows of a tensor of unknown rank cannot be gathered", op)


def are_exchanged(have: Sequence[Layout], need: Sequence[Layout]) -> bool:
    """Whether replicas exchange values to convert any of these layouts."""
    return any(
        one != other and one not in (REPLICATED, Items(), Items(REPLICATED))
        for one, other in zip(have, need, strict=True)
    )


def is_known(value: np.ndarray | None) -> bool:
    return value is not None and not any(entry is None for entry in value.ravel())
