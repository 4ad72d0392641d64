"""`Part`: what a replica runs of a planned program, and how large what that makes is.

It follows what `emission` adds to a replica's graph, without adding it: operations by their plans,
and conversions where one takes a value in another layout. `cost` counts what these exchange, and
`kmg.memory` what a replica holds. Constants, shapes and counts take nothing. What a replica makes
at no cost is made where it is asked for.
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
from keras_multigpu.partition.planning.planner import are_exchanged, is_known
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    LOOP,
    Operation,
    Program,
    Tensor,
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


class Conversion(NamedTuple):
    """How a value gets another layout.

    Args:
        tensor: The tensor whose value it is, or the handle of its variable.
        have: Its layout.
        need: The other one.
        asked_by: The operation that takes it so; None for a result.
        kind: What replicas exchange for it, as in `Moved`; None if they exchange nothing.
    """

    tensor: Tensor
    have: Layout
    need: Layout
    asked_by: Operation | None
    kind: str | None


class Action(NamedTuple):
    """Something that a replica runs.

    Args:
        op: The operation; None for a conversion.
        takes: The values that it takes.
        makes: The values that it makes.
        after: A value that it waits for besides; None for none.
        conversion: The conversion, if it is one.
    """

    op: Operation | None
    takes: Sequence[Key]
    makes: Sequence[Key]
    after: Key | None = None
    conversion: Conversion | None = None

    @property
    def is_view(self) -> bool:
        """Whether what it makes is in the memory of what it takes."""
        # Sums are made in place. The operations that made a list make it again.
        each = self.conversion
        is_list = each is not None and isinstance(each.have, Items)
        return is_list or (each is not None and (each.have, each.need) == (PARTIAL, REPLICATED))


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
        laid: The tensor and the layout of each value, but for constants.
        numbers: The variables that it takes.
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
        self.laid: dict[Key, tuple[Tensor, Layout]] = {}
        inputs = planned.program.inputs
        # In a loop TensorFlow may not know what a handle refers to.
        own = {each.variable: each for each in inputs if each.variable is not None}
        self._handles = own if handles is None else handles
        self._state: dict[int, tuple[Key, Layout]] = {}
        self._read: dict[Tensor, Key] = {}
        self._last_in: dict[int | None, Key] = {}
        self._inner: dict[Operation, list[Part]] = {}
        self.numbers = [*own]
        for number in own:
            self._assign(number, number, planned.given.get(number, REPLICATED))
        for tensor in [each for each in inputs if each.variable is None]:
            self.laid[tensor] = tensor, planned.layouts[tensor]
        for op in planned.program.operations:
            self._add(op)
        pairs = zip(planned.program.outputs, outs, strict=True)
        self.results = [self._taken(None, tensor, need) for tensor, need in pairs]
        changed = [number for number, (key, _) in self._state.items() if key != number]
        self.new = [self._variable(None, number, variables[number]) for number in changed]

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
                self.laid[squares] = self.laid[rows]
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
        self.laid.setdefault(key, (self._handles[number], layout))

    def _run(
        self, op: Operation, takes: Sequence[Key], outs: Sequence[Tensor] | None = None
    ) -> None:
        """Run an operation, which makes its results, or `outs`, and new values of variables."""
        outs, assigned = op.outputs if outs is None else outs, self.planned.plans[op].assigned
        for tensor in outs:
            self.laid[tensor] = tensor, self.planned.layouts[tensor]
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
            before = [self._before_broadcast(tensor) for tensor in op.inputs]
            if not all(before):
                pairs = [e for pair, own in zip(pairs, before, strict=True) for e in own or [pair]]
        return [self._taken(op, *each) for each in pairs]

    def _before_broadcast(self, tensor: Tensor) -> list[tuple[Tensor, Layout]]:
        """What was broadcast over the batch, and perhaps scaled; nothing if a tensor was not."""
        kind, inputs, layouts = tensor.op.type, tensor.op.inputs, self.planned.layouts
        if tensor not in self.planned.free:
            return []
        if kind in ("Tile", "BroadcastTo"):
            return [(inputs[0], REPLICATED)] if layouts[inputs[0]] == REPLICATED else []
        if kind not in ("Mul", "RealDiv"):
            return []
        before = [(each, self._before_broadcast(each)) for each in inputs]
        is_broadcast = any(own for _, own in before)
        return [e for each, own in before for e in own or [(each, REPLICATED)] if is_broadcast]

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
        if key not in self.laid:
            self.laid[key] = tensor, need
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
        is_list = isinstance(have, Items) or isinstance(need, Items)
        if have == need or (is_list and not are_exchanged([have], [need])):
            return key
        is_scattered = tensor in self.planned.scattered and is_sharded(need)
        if not (is_list or is_scattered or REPLICATED in (have, need)):
            key, have = self._converted(op, key, tensor, have, REPLICATED), REPLICATED
        element = have.element if isinstance(have, Items) else have
        bucket = self.planned.buckets.get(op) if op and is_sharded(element) else None
        made = key, need, bucket
        if made not in self.laid:
            self.laid[made] = tensor, need
            if bucket is not None:
                after = self._last_in.get(bucket - 2)
            kind = None
            if element != REPLICATED:
                kind = "summed" if element == PARTIAL else "gathered"
                kind = "weights" if is_sharded(element) else "scattered" if is_scattered else kind
            conversion = Conversion(tensor, have, need, op, kind)
            self.actions.append(Action(None, [key], [made], after, conversion))
        return made

    def inner(self, op: Operation) -> list["Part"]:
        """The parts of the programs that an operation runs."""
        if op not in self._inner:
            planned, plan = self.planned, self.planned.plans[op]
            found = self._inner[op] = []
            for each in planned.inner.get(op, ()):
                is_condition = op.type == LOOP and not found
                outs = each.outs if is_condition else plan.out
                found.append(Part(each, self.places, outs, plan.assigned, self._handles))
        return self._inner[op]

    def shape(self, key: Key) -> Shape:
        """The shape of a value."""
        tensor, layout = self.laid[key]
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
