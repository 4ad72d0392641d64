"""Splits the graph of one device's step over replicas.

`Splitter` walks the global graph once, through its functions, loops and conditions. It adds each
operation, by its plan, to the graph that is being traced: the local graph, which every replica runs
on its own rows.

Variables are values here. An assignment gives a variable another value, which later reads see, and
the caller assigns the last values at the end. So a step that fails has changed no variable.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.emission.conversions import Conversions, Scope, Value, tell_shape
from keras_multigpu.partition.emission.exchange import LocalExchange
from keras_multigpu.partition.emission.operations import Operations, put
from keras_multigpu.partition.facts.slices import MASKS
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    BRANCH,
    COMPILED,
    LOOP,
    OPEN_READ,
    SCATTERED,
    Closing,
    Operation,
)
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules.moments import Moments, joined_moments
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.partition.rules.randomness import skip_ahead

# The inputs of an assignment to a slice.
SLICED = ("input", "begin", "end", "strides", "value")


State = dict[int, Value]
"""The values of variables, by number."""


class Splitter:
    """Adds one replica's part of a global graph to the graph that is being traced.

    For its arguments see `Conversions`.
    """

    def __init__(self, exchange: LocalExchange, replica: Replica) -> None:
        self.exchange, self.replica = exchange, replica
        self.conversions = Conversions(exchange, replica)
        self.convert = self.conversions.convert
        self._operations = Operations(self.conversions)

    def add(self, scope: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add the operations of a program; returns its results."""
        scope.values.update(zip(scope.program.inputs, inputs, strict=True))
        for op in scope.program.operations:
            with self.conversions.asked_by(op, scope.planned.buckets.get(op)):
                self._add(op, scope)
                self.conversions.note_use(scope.values[tensor] for tensor in op.outputs)
        return [scope.values[each] for each in scope.program.outputs]

    def _add(self, op: Operation, scope: Scope) -> None:
        plan, inputs = scope.planned.plans[op], [scope.values[tensor] for tensor in op.inputs]
        state = scope.state
        if op.type in ASSIGNMENTS and plan.variables:
            change = self.convert(inputs[1], plan.need[1])
            state = {n: after(change, state[n]) for n in plan.variables}
        taken = {n: self._laid(state[n], layout) for n, layout in plan.variables.items()}
        if op.type == COMPILED:
            self._add_compiled(op, plan, inputs, taken, scope)
        elif op.type == LOOP:
            self._add_loop(op, plan, inputs, taken, scope)
        elif op.type == BRANCH:
            self._add_branches(op, plan, inputs, taken, scope)
        elif isinstance(op, Closing):
            due = tf.cast(self.convert(inputs[0], REPLICATED), tf.int32) != op.waiting
            total = self.conversions.sum(self.convert(inputs[1], PARTIAL), due)
            put(op, plan.out, [total], inputs, scope)
        elif inputs and inputs[0].variable is not None:
            self._add_access(op, plan, inputs, taken, scope)
        elif op not in scope.planned.moments:
            self._operations.add(op, plan, inputs, scope)
        elif op.outputs[0] not in scope.values:
            self._add_moments(scope.planned.moments[op], inputs[0], scope)

    def _add_compiled(
        self, op: Operation, plan: Plan, inputs: Sequence[Value], taken: State, scope: Scope
    ) -> None:
        """Add a function that XLA compiles, because TensorFlow has no kernels for it."""
        given, inner = (
            self._laid_out(inputs, plan),
            Scope(scope.planned.inner[op][0], scope.state | taken),
        )
        if inner.program.writes:
            scope.values.update(zip(op.outputs, self.add(inner, given), strict=True))
            scope.state.update((number, inner.state[number]) for number in plan.assigned)
            return

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            own = iter(tensors)
            values = [
                value
                if value.variable is not None
                else Value(value.layout, next(own), value.source)
                for value in given
            ]
            before, self.replica.compiled = self.replica.compiled, True
            found = [value.local for value in self.add(inner, values)]
            self.replica.compiled = before
            return found

        call = tf.function(function, autograph=False, jit_compile=True)
        outs = call(*[value.local for value in given if value.variable is None])
        put(op, plan.out, outs, (), scope)

    def _add_moments(self, moments: Moments, value: Value, scope: Scope) -> None:
        """Compute a mean and a variance together."""
        assert isinstance(value.layout, Rows)
        made = joined_moments(
            moments, value.local, value.layout, scope.facts, self.replica, self.conversions.sum
        )
        for op, tensor in zip(moments, made, strict=True):
            put(op, (REPLICATED,), [tensor], (), scope)

    # Variables.

    def _add_access(
        self, op: Operation, plan: Plan, inputs: list[Value], taken: State, scope: Scope
    ) -> None:
        """Read or assign a variable."""
        number: Any = inputs[0].variable
        present = taken.get(number, scope.state[number])
        new: tf.Tensor | None = None
        if op.type == "ReadVariableOp":
            scope.values[op.outputs[0]] = present
        elif op.type == OPEN_READ:
            own = self.replica.term_of(present.local)
            put(op, plan.out, [own], inputs, scope)
        elif op.type == "Identity":
            scope.values[op.outputs[0]] = inputs[0]
        elif op.type == "AssignVariableOp":
            scope.state[number] = inputs[1]
        elif op.type in ("VariableShape", "VarIsInitializedOp"):
            dims: Any = scope.facts.dims(op.inputs[0])
            if dims is None or None in dims:
                shape = tf.shape(self.convert(present, REPLICATED))
            else:
                shape = self.replica.shape_of(dims, None)
            out = shape if op.type == "VariableShape" else tf.constant(True)
            put(op, plan.out, [out], inputs, scope)
        else:
            given = [self.convert(*each) for each in zip(inputs[1:], plan.need[1:], strict=True)]
            new, outs = self._accessed(op, present.local, given)
            put(op, plan.out, outs, inputs, scope)
        if new is not None:
            scope.state[number] = Value(present.layout, new, None, scope)

    @staticmethod
    def _accessed(
        op: Operation, before: tf.Tensor, given: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """The new value of a variable, if it gets one, and the operation's results."""
        if op.type in ASSIGNMENTS:
            return (before + given[0] if "Add" in op.type else before - given[0]), []
        if op.type in SCATTERED:
            indices, updates = given
            if not op.type.startswith("ResourceScatterNd"):
                indices = indices[..., tf.newaxis]
            return SCATTERED[op.type](before, indices, updates), []
        if op.type == "ResourceStridedSliceAssign":
            masks = {name: op.get_attr(name) for name in MASKS}
            wholes = dict(zip(SLICED, [before, *given], strict=True))
            return tf.raw_ops.TensorStridedSliceUpdate(**wholes, **masks), []
        if op.type == "RngReadAndSkip":
            return skip_ahead(before, given[1]), [before]
        if op.type == "ResourceGather":
            return None, [tf.gather(before, given[0], batch_dims=op.get_attr("batch_dims"))]
        assert op.type == "ResourceGatherNd"
        return None, [tf.gather_nd(before, given[0])]

    # Loops and conditions.

    def _add_branches(
        self, op: Operation, plan: Plan, inputs: list[Value], taken: State, scope: Scope
    ) -> None:
        given, branches = self._laid_out(inputs, plan), scope.planned.inner[op]

        def branch(planned: Planned) -> Any:
            def run() -> list[tf.Tensor]:
                inner = Scope(planned, scope.state | taken)
                outs = self.add(inner, given[1:])
                found = [self.convert(*each) for each in zip(outs, plan.out, strict=True)]
                found += [self.convert(inner.state[n], need) for n, need in plan.assigned.items()]
                return [tf.identity(tensor) for tensor in found]

            return run

        index = given[0].local
        if branches[0].may_exchange:
            flat = self._chosen(index, [branch(each)() for each in branches])
        elif "If" in op.raw.type:
            chosen = index if index.dtype == tf.bool else tf.cast(index, tf.bool)
            flat = tf.cond(chosen, *[branch(each) for each in reversed(branches)])
        else:
            flat = tf.switch_case(index, [branch(each) for each in branches])
        results = list(tf.nest.flatten(flat)) if op.outputs or plan.assigned else []
        put(op, plan.out, results[: len(op.outputs)], inputs, scope)
        self._assign(plan, results[len(op.outputs) :], scope)

    @staticmethod
    def _chosen(index: tf.Tensor, results: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """The results of a branch, when all have run."""
        index, found = tf.cast(index, tf.int32), list(results[-1])
        for number, each in reversed([*enumerate(results[:-1])]):
            found = [tf.where(index == number, *pair) for pair in zip(each, found, strict=True)]
        return found

    @staticmethod
    def _assign(plan: Plan, results: Sequence[tf.Tensor], scope: Scope) -> None:
        for (number, layout), new in zip(plan.assigned.items(), results, strict=True):
            scope.state[number] = Value(layout, new, None, scope)

    def _laid_out(self, values: Sequence[Value], plan: Plan) -> list[Value]:
        """Values in the layouts that a plan needs."""
        return [self._laid(value, need) for value, need in zip(values, plan.need, strict=True)]

    def _laid(self, value: Value, layout: Layout) -> Value:
        if value.variable is not None or value.layout == layout:
            return value
        return Value(layout, self.convert(value, layout), value.source, value.scope, value.made_of)

    def _add_loop(
        self, op: Operation, plan: Plan, inputs: list[Value], taken: State, scope: Scope
    ) -> None:
        given = self._laid_out(inputs, plan)
        condition, body = scope.planned.inner[op]
        fixed = body.program.passed_through
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        written = [*plan.assigned]
        start = [tf.identity(given[place].local) for place in moving]
        start += [tf.identity(taken[number].local) for number in written]

        def inner(planned: Planned, state: Sequence[tf.Tensor]) -> tuple[Scope, list[Value]]:
            own = iter(state)
            values = []
            for place, value in enumerate(given):
                if fixed[place]:
                    values.append(value)
                    continue
                tensor = next(own)
                tell_shape(scope.facts, planned.program.inputs[place], value.layout, tensor)
                values.append(Value(value.layout, tensor, value.source))
            variables = scope.state | taken
            for number in written:
                variables[number] = Value(plan.variables[number], next(own))
            return Scope(planned, variables), values

        def goes_on(*state: tf.Tensor) -> tf.Tensor:
            own, values = inner(condition, state)
            return self.convert(self.add(own, values)[0], REPLICATED)

        def iteration(*state: tf.Tensor) -> list[tf.Tensor]:
            own, values = inner(body, state)
            outs = self.add(own, values)
            found = [self.convert(outs[place], plan.out[place]) for place in moving]
            found += [self.convert(own.state[n], plan.variables[n]) for n in written]
            return [tf.identity(tensor) for tensor in found]

        any_shape = tf.TensorShape(None)
        shapes = [t.shape if t.dtype == tf.variant else any_shape for t in start]
        ended = tf.while_loop(goes_on, iteration, start, shape_invariants=shapes) if start else ()
        for place, tensor in zip(moving, ended, strict=False):
            out = op.outputs[place]
            scope.values[out] = Value(plan.out[place], tensor, out, scope)
        self._assign(plan, [*ended][len(moving) :], scope)
        for place, value in enumerate(given):
            if fixed[place]:
                scope.values[op.outputs[place]] = value


def after(change: tf.Tensor, value: Value) -> Value:
    """The value of a variable, not before there is a change of it.

    A replica's rows of a whole variable would otherwise be made first and lie about until then.
    """
    with tf.control_dependencies([change]):
        return Value(value.layout, tf.identity(value.local), value.source, value.scope)
