"""`Part`: what a replica runs of a planned program, and how large what that makes is.

It follows what `partition/emission` adds to a replica's graph, without adding it: operations by
their plans, and conversions where one takes a value in another layout. Constants, shapes and counts
take nothing. What a replica makes at no cost is made where it is asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.facts.axes import AXES
from keras_multigpu.partition.facts.facts import Dims, Facts
from keras_multigpu.partition.facts.families import ELEMENTWISE
from keras_multigpu.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Items,
    Layout,
    Rows,
    Shard,
    is_sharded,
)
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.planning.planner import is_known
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    LOOP,
    Operation,
    Program,
    Tensor,
    has_effect,
)
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.partition.sizes import Size

OWN = "own "
"""A prefix of a batch's name: of its examples, how many one part has."""

# These take what was broadcast over the batch as it was before, see `emission/operations.py`.
BEFORE_BROADCAST = {"Mul", "AddV2", "Sub", "AddN"}

Key = Any
"""A value: a tensor; the number of a variable, for what that holds at first; an operation and a
number, for what that assigns; or another key and a layout, for it converted."""


class Shape(NamedTuple):
    """The lengths of a value's axes on a replica, and its type."""

    dims: Dims
    dtype: tf.DType


class Action(NamedTuple):
    """Something that a replica runs.

    Args:
        op: The operation; None for a conversion.
        takes: The values that it takes.
        makes: The values that it makes.
        after: A value that it waits for besides; None for none.
        is_view: Whether what it makes is in the memory of what it takes.
    """

    op: Operation | None
    takes: Sequence[Key]
    makes: Sequence[Key]
    after: Key | None = None
    is_view: bool = False


def planned_whole(program: Program, facts: Facts) -> Planned:
    """A program that one replica runs as it is."""
    planned = Planned(program, facts, {})
    planned.layouts.update(dict.fromkeys(program.inputs, REPLICATED))
    for op in program.operations:
        out = (REPLICATED,) * len(op.outputs)
        assigned = dict.fromkeys(sorted(op.writes), REPLICATED)
        planned.plans[op] = Plan((REPLICATED,) * len(op.inputs), out, assigned=assigned)
        planned.layouts.update(dict.fromkeys(op.outputs, REPLICATED))
        planned.inner[op] = tuple(planned_whole(inner, facts) for inner in op.inner)
    return planned


