"""Splits the graph of one device's step over replicas.

`Splitter` walks the global graph once, through its functions, loops and conditions. It adds each
operation, by its plan, to the graph that is being traced: the local graph, which every replica runs
on its own rows.

Variables are values here. An assignment gives a variable another value, which later reads see, and
the caller assigns the last values at the end. So a step that fails has changed no variable.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.conversions import Conversions, Value, tell_shape
from keras_multigpu.partition.cost import HEAVY, Work, flops_of
from keras_multigpu.partition.exchange import LocalExchange
from keras_multigpu.partition.facts import Facts
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.moments import Moments, joined_moments
from keras_multigpu.partition.operations import Operations, put
from keras_multigpu.partition.plan import Plan
from keras_multigpu.partition.planner import CannotSplit, Planner, Scope
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    BRANCH,
    COMPILED,
    LOOP,
    SCATTERED,
    Operation,
    Program,
)
from keras_multigpu.partition.randomness import PHILOX, skip_ahead
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.partition.slices import MASKS
from keras_multigpu.partition.variables import operations_for

# The inputs of an assignment to a slice.
SLICED = ("input", "begin", "end", "strides", "value")


class Splitter:
    """Adds one replica's part of a global graph to the graph that is being traced.

    For its arguments see `Conversions`, `LocalStep.owners` and `Planner`.
    """

    def __init__(
        self,
        exchange: LocalExchange,
        replica: Replica,
        owners: Mapping[int, int],
        changes_tables: bool,
    ) -> None:
        self.exchange, self.replica, self.owners = exchange, replica, owners
        self.planner = Planner(changes_tables)
        self.conversions = Conversions(exchange, replica)
        self.convert, self.cost = self.conversions.convert, self.conversions.cost
        self._operations = Operations(exchange, replica, self.conversions, changes_tables)

    def add(self, scope: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add the operations of a program; returns its results."""
        for tensor, value in zip(scope.program.inputs, inputs, strict=True):
            scope.put(tensor, value)
        for op in scope.program.operations:
            if scope.only is not None and op not in scope.only:
                continue
            if op.type == "Placeholder":
                raise CannotSplit("a placeholder without a value", op)
            with self.conversions.asked_by(op, scope.times):
                self._add(op, scope)
        return [scope.values[each] for each in scope.program.outputs if each in scope.values]

    def _add(self, op: Operation, scope: Scope) -> None:
        inputs = [scope.values[tensor] for tensor in op.inputs]
        if op.type == COMPILED:
            inner = scope.of_call(op, scope.state)
            if scope.wanted is not None:
                effects = self._has_effects(scope)
                keep_only(inner, scope.wanted, scope.wanted, True, effects)
            plan = self.planner.plan_in(op, scope)
            outs = self._add_compiled(inner, self._laid_out(inputs, plan))
            for tensor, value in zip(op.outputs, outs, strict=True):
                scope.put(tensor, value)
            return
        if inputs and inputs[0].variable is not None and self._add_access(op, inputs, scope):
            return
        if op in scope.moments:
            self._add_moments(scope.moments[op], inputs[0], scope)
        if op.outputs and op.outputs[0] in scope.values:
            return
        plan = self.planner.plan_in(op, scope)
        after_gather = self._note_cost(op, plan, inputs, scope)
        if op.type == LOOP:
            self._add_loop(op, plan, inputs, scope)
        elif op.type == BRANCH:
            self._add_branches(op, plan, inputs, scope)
        else:
            self._operations.add(op, plan, inputs, scope)
        if after_gather:
            for tensor in op.outputs:
                scope.values[tensor].after_gather = True

    def _add_compiled(self, inner: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add a function that XLA compiles, because TensorFlow has no kernels for it."""
        if inner.program.writes:
            return self.add(inner, inputs)
        layouts: list[Layout] = []

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            own = iter(tensors)
            given = [
                value
                if value.variable is not None
                else Value(value.layout, next(own), value.source)
                for value in inputs
            ]
            before, self.replica.compiled = self.replica.compiled, True
            outs = self.add(inner, given)
            layouts.extend(value.layout for value in outs)
            found = [value.local for value in outs]
            self.replica.compiled = before
            return found

        call = tf.function(function, autograph=False, jit_compile=True)
        outs = call(*[value.local for value in inputs if value.variable is None])
        return [Value(layout, out) for layout, out in zip(layouts, outs, strict=True)]

    def _add_moments(self, moments: Moments, value: Value, scope: Scope) -> None:
        """Compute a mean and a variance together, if they are taken along the rows."""
        made = joined_moments(
            moments, value.local, value.layout, scope.facts, self.replica, self.conversions.sum
        )
        for op, tensor in zip(moments if made else (), made or (), strict=True):
            out = op.outputs[0]
            scope.put(out, Value(REPLICATED, tensor, out, scope))

    def _note_cost(self, op: Operation, plan: Plan, inputs: Sequence[Value], scope: Scope) -> bool:
        """Note the cost of an operation; returns whether it is computed whole after a gather."""
        layouts = (*plan.need, *plan.out)
        whole = plan.combine is None and all(layout == REPLICATED for layout in layouts)
        gathered = any(isinstance(value.layout, Rows) or value.after_gather for value in inputs)
        if op.type in HEAVY:
            flops = flops_of(op, scope.facts)
            flops = None if flops is None else flops * scope.times
            self.cost.work.append(Work(flops, op, not whole, whole and gathered))
        return whole and gathered

    # Variables.

    def _add_access(self, op: Operation, inputs: list[Value], scope: Scope) -> bool:
        """Read or assign a variable; False where its handle is only passed on."""
        number = inputs[0].variable
        if number is None or op.type in (LOOP, BRANCH):
            return False
        present = scope.state[number]
        new: tf.Tensor | None = None
        if op.type == "ReadVariableOp":
            scope.put(op.outputs[0], present)
        elif op.type == "Identity":
            scope.put(op.outputs[0], inputs[0])
        elif op.type == "AssignVariableOp":
            scope.state[number] = inputs[1]
        elif op.type in ASSIGNMENTS:
            change, before = (self.convert(value, REPLICATED) for value in (inputs[1], present))
            new = before + change if "Add" in op.type else before - change
        elif op.type in SCATTERED:
            indices, updates = (self.convert(value, REPLICATED) for value in inputs[1:])
            before = self.convert(present, REPLICATED)
            if not op.type.startswith("ResourceScatterNd"):
                indices = indices[..., tf.newaxis]
            new = SCATTERED[op.type](before, indices, updates)
        elif op.type == "ResourceStridedSliceAssign":
            wholes = [self.convert(value, REPLICATED) for value in [present, *inputs[1:]]]
            masks = {name: op.get_attr(name) for name in MASKS}
            new = tf.raw_ops.TensorStridedSliceUpdate(
                **dict(zip(SLICED, wholes, strict=True)), **masks
            )
        elif op.type == "RngReadAndSkip" and scope.facts.value(op.inputs[1]) == PHILOX:
            before, skipped = (self.convert(value, REPLICATED) for value in (present, inputs[2]))
            new = skip_ahead(before, skipped)
            put(op, self.planner.plan_in(op, scope).out, [before], inputs, scope)
        elif op.type in ("ResourceGather", "ResourceGatherNd"):
            plan = self.planner.plan_in(op, scope)
            before = self.convert(present, REPLICATED)
            indices = self.convert(inputs[1], plan.need[1])
            if op.type == "ResourceGather":
                out = tf.gather(before, indices, batch_dims=op.get_attr("batch_dims"))
            else:
                out = tf.gather_nd(before, indices)
            put(op, plan.out, [out], inputs, scope)
        elif op.type in ("VariableShape", "VarIsInitializedOp"):
            shape = tf.shape(self.convert(present, REPLICATED))
            out = shape if op.type == "VariableShape" else tf.constant(True)
            put(op, (REPLICATED,), [out], inputs, scope)
        else:
            raise CannotSplit("it uses a variable in a way that is not supported", op)
        if new is not None:
            scope.state[number] = Value(REPLICATED, new, None, scope)
        return True

    # Loops and conditions.

    def _add_branches(self, op: Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        given = self._laid_out(inputs, plan)
        written = sorted(op.writes if scope.wanted is None else op.writes & scope.wanted)
        for number in written:
            scope.state[number] = self._laid(scope.state[number], REPLICATED)
        # The variables that only one replica computes get a condition of their own, which the other
        # replicas leave out.
        owners = {self.owners.get(number) for number in written} | {None}
        state = dict(scope.state)
        for owner in sorted(owners, key=lambda owner: -1 if owner is None else owner):
            own = [number for number in written if self.owners.get(number) == owner]
            layouts = plan.out if owner is None else ()
            outs = self._branched(op, owner, layouts, own, given, scope, len(owners) > 1)
            for number, new in zip(own, outs[len(layouts) :], strict=True):
                state[number] = Value(REPLICATED, new, None, scope)
            if owner is None:
                results = outs[: len(layouts)]
        scope.state.update(state)
        put(op, plan.out, results, inputs, scope)

    def _branched(
        self,
        op: Operation,
        owner: int | None,
        layouts: Sequence[Layout],
        written: Sequence[int],
        given: Sequence[Value],
        scope: Scope,
        apart: bool,
    ) -> list[tf.Tensor]:
        """The results of a condition, in these layouts, and the new values of some variables.

        Args:
            owner: The replica that needs the variables; None for all.
            apart: Whether the condition also assigns variables of other owners.
        """

        def branch(program: Program) -> Any:
            def run() -> list[tf.Tensor]:
                inner = Scope(program, scope.facts, dict(scope.state), scope.in_loop)
                inner.times = scope.times
                if apart or scope.wanted is not None:
                    known = [value.variable for value in given if value.variable is not None]
                    allowed = {n for n in known if self.owners.get(n) in (None, owner)}
                    effects = owner is None and self._has_effects(scope)
                    keep_only(inner, allowed, written, bool(layouts), effects)
                outs = self.add(inner, given[1:])
                found = [
                    self.convert(value, layout)
                    for value, layout in zip(outs, layouts, strict=bool(layouts))
                ]
                found += [self.convert(inner.state[number], REPLICATED) for number in written]
                return [tf.identity(tensor) for tensor in found]

            return run

        index = given[0].local
        if "If" in op.raw.type:
            chosen = index if index.dtype == tf.bool else tf.cast(index, tf.bool)
            flat = tf.cond(chosen, *[branch(each) for each in reversed(op.inner)])
        else:
            flat = tf.switch_case(index, [branch(each) for each in op.inner])
        return list(tf.nest.flatten(flat)) if layouts or written else []

    def _has_effects(self, scope: Scope) -> bool:
        """Whether effects on anything but variables belong to a scope."""
        return scope.wanted is None or scope.wanted.isdisjoint(self.owners)

    def _laid_out(self, values: Sequence[Value], plan: Plan) -> list[Value]:
        """Values in the layouts that a plan needs."""
        return [self._laid(value, need) for value, need in zip(values, plan.need, strict=True)]

    def _laid(self, value: Value, layout: Layout) -> Value:
        if value.variable is not None or value.layout == layout:
            return value
        laid = Value(layout, self.convert(value, layout), value.source, value.scope, value.made_of)
        laid.after_gather = layout == REPLICATED and isinstance(value.layout, Rows)
        return laid

    def _add_loop(self, op: Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        given = self._laid_out(inputs, plan)
        condition, body = op.inner
        fixed = body.passed_through
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        written = sorted(body.writes)
        start = [tf.identity(given[place].local) for place in moving]
        start += [tf.identity(self.convert(scope.state[n], REPLICATED)) for n in written]

        def inner(program: Program, state: Sequence[tf.Tensor]) -> tuple[Scope, list[Value]]:
            own = iter(state)
            values = []
            for place, value in enumerate(given):
                if fixed[place]:
                    values.append(value)
                    continue
                tensor = next(own)
                tell_shape(scope.facts, program.inputs[place], value.layout, tensor)
                values.append(Value(value.layout, tensor, value.source))
                values[-1].after_gather = value.after_gather
            variables = dict(scope.state)
            for number in written:
                variables[number] = Value(REPLICATED, next(own))
            found = Scope(program, scope.facts, variables, in_loop=program is body)
            found.times = scope.times * iterations_of(op, scope.facts)
            return found, values

        def goes_on(*state: tf.Tensor) -> tf.Tensor:
            own, values = inner(condition, state)
            return self.convert(self.add(own, values)[0], REPLICATED)

        def iteration(*state: tf.Tensor) -> list[tf.Tensor]:
            own, values = inner(body, state)
            outs = self.add(own, values)
            found = [self.convert(outs[place], plan.out[place]) for place in moving]
            found += [self.convert(own.state[number], REPLICATED) for number in written]
            return [tf.identity(tensor) for tensor in found]

        any_shape = tf.TensorShape(None)
        shapes = [t.shape if t.dtype == tf.variant else any_shape for t in start]
        ended = tf.while_loop(goes_on, iteration, start, shape_invariants=shapes) if start else ()
        for place, tensor in zip(moving, ended, strict=False):
            out = op.outputs[place]
            scope.put(out, Value(plan.out[place], tensor, out, scope))
        for number, tensor in zip(written, [*ended][len(moving) :], strict=True):
            scope.state[number] = Value(REPLICATED, tensor, None, scope)
        for place, value in enumerate(given):
            if fixed[place]:
                scope.put(op.outputs[place], value)


def keep_only(
    inner: Scope,
    allowed: Collection[int],
    wanted: Collection[int],
    results: bool,
    effects: bool,
) -> None:
    """Restrict a scope to what some results and the new values of some variables depend on.

    Args:
        inner: The scope.
        allowed: The numbers of the variables that it may assign.
        wanted: The numbers of those whose new values are needed outside.
        results: As for `operations_for`.
        effects: As for `operations_for`.
    """
    inner.wanted = set(allowed)
    inner.only = operations_for(inner.program, wanted, results, effects)


def iterations_of(op: Operation, facts: Facts) -> AnySize:
    """How many iterations a loop has; a size of that name if it is not known."""
    # The first inputs of TensorFlow's loops are a counter and its bound.
    bound = facts.value(op.inputs[1]) if len(op.inputs) > 1 else None
    count: Any = None if bound is None or bound.ndim else bound[()]
    is_known = count is not None and (not isinstance(count, int) or count > 0)
    return count if is_known else Size.of("iterations")
