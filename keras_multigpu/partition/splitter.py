"""Splits the graph of one device's step over replicas.

`Splitter` walks the global graph once. For each operation it gets a plan, converts the inputs to
the layouts that the plan needs, and adds the operation to the graph that is being traced: the local
graph, which every replica runs on its own rows.

Variables are values here. An assignment gives a variable another value, which later reads see, and
the caller assigns the last values at the end. So a step that fails has changed no variable.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.conversions import (
    MAKERS,
    UNSENT,
    Conversions,
    Exchange,
    Value,
    before_broadcast,
    tell_shape,
)
from keras_multigpu.partition.cost import HEAVY, Work, flops_of
from keras_multigpu.partition.facts import (
    BRANCHES,
    LOOPS,
    GraphFacts,
    has_effect,
    is_call,
    passed_through,
)
from keras_multigpu.partition.families import ELEMENTWISE
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.moments import Moments, joined_moments
from keras_multigpu.partition.plan import Plan, rows_of
from keras_multigpu.partition.planner import (
    TABLE_READS,
    CannotSplit,
    Planner,
    Scope,
    is_compiled,
    is_known,
)
from keras_multigpu.partition.randomness import PHILOX, skip_ahead
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules import skipped_empty
from keras_multigpu.partition.sizes import AnySize
from keras_multigpu.partition.slices import MASKS
from keras_multigpu.partition.variables import (
    ASSIGNMENTS,
    SCATTERED,
    assigned_inputs,
    operations_for,
)

# These run once for all replicas: they may have effects that TensorFlow does not know of.
COUNTED_AS_EFFECTS = {"PrintV2", "Print", "PyFunc", "EagerPyFunc", "PyFuncStateless"}
# The inputs of an assignment to a slice.
SLICED = ("input", "begin", "end", "strides", "value")
# TensorFlow's kernels allow no more.
MOST_AXES = 8


class Splitter:
    """Adds one replica's part of a global graph to the graph that is being traced.

    For its arguments see `Conversions`, `LocalStep.owners` and `Planner`.
    """

    def __init__(
        self,
        exchange: Exchange,
        replica: Replica,
        evenly: bool,
        owners: Mapping[int, int],
        changes_tables: bool,
    ) -> None:
        self.exchange, self.replica, self.owners = exchange, replica, owners
        self.planner = Planner(changes_tables)
        self.conversions = Conversions(exchange, replica, evenly)
        self.convert, self.cost = self.conversions.convert, self.conversions.cost

    def add(self, scope: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add the operations of a graph; returns its results."""
        for tensor, value in zip(scope.facts.graph.inputs, inputs, strict=True):
            scope.put(tensor, value)
        for op in scope.facts.operations:
            if scope.only is not None and op.name not in scope.only:
                continue
            if op.type == "Placeholder":
                if op.outputs[0].name not in scope.values:
                    raise CannotSplit("a placeholder without a value", op)
                continue
            with self.conversions.asked_by(op, scope.times):
                self._add(op, scope)
        outputs = [tensor.name for tensor in scope.facts.graph.outputs]
        return [scope.values[name] for name in outputs if name in scope.values]

    def _add(self, op: tf.Operation, scope: Scope) -> None:
        inputs = [scope.values[tensor.name] for tensor in op.inputs]
        if is_call(op):
            inner = scope.of_call(op, scope.state)
            if scope.wanted is not None:
                effects = self._has_effects(scope)
                restrict(inner, inputs, scope.wanted, scope.wanted, True, effects)
            if is_compiled(op):
                outs = self._add_compiled(
                    inner, self._laid_out(inputs, self.planner.plan_in(op, scope))
                )
            else:
                outs = self.add(inner, inputs)
            for tensor, value in zip(op.outputs, outs, strict=True):
                scope.put(tensor, value)
            return
        if inputs and inputs[0].variable is not None and self._add_access(op, inputs, scope):
            return
        if op.name in scope.moments:
            self._add_moments(scope.moments[op.name], inputs[0], scope)
        if op.outputs and op.outputs[0].name in scope.values:
            return
        plan = self.planner.plan_in(op, scope)
        after_gather = self._note_cost(op, plan, inputs, scope)
        if op.type in LOOPS:
            self._add_loop(op, plan, inputs, scope)
        elif op.type in BRANCHES:
            self._add_branches(op, plan, inputs, scope)
        else:
            self._add_plain(op, plan, inputs, scope)
        if after_gather:
            for tensor in op.outputs:
                scope.values[tensor.name].after_gather = True

    def _add_compiled(self, inner: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add a function that XLA compiles, because TensorFlow has no kernels for it."""
        if assigned_inputs(inner.facts):
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

    def _note_cost(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> bool:
        """Note the cost of an operation; returns whether it is computed whole after a gather."""
        layouts = (*plan.need, *plan.out)
        whole = plan.combine is None and all(layout == REPLICATED for layout in layouts)
        came = any(isinstance(value.layout, Rows) or value.after_gather for value in inputs)
        if op.type in HEAVY:
            flops = flops_of(op, scope.facts)
            flops = None if flops is None else flops * scope.times
            self.cost.work.append(Work(flops, op, not whole, whole and came))
        return whole and came

    def _set(self, op: tf.Operation, plan: Plan, outs: Any, inputs: Any, scope: Scope) -> None:
        for tensor, layout, local in zip(op.outputs, plan.out, outs, strict=True):
            scope.put(tensor, Value(layout, local, tensor, scope, inputs))

    def _add_plain(self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        facts = scope.facts
        if op.type == "Const":
            # Only on demand: half of them, shapes and axes, are replaced.
            self._set(op, plan, [lambda: self._run(op, plan, [], scope)[0]], inputs, scope)
            return
        known = [facts.value(tensor) for tensor in op.outputs]
        if known and all(is_known(value) for value in known):
            outs = [
                lambda value=value, tensor=tensor: self.replica.tensor_of(value, tensor.dtype)
                for value, tensor in zip(known, op.outputs, strict=True)
            ]
            self._set(op, plan, outs, inputs, scope)
            return
        if set(plan.need) <= {REPLICATED} and (op.type in MAKERS or self._is_lazy(op, inputs)):
            # Whole only for those that ask for all of it. By the plan's layout most ask for rows.
            whole, out = Plan(plan.need, (REPLICATED,)), op.outputs[0]
            scope.values[out.name] = Value(
                REPLICATED, lambda: self._run(op, whole, inputs, scope)[0], out, scope, inputs
            )
            return
        self._set(op, plan, self._run(op, plan, inputs, scope), inputs, scope)

    def _is_lazy(self, op: tf.Operation, inputs: Sequence[Value]) -> bool:
        """Whether to compute it later, when it is known whether a replica's rows are enough."""
        return (
            op.type in ELEMENTWISE
            and len(op.outputs) == 1
            and any(value.is_lazy and value.layout == REPLICATED for value in inputs)
        )

    def _run(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> list[tf.Tensor]:
        outs = self._run_before_broadcast(op, plan, inputs, scope)
        if outs is not None:
            return outs
        given = [self.convert(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        if runs_once(op, self.planner.changes_tables):
            self.cost.once.append(op)
            outs = self._run_once(op, given)
            rows = rows_of(plan.out)
            return outs if rows is None else [self.replica.rows_of(outs[0], rows)]
        outs = self._run_unless_empty(op, plan, given, scope)
        return [self.conversions.combine(plan.combine, outs[0])] if plan.combine else outs

    def _run_before_broadcast(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
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
        found = {n: self.convert(inputs[n], plan.need[n]) for n in whole}
        given = [found[n] if make is None else make() for n, make in enumerate(slim)]
        if op.type != "AddN":
            return self.replica.run(op, given)
        rest = [found[n] for n in whole]
        total = rest[0] if len(rest) == 1 else tf.add_n(rest)
        for n, each in enumerate(given):
            total = total if n in found else total + each
        return [total]

    def _run_unless_empty(
        self, op: tf.Operation, plan: Plan, given: list[tf.Tensor], scope: Scope
    ) -> list[tf.Tensor]:
        """A replica's part of an operation; nothing if it has no rows and the kernel needs some."""

        def run() -> list[tf.Tensor]:
            return plan.emit(self.replica, given) if plan.emit else self.replica.run(op, given)

        all_dims: list[Any] = [scope.facts.dims(tensor) for tensor in op.outputs]
        known = all(dims is not None and None not in dims for dims in all_dims)
        rows = rows_of(plan.need)
        if rows is None or not known or not skipped_empty(op, plan, self.exchange.on_cpu):
            return run()
        sizes = [self.replica.batches[block.batch] for block in rows.blocks]
        if any(isinstance(size, int) and size >= self.exchange.replicas for size in sizes):
            # A batch of a known size is cut evenly: each replica has some of it.
            return run()
        shapes = [
            self.replica.shape_of(dims, layout)
            for dims, layout in zip(all_dims, plan.out, strict=True)
        ]

        def nothing() -> list[tf.Tensor]:
            return [
                tf.zeros(shape, tensor.dtype)
                for shape, tensor in zip(shapes, op.outputs, strict=True)
            ]

        some = self.replica.local_length(rows.blocks) > 0
        return list(tf.nest.flatten(tf.cond(some, run, nothing)))

    def again(self, value: Value, inputs: Sequence[tf.Tensor], whole: bool) -> tf.Tensor:
        """Run the operation that made a value again, on other inputs.

        Args:
            value: The value.
            inputs: The other inputs.
            whole: Whether to run the operation itself, not this replica's part of it.
        """
        assert value.source is not None and value.scope is not None
        op = value.source.op
        layouts = tuple(each.layout for each in value.made_of)
        plan = self.planner.plan_operation(op, layouts, value.scope)
        if plan.emit and not whole:
            return plan.emit(self.replica, list(inputs))[value.source.value_index]
        return self.replica.run(op, inputs)[value.source.value_index]

    def _run_once(self, op: tf.Operation, given: list[tf.Tensor]) -> list[tf.Tensor]:
        """The results of an operation that the first replica runs for all."""
        if self.exchange.replicas == 1:
            return self.replica.run(op, given)
        first = self.replica.is_first
        if not op.outputs:
            tf.cond(
                first,
                lambda: (self.replica.run(op, given), tf.constant(True))[1],
                lambda: tf.constant(False),
            )
            return []
        if any(tensor.dtype in UNSENT for tensor in op.outputs):
            raise CannotSplit("its result cannot be sent to the other replicas", op)

        def run() -> list[tf.Tensor]:
            found = self.replica.run(op, given)
            shapes = [tf.shape(tensor) for tensor in found]
            padded = [tf.pad(shape, [[0, MOST_AXES - tf.size(shape)]]) for shape in shapes]
            ranks = [tf.size(shape) for shape in shapes]
            return [tf.reshape(tensor, [-1]) for tensor in found] + padded + ranks

        def nothing() -> list[tf.Tensor]:
            count = len(op.outputs)
            flat = [tf.zeros([0], tensor.dtype) for tensor in op.outputs]
            return flat + [tf.zeros([MOST_AXES], tf.int32)] * count + [tf.constant(0)] * count

        outs = list(tf.cond(first, run, nothing))
        count, results = len(op.outputs), []
        for place, tensor in enumerate(op.outputs):
            # The other replicas do not know how large it is.
            shape = self.conversions.sum(outs[count + place])
            rank = self.conversions.sum(outs[2 * count + place])
            size = tf.reduce_prod(tf.where(tf.range(MOST_AXES) < rank, shape, 1))
            flat = outs[place]
            flat = tf.cond(first, lambda f=flat: f, lambda f=flat, n=size: tf.zeros([n], f.dtype))
            whole = tf.reshape(self.conversions.sum(flat), shape[:rank])
            whole.set_shape(tensor.shape)
            results.append(whole)
        return results

    # Variables.

    def _add_access(self, op: tf.Operation, inputs: list[Value], scope: Scope) -> bool:
        """Read or assign a variable; False where its handle is only passed on."""
        number = inputs[0].variable
        if number is None or op.type in (*LOOPS, *BRANCHES):
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
            places, updates = (self.convert(value, REPLICATED) for value in inputs[1:])
            before = self.convert(present, REPLICATED)
            if not op.type.startswith("ResourceScatterNd"):
                places = places[..., tf.newaxis]
            new = SCATTERED[op.type](before, places, updates)
        elif op.type == "ResourceStridedSliceAssign":
            wholes = [self.convert(value, REPLICATED) for value in [present, *inputs[1:]]]
            masks = {name: op.get_attr(name) for name in MASKS}
            new = tf.raw_ops.TensorStridedSliceUpdate(
                **dict(zip(SLICED, wholes, strict=True)), **masks
            )
        elif op.type == "RngReadAndSkip" and scope.facts.value(op.inputs[1]) == PHILOX:
            before, skipped = (self.convert(value, REPLICATED) for value in (present, inputs[2]))
            new = skip_ahead(before, skipped)
            self._set(op, self.planner.plan_in(op, scope), [before], inputs, scope)
        elif op.type in ("ResourceGather", "ResourceGatherNd"):
            plan = self.planner.plan_in(op, scope)
            before = self.convert(present, REPLICATED)
            places = self.convert(inputs[1], plan.need[1])
            if op.type == "ResourceGather":
                out = tf.gather(before, places, batch_dims=op.get_attr("batch_dims"))
            else:
                out = tf.gather_nd(before, places)
            self._set(op, plan, [out], inputs, scope)
        elif op.type in ("VariableShape", "VarIsInitializedOp"):
            shape = tf.shape(self.convert(present, REPLICATED))
            out = shape if op.type == "VariableShape" else tf.constant(True)
            self._set(op, Plan((REPLICATED,), (REPLICATED,)), [out], inputs, scope)
        else:
            raise CannotSplit("it uses a variable in a way that is not supported", op)
        if new is not None:
            scope.state[number] = Value(REPLICATED, new, None, scope)
        return True

    # Loops and conditions.

    def _add_branches(
        self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope
    ) -> None:
        given = self._laid_out(inputs, plan)
        places = {n for facts in scope.facts.inner[op.name] for n in assigned_inputs(facts)}
        written = variables_of([given[1 + place] for place in places])
        if scope.wanted is not None:
            written = [number for number in written if number in scope.wanted]
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
        self._set(op, plan, results, inputs, scope)

    def _branched(
        self,
        op: tf.Operation,
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

        def branch(facts: GraphFacts) -> Any:
            def run() -> list[tf.Tensor]:
                inner = Scope(facts, dict(scope.state), scope.in_loop)
                inner.times = scope.times
                if apart or scope.wanted is not None:
                    known = variables_of(given)
                    allowed = {n for n in known if self.owners.get(n) in (None, owner)}
                    effects = owner is None and self._has_effects(scope)
                    restrict(inner, given[1:], allowed, written, bool(layouts), effects)
                outs = self.add(inner, given[1:])
                found = [
                    self.convert(value, layout)
                    for value, layout in zip(outs, layouts, strict=bool(layouts))
                ]
                found += [self.convert(inner.state[number], REPLICATED) for number in written]
                return [tf.identity(tensor) for tensor in found]

            return run

        index = given[0].local
        if "Case" in op.type:
            flat = tf.switch_case(index, [branch(facts) for facts in scope.facts.inner[op.name]])
        else:
            chosen = index if index.dtype == tf.bool else tf.cast(index, tf.bool)
            flat = tf.cond(chosen, *[branch(facts) for facts in scope.facts.inner[op.name]])
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

    def _add_loop(self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        given = self._laid_out(inputs, plan)
        condition, body = scope.facts.inner[op.name]
        fixed = passed_through(body.graph)
        moving = [place for place, is_fixed in enumerate(fixed) if not is_fixed]
        written = variables_of([given[place] for place in assigned_inputs(body)])
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
                tell_shape(facts, facts.graph.inputs[place], value.layout, tensor)
                values.append(Value(value.layout, tensor, value.source))
                values[-1].after_gather = value.after_gather
            variables = dict(scope.state)
            for number in written:
                variables[number] = Value(REPLICATED, next(own))
            found = Scope(facts, variables, in_loop=facts is body)
            found.times = scope.times * turns_of(op, scope.facts)
            return found, values

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
            scope.put(out, Value(plan.out[place], tensor, out, scope))
        for number, tensor in zip(written, ended[len(moving) :], strict=True):
            scope.state[number] = Value(REPLICATED, tensor, None, scope)
        for place, value in enumerate(given):
            if fixed[place]:
                scope.put(op.outputs[place], value)


def restrict(
    inner: Scope,
    given: Sequence[Value],
    allowed: Collection[int],
    wanted: Collection[int],
    results: bool,
    effects: bool,
) -> None:
    """Restrict a scope to what some results and the new values of some variables depend on.

    Args:
        inner: The scope.
        given: The inputs of its graph.
        allowed: The numbers of the variables that it may assign.
        wanted: The numbers of those whose new values are needed outside.
        results: As for `operations_for`.
        effects: As for `operations_for`.
    """
    inner.wanted = set(allowed)
    handles = [value.variable for value in given]
    inner.only = operations_for(inner.facts, handles, wanted, results, effects)


def turns_of(op: tf.Operation, facts: GraphFacts) -> AnySize:
    """How many iterations a loop has; 1 if that is not known."""
    # The first inputs of TensorFlow's loops are a counter and its bound.
    bound = facts.value(op.inputs[1]) if len(op.inputs) > 1 else None
    turns: Any = None if bound is None or bound.ndim else bound[()]
    return turns if turns is not None and (not isinstance(turns, int) or turns > 0) else 1


def variables_of(handles: Sequence[Value]) -> list[int]:
    """The numbers of the variables that handles refer to."""
    return sorted({value.variable for value in handles if value.variable is not None})


def runs_once(op: tf.Operation, changes_tables: bool) -> bool:
    """Whether only one replica may run an operation, because it has effects or a state.

    Args:
        op: The operation, which does not access a known variable.
        changes_tables: As in `Planner`.
    """
    if op.type in COUNTED_AS_EFFECTS:
        return True
    if op.type in TABLE_READS:
        return changes_tables
    return has_effect(op) and op.type not in ("Assert", "EmptyTensorList", "HashTableV2")