class Part:
    """What a replica runs of a program.

    Args:
        planned: The program, planned.
        places: How many replicas divide variables. The first has the most rows of them.
        outs: The layouts in which it leaves its results.
        variables: Those in which it leaves the variables, by number.
        handles: The handles of variables, by number; by default, those that the program takes.

    Attributes:
        actions: What it runs, in the order of the program.
        shapes: The shapes of all values, but for constants.
        results: Its results.
        new: The last values of the variables that it assigns.
    """

    def __init__(
        self,
        planned: Planned,
        places: int,
        outs: Sequence[Layout],
        variables: Mapping[int, Layout],
        handles: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.planned, self.facts, self.places = planned, planned.facts, places
        self.actions: list[Action] = []
        self.shapes: dict[Key, Shape] = {}
        inputs = planned.program.inputs
        # In a loop TensorFlow may not know what a handle refers to.
        own = {each.variable: each for each in inputs if each.variable is not None}
        self._handles = own if handles is None else handles
        self._state: dict[int, tuple[Key, Layout]] = {}
        self._read: dict[Tensor, Key] = {}
        self._last_in: dict[int | None, Key] = {}
        for number in own:
            self._assign(number, number, planned.given.get(number, REPLICATED))
        for tensor in [each for each in inputs if each.variable is None]:
            self.shapes[tensor] = self._shape(tensor, planned.layouts[tensor])
        for op in planned.program.operations:
            self._add(op)
        pairs = zip(planned.program.outputs, outs, strict=True)
        self.results = [self._taken(None, tensor, need) for tensor, need in pairs]
        changed = [number for number, (key, _) in self._state.items() if key != number]
        self.new = [self._variable(None, number, variables[number]) for number in changed]
        self._drop_unneeded()

    def _add(self, op: Operation) -> None:
        planned, plan = self.planned, self.planned.plans[op]
        if op.inner:
            numbers = sorted(plan.variables, key=lambda number: number not in plan.assigned)
            takes = self._all_taken(op)
            takes += [self._variable(op, number, plan.variables[number]) for number in numbers]
            self._run(op, takes)
        elif op.inputs and op.inputs[0].variable is not None:
            self._access(op, op.inputs[0].variable)
        elif op in planned.moments:
            moments = planned.moments[op]
            if op is moments.mean:
                (rows,) = self._all_taken(op)[:1]
                # The squares of distances are there for a moment.
                squares = rows, "squares"
                self.shapes[squares] = self.shapes.get(rows, Shape(None, op.outputs[0].dtype))
                self.actions.append(Action(None, [rows], [squares]))
                self._run(op, [rows, squares], [*op.outputs, *moments.variance.outputs])
        elif not self._costs_nothing(op):
            self._run(op, self._all_taken(op))

    def _costs_nothing(self, op: Operation) -> bool:
        values = [self.facts.value(tensor) for tensor in op.outputs]
        is_constant = op.type == "Const" or (bool(values) and all(map(is_known, values)))
        return is_constant or not self.planned.free.isdisjoint(op.outputs)

    def _access(self, op: Operation, number: int) -> None:
        """Read or assign a variable."""
        plan = self.planned.plans[op]
        present, layout = self._state[number]
        if op.type == "ReadVariableOp":
            self._read[op.outputs[0]] = present
        elif op.type == "AssignVariableOp":
            self._assign(number, self._taken(op, op.inputs[1], plan.need[1]), plan.need[1])
        elif op.type not in ("Identity", "VariableShape", "VarIsInitializedOp"):
            takes = self._all_taken(op)[1:]
            after = takes[0] if op.type in ASSIGNMENTS else None
            own = self._variable(op, number, plan.variables.get(number, layout), after)
            self._run(op, [own, *takes])

    def _assign(self, number: int, key: Key, layout: Layout) -> None:
        self._state[number] = key, layout
        self.shapes.setdefault(key, self._shape(self._handles[number], layout))

    def _run(
        self, op: Operation, takes: Sequence[Key], outs: Sequence[Tensor] | None = None
    ) -> None:
        """Run an operation, which makes its results, or `outs`, and new values of variables."""
        outs, assigned = op.outputs if outs is None else outs, self.planned.plans[op].assigned
        for tensor in outs:
            self.shapes[tensor] = self._shape(tensor, self.planned.layouts[tensor])
        for number, layout in assigned.items():
            self._assign(number, (op, number), layout)
        makes = [*outs, *((op, number) for number in assigned)]
        self.actions.append(Action(op, takes, makes))
        if makes:
            self._last_in[self.planned.buckets.get(op)] = makes[0]

    def _all_taken(self, op: Operation) -> list[Key]:
        plan = self.planned.plans[op]
        pairs = list(zip(op.inputs, plan.need, strict=True))
        if op.type in BEFORE_BROADCAST and isinstance(plan.out[0], Rows):
            pairs = [each for each in pairs if not self._is_broadcast(each[0])] or pairs
        return [self._taken(op, *each) for each in pairs]

    def _is_broadcast(self, tensor: Tensor) -> bool:
        """Whether a tensor was broadcast over the batch, and then perhaps scaled."""
        if tensor not in self.planned.free:
            return False
        kind = tensor.op.type
        is_scaled = kind in ("Mul", "RealDiv") and any(map(self._is_broadcast, tensor.op.inputs))
        return kind in ("Tile", "BroadcastTo") or is_scaled

    def _taken(self, op: Operation | None, tensor: Tensor, need: Layout) -> Key:
        """A tensor in the layout in which an operation takes it."""
        if tensor in self.planned.free:
            return self._made(tensor, need)
        key = self._read.get(tensor, tensor)
        return self._converted(op, key, tensor, self.planned.layouts[tensor], need)

    def _variable(
        self, op: Operation | None, number: int, need: Layout, after: Key | None = None
    ) -> Key:
        key, have = self._state[number]
        return self._converted(op, key, self._handles[number], have, need, after)

    def _made(self, tensor: Tensor, need: Layout) -> Key:
        """What a replica makes at no cost, or a part of it."""
        key, op = (tensor, need), tensor.op
        if key not in self.shapes:
            self.shapes[key] = self._shape(tensor, need)
            needs: Sequence[Layout] = [REPLICATED] * len(op.inputs)
            axes = AXES[op.type](op, self.facts) if op.type in ELEMENTWISE else None
            label = axes.out[need.axis] if axes and isinstance(need, Rows) else None
            if axes and isinstance(need, Rows) and isinstance(label, int):
                needs = axes.layouts(label, need, len(op.inputs))
            takes = [self._taken(op, *each) for each in zip(op.inputs, needs, strict=True)]
            self.actions.append(Action(op, takes, [key]))
        return key

    def _converted(
        self,
        op: Operation | None,
        key: Key,
        tensor: Tensor,
        have: Layout,
        need: Layout,
        after: Key | None = None,
    ) -> Key:
        # The operations that made a list make it again.
        if have == need or isinstance(have, Items) or isinstance(need, Items):
            return key
        is_scattered = tensor in self.planned.scattered and is_sharded(need)
        if REPLICATED not in (have, need) and not is_scattered:
            key, have = self._converted(op, key, tensor, have, REPLICATED), REPLICATED
        bucket = self.planned.buckets.get(op) if op and is_sharded(have) else None
        made = key, need, bucket
        if made not in self.shapes:
            self.shapes[made] = self._shape(tensor, need)
            if bucket is not None:
                after = self._last_in.get(bucket - 2)
            is_sum = have == PARTIAL and need == REPLICATED
            self.actions.append(Action(None, [key], [made], after, is_sum))
        return made

    def inner(self, op: Operation) -> list["Part"]:
        """The parts of the programs that an operation runs."""
        planned, plan = self.planned, self.planned.plans[op]
        found: list[Part] = []
        for each in planned.inner.get(op, ()):
            is_condition = op.type == LOOP and not found
            outs = each.outs if is_condition else plan.out
            found.append(Part(each, self.places, outs, plan.assigned, self._handles))
        return found

    def _shape(self, tensor: Tensor, layout: Layout) -> Shape:
        dims, dtype = self.facts.dims(tensor), tensor.dtype
        if tensor.variable is not None:
            dtype = graph_internals.held_dtype(tensor.raw)
        if dtype == tf.variant:
            known = self.facts.elements.get(tensor)
            if known is None or known.dims is None or known.count is None:
                return Shape(None, dtype)
            element = layout.element if isinstance(layout, Items) else None
            own = self._local([*known.dims], element or REPLICATED)
            return Shape([known.count, *(own or ())], known.dtype or tf.float32)
        return Shape(self._local(dims, layout), dtype)

    def _local(self, dims: Dims, layout: Layout) -> Dims:
        """The lengths of the axes of a replica's part."""
        if dims is None or not isinstance(layout, Rows):
            return dims
        found = list(dims)
        found[layout.axis] = sum(
            factor
            * (
                batch.bounds(0, self.places)[1]
                if isinstance(batch, Shard)
                else Size.of(OWN + batch)
            )
            for batch, factor in layout.blocks
        )
        return found

    def _drop_unneeded(self) -> None:
        needed, kept = {*self.results, *self.new}, []
        for action in reversed(self.actions):
            if not needed.isdisjoint(action.makes) or (action.op and has_effect(action.op)):
                needed.update(action.takes)
                kept.append(action)
        self.actions = kept[::-1]
