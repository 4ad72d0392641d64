"""Splits the graph of one device's step over replicas.

`Splitter` walks a graph once. For each operation it asks the planner how inputs have to lie,
converts those that lie otherwise, and adds the operation to the graph that is being traced. That is
a local graph: every replica runs it on its own rows.

Variables are values here: an assignment gives a variable another value, which later reads see, and
what comes out in the end is assigned by the caller. So a step that fails leaves nothing
half done.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.account import HEAVY, Account, Work, flops_of
from keras_multigpu.partition.conversions import (
    MAKERS,
    UNSENT,
    Conversions,
    Exchange,
    Value,
    slim_of,
    tensor_of_sizes,
)
from keras_multigpu.partition.facts import (
    BRANCHES,
    LOOPS,
    GraphFacts,
    has_effect,
    is_call,
    passed_on,
    passed_through,
)
from keras_multigpu.partition.families import ELEMENTWISE
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.moments import Moments, axes_of, joined_moments
from keras_multigpu.partition.needs import operations_for
from keras_multigpu.partition.plan import Plan
from keras_multigpu.partition.planner import (
    ASSIGNMENTS,
    SCATTERED,
    TABLE_READS,
    WRITES,
    CannotSplit,
    Planner,
    Scope,
    is_compiled,
    is_known,
)
from keras_multigpu.partition.randomness import PHILOX, skipped_ahead
from keras_multigpu.partition.rules import skipped_empty
from keras_multigpu.partition.site import Site
from keras_multigpu.partition.sizes import AnySize
from keras_multigpu.partition.slices import MASKS

# What runs once and not on each replica: it has effects, or draws from a state of its own.
COUNTED_AS_EFFECTS = {"PrintV2", "Print", "PyFunc", "EagerPyFunc", "PyFuncStateless"}
# The inputs of a slice that is assigned to.
SLICED = ("input", "begin", "end", "strides", "value")
# As many as a tensor has at most in TensorFlow's kernels.
AXES = 8


class Splitter:
    """Adds one replica's part of a global graph to the graph that is being traced.

    Args:
        exchange: How replicas exchange values.
        numbers: What the replica knows of its rows.
        evenly: As in `Conversions`.
        owners: As in `LocalStep`.
    """

    def __init__(
        self,
        exchange: Exchange,
        numbers: LocalNumbers,
        evenly: bool = False,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.exchange, self.numbers, self.owners = exchange, numbers, owners or {}
        self.planner = Planner()
        self.conversions = Conversions(exchange, numbers, evenly)
        self.convert = self.conversions.convert

    @property
    def account(self) -> Account:
        """What the step costs."""
        return self.conversions.account

    def add(self, scope: Scope, inputs: Sequence[Value]) -> list[Value]:
        """Add a graph's operations to the graph that is being traced; its results."""
        for tensor, value in zip(scope.facts.graph.inputs, inputs, strict=True):
            scope.values[tensor.name] = value
            scope.layouts[tensor.name] = value.layout
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
                self._restrict(inner, inputs, scope.wanted, scope.wanted, True, effects)
            if is_compiled(op):
                plan = self.planner.plan_in(op, scope)
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
        plan = self.planner.plan_in(op, scope)
        after_gather = self._note(op, plan, inputs, scope)
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
            before, self.numbers.compiled = self.numbers.compiled, True
            outs = self.add(inner, given)
            layouts.extend(value.layout for value in outs)
            found = [value.local for value in outs]
            self.numbers.compiled = before
            return found

        call = tf.function(function, autograph=False, jit_compile=True)
        outs = call(*[value.local for value in moving])
        return [Value(layout, out) for layout, out in zip(layouts, outs, strict=True)]

    def _add_moments(self, moments: Moments, value: Value, scope: Scope) -> None:
        """Take a mean and a variance together, if they are taken along rows."""
        axes = axes_of(moments, value.layout, scope.facts)
        if axes is None or not isinstance(value.layout, Rows):
            return
        made = joined_moments(
            value.local,
            axes,
            value.layout,
            self.conversions.sum,
            scope.facts,
            moments,
            self.numbers,
        )
        for op, tensor in zip((moments.mean, moments.variance), made, strict=True):
            out = op.outputs[0]
            scope.values[out.name] = Value(REPLICATED, tensor, out, scope)
            scope.layouts[out.name] = REPLICATED

    def _note(self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope) -> bool:
        """Note what an operation costs; returns whether it is computed whole after a gather."""
        lies = (*plan.need, *plan.out)
        whole = plan.combine is None and all(layout == REPLICATED for layout in lies)
        came = any(isinstance(value.layout, Rows) or value.after_gather for value in inputs)
        if op.type in HEAVY:
            flops = flops_of(op, scope.facts)
            self.account.work.append(Work(flops, op, not whole, whole and came, scope.times))
        return whole and came

    def _set(self, op: tf.Operation, plan: Plan, outs: Any, inputs: Any, scope: Scope) -> None:
        for tensor, layout, local in zip(op.outputs, plan.out, outs, strict=True):
            scope.values[tensor.name] = Value(layout, local, tensor, scope, inputs)

    def _add_plain(self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope) -> None:
        facts = scope.facts
        if op.type == "Const":
            # Half of them are not needed: shapes and axes are written anew.
            self._set(op, plan, [lambda: self._run(op, plan, [], scope)[0]], inputs, scope)
            return
        known = [facts.value(tensor) for tensor in op.outputs]
        if known and all(is_known(value) for value in known):
            outs = [
                lambda value=value, tensor=tensor: tensor_of_sizes(
                    value, tensor.dtype, self.numbers
                )
                for value, tensor in zip(known, op.outputs, strict=True)
            ]
            self._set(op, plan, outs, inputs, scope)
            return
        if set(plan.need) <= {REPLICATED} and (op.type in MAKERS or self._is_lazy(op, inputs)):
            out = op.outputs[0]
            # Who asks for all of it makes it, also where most ask for rows.
            whole = Plan(plan.need, (REPLICATED,))
            scope.values[out.name] = Value(
                REPLICATED, lambda: self._run(op, whole, inputs, scope)[0], out, scope, inputs
            )
            return
        self._set(op, plan, self._run(op, plan, inputs, scope), inputs, scope)

    def _is_lazy(self, op: tf.Operation, inputs: Sequence[Value]) -> bool:
        """Whether it can be computed later, when it is known whether rows of it are enough."""
        return (
            op.type in ELEMENTWISE
            and len(op.outputs) == 1
            and any(value.is_lazy and value.layout == REPLICATED for value in inputs)
        )

    def _run(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], scope: Scope
    ) -> list[tf.Tensor]:
        site = Site(op, self.numbers)
        slim = self._with_slim(op, plan, inputs, site, scope)
        if slim is not None:
            self._tell_shapes(op, plan, slim, scope)
            return slim
        given = [self.convert(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        if runs_once(op, self.planner.changes_tables):
            self.account.once.append(op)
            outs = self._once(op, site, given, scope)
            rows = plan.out[0] if plan.out else None
            return [self.numbers.rows_of(outs[0], rows)] if isinstance(rows, Rows) else outs
        outs = self._unless_empty(op, plan, site, given, scope)
        if plan.combine:
            outs = [self.conversions.combined(plan.combine, outs[0])]
        self._tell_shapes(op, plan, outs, scope)
        return list(outs)

    def _with_slim(
        self, op: tf.Operation, plan: Plan, inputs: Sequence[Value], site: Site, scope: Scope
    ) -> list[tf.Tensor] | None:
        """An operation on inputs as they were before broadcasting; None if none was broadcast.

        The gradient of a mean is broadcast to the shape of the batch and then added to others.
        """
        if op.type not in ("Mul", "AddV2", "Sub", "AddN") or not isinstance(plan.out[0], Rows):
            return None
        if plan.emit or len(inputs) < 2 or plan.need[0] != plan.need[-1]:
            return None
        slim = [slim_of(value, plan.out[0].axis) for value in inputs]
        whole = [n for n, each in enumerate(slim) if each is None]
        if len(whole) in (0, len(inputs)):
            return None
        dims = scope.facts.dims(op.outputs[0])
        if any(scope.facts.dims(tensor) != dims for tensor in op.inputs):
            return None
        found = {n: self.convert(inputs[n], plan.need[n]) for n in whole}
        given = [found[n] if make is None else make() for n, make in enumerate(slim)]
        if op.type != "AddN":
            return site.run(given)
        rest = [found[n] for n in whole]
        total = rest[0] if len(rest) == 1 else tf.add_n(rest)
        for n, each in enumerate(given):
            total = total if n in found else total + each
        return [total]

    def _unless_empty(
        self,
        op: tf.Operation,
        plan: Plan,
        site: Site,
        given: list[tf.Tensor],
        scope: Scope,
    ) -> list[tf.Tensor]:
        """A replica's part of an operation; nothing, where its kernel fails without rows."""

        def run() -> list[tf.Tensor]:
            return list(plan.emit(site, given) if plan.emit else site.run(given))

        dims = [scope.facts.dims(tensor) for tensor in op.outputs]
        known = all(own is not None and None not in own for own in dims)
        if not skipped_empty(op, plan, self.exchange.on_cpu) or not known:
            return run()
        rows = next(layout for layout in plan.need if isinstance(layout, Rows))
        sizes = [self.numbers.batches[block.batch] for block in rows.blocks]
        if any(isinstance(size, int) and size >= self.exchange.replicas for size in sizes):
            # Batches of one known size are cut evenly: each replica has some.
            return run()
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
            tell_shape(scope.facts, tensor, layout, out)

    def again(self, value: Value, inputs: Sequence[tf.Tensor], whole: bool) -> tf.Tensor:
        """The result of the operation that made a value on other inputs, in the same layouts.

        Args:
            value: The value.
            inputs: The other inputs.
            whole: Whether they are whole instead, for the operation itself.
        """
        assert value.source is not None and value.scope is not None
        op, site = value.source.op, Site(value.source.op, self.numbers)
        plan = self.planner.plan_operation(
            op, tuple(each.layout for each in value.made_of), value.scope
        )
        outs = plan.emit(site, list(inputs)) if plan.emit and not whole else site.run(inputs)
        return outs[value.source.value_index]

    def _once(
        self, op: tf.Operation, site: Site, given: list[tf.Tensor], scope: Scope
    ) -> list[tf.Tensor]:
        """The results of an operation that the first replica alone runs, for all."""
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
            shape, rank = (
                self.conversions.sum(outs[count + place]),
                self.conversions.sum(outs[2 * count + place]),
            )
            size = tf.reduce_prod(tf.where(tf.range(AXES) < rank, shape, 1))
            flat = outs[place]
            flat = tf.cond(first, lambda f=flat: f, lambda f=flat, n=size: tf.zeros([n], f.dtype))
            whole = tf.reshape(self.conversions.sum(flat), shape[:rank])
            whole.set_shape(tensor.shape)
            results.append(whole)
        return results

    # Variables.

    def _add_access(self, op: tf.Operation, inputs: list[Value], scope: Scope) -> bool:
        """Read or assign a variable; False where its handle is only passed on."""
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
            if not op.type.startswith("ResourceScatterNd"):
                places = places[..., tf.newaxis]
            new = SCATTERED[op.type](before, places, updates)
            scope.state[number] = Value(REPLICATED, new, None, scope)
        elif op.type == "ResourceStridedSliceAssign":
            wholes = [self.convert(value, REPLICATED) for value in [present, *inputs[1:]]]
            masks = {name: op.get_attr(name) for name in MASKS}
            new = tf.raw_ops.TensorStridedSliceUpdate(
                **dict(zip(SLICED, wholes, strict=True)), **masks
            )
            scope.state[number] = Value(REPLICATED, new, None, scope)
        elif op.type == "RngReadAndSkip" and scope.facts.value(op.inputs[1]) == PHILOX:
            before, skipped = (self.convert(value, REPLICATED) for value in (present, inputs[2]))
            new = skipped_ahead(before, skipped)
            scope.state[number] = Value(REPLICATED, new, None, scope)
            self._set(op, self.planner.plan_in(op, scope), [before], inputs, scope)
        elif op.type in ("ResourceGather", "ResourceGatherNd"):
            plan = self.planner.plan_in(op, scope)
            before = self.convert(present, REPLICATED)
            places = self.convert(inputs[1], plan.need[1])
            if op.type == "ResourceGather":
                out = tf.gather(before, places, batch_dims=op.get_attr("batch_dims"))
            else:
                out = tf.gather_nd(before, places)
            self._tell_shapes(op, plan, [out], scope)
            self._set(op, plan, [out], inputs, scope)
        elif op.type in ("VariableShape", "VarIsInitializedOp"):
            shape = tf.shape(self.convert(present, REPLICATED))
            out = shape if op.type == "VariableShape" else tf.constant(True)
            self._set(op, Plan((REPLICATED,), (REPLICATED,)), [out], inputs, scope)
            scope.layouts[op.outputs[0].name] = REPLICATED
        else:
            raise CannotSplit("it uses a variable in a way that is not supported", op)
        return True

    # Loops and conditions.

    def _add_branches(
        self, op: tf.Operation, plan: Plan, inputs: list[Value], scope: Scope
    ) -> None:
        given = [self._laid(value, need) for value, need in zip(inputs, plan.need, strict=True)]
        graphs = scope.facts.inner[op.name]
        places = {place for facts in graphs for place in written_inputs(facts)}
        written = variables_of([given[1 + place] for place in places])
        if scope.wanted is not None:
            written = [number for number in written if number in scope.wanted]
        for number in written:
            scope.state[number] = self._laid(scope.state[number], REPLICATED)
        # What one replica alone computes is a condition of its own, which the others leave out.
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
        self._tell_shapes(op, plan, results, scope)
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
            owner: Which replica needs the variables, None for all.
            apart: Whether other variables that it assigns are those of others.
        """

        def branch(facts: GraphFacts) -> Any:
            def run() -> list[tf.Tensor]:
                inner = Scope(facts, dict(scope.state), scope.in_loop)
                inner.times = scope.times
                if apart or scope.wanted is not None:
                    known = variables_of(given)
                    allowed = {n for n in known if self.owners.get(n) in (None, owner)}
                    effects = owner is None and self._has_effects(scope)
                    self._restrict(inner, given[1:], allowed, written, bool(layouts), effects)
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
        """Whether effects on other things than variables belong to a scope."""
        return scope.wanted is None or scope.wanted.isdisjoint(self.owners)

    @staticmethod
    def _restrict(
        inner: Scope,
        given: Sequence[Value],
        allowed: Collection[int],
        wanted: Collection[int],
        results: bool,
        effects: bool,
    ) -> None:
        """Let a scope have only what some variables' new values need.

        Args:
            given: The inputs of its graph.
            allowed: The numbers of the variables that may get new values in it.
            wanted: Those whose new values are needed outside.
            results: Whether its results are needed.
            effects: Whether effects on other things than variables belong to it.
        """
        inner.wanted = set(allowed)
        handles = [value.variable for value in given]
        inner.only = operations_for(inner.facts, handles, wanted, results, effects)

    def _laid(self, value: Value, layout: Layout) -> Value:
        """A value in another layout."""
        if value.variable is not None or value.layout == layout:
            return value
        laid = Value(layout, self.convert(value, layout), value.source, value.scope, value.made_of)
        laid.after_gather = layout == REPLICATED and isinstance(value.layout, Rows)
        return laid

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
            tell_shape(scope.facts, out, plan.out[place], tensor)
            scope.values[out.name] = Value(plan.out[place], tensor, out, scope)
        for number, tensor in zip(written, ended[len(moving) :], strict=True):
            scope.state[number] = Value(REPLICATED, tensor, None, scope)
        for place, value in enumerate(given):
            if fixed[place]:
                scope.values[op.outputs[place].name] = value
            scope.layouts[op.outputs[place].name] = plan.out[place]


def turns_of(op: tf.Operation, facts: GraphFacts) -> AnySize:
    """How many iterations a loop has, if that is known; 1 otherwise."""
    # TensorFlow's loops begin with their counter and its bound.
    bound = facts.value(op.inputs[1]) if len(op.inputs) > 1 else None
    turns: Any = None if bound is None or bound.ndim else bound[()]
    return turns if turns is not None and (not isinstance(turns, int) or turns > 0) else 1


def tell_shape(facts: GraphFacts, source: tf.Tensor, layout: Layout, tensor: tf.Tensor) -> None:
    """Set the static shape of a replica's part of a tensor."""
    dims = facts.dims(source)
    if dims is None or source.dtype in (tf.resource, tf.variant):
        return
    own = [dim if isinstance(dim, int) else None for dim in dims]
    if isinstance(layout, Rows):
        own[layout.axis] = None
    if not tensor.shape.is_fully_defined():
        tensor.set_shape(own)


def variables_of(handles: Sequence[Value]) -> list[int]:
    """The numbers of the variables that handles refer to."""
    return sorted({value.variable for value in handles if value.variable is not None})


def runs_once(op: tf.Operation, changes_tables: bool) -> bool:
    """Whether one replica alone may run an operation: it has effects or a state of its own.

    Args:
        op: The operation, which is not about a variable that is known.
        changes_tables: Whether the step changes a lookup table.
    """
    if op.type in COUNTED_AS_EFFECTS:
        return True
    if op.type in TABLE_READS:
        return changes_tables
    return has_effect(op) and op.type not in ("Assert", "EmptyTensorList", "HashTableV2")


def written_inputs(facts: GraphFacts) -> set[int]:
    """The places of a graph's inputs that are handles of variables which it assigns."""
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
