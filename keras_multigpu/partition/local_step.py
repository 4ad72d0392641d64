"""One replica's part of a step that was traced for one device."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.emission.conversions import Scope, Value
from keras_multigpu.partition.emission.exchange import LocalExchange
from keras_multigpu.partition.emission.splitter import Splitter
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.finding import find_facts
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows, Shard
from keras_multigpu.partition.planning.accumulation import are_terms, let_sums_wait, take_at_once
from keras_multigpu.partition.planning.cost import CostFinder, StepCost
from keras_multigpu.partition.planning.gathering import find_buckets
from keras_multigpu.partition.planning.part import Part
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.planning.planner import Planner, scattered_in
from keras_multigpu.partition.program import Program, has_effect
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.sizes import AnySize, Size


class Leaf(NamedTuple):
    """A tensor of the batch.

    Args:
        dims: The lengths of its axes.
        layout: The layout in which the replicas get it.
        value: Its value, as far as that is known, if it is part of a shape.
    """

    dims: list[AnySize | None] | None
    layout: Layout = REPLICATED
    value: np.ndarray | None = None


class Outcome(NamedTuple):
    """The results of a replica's part of a step.

    Args:
        outputs: The step's results.
        layouts: Their layouts.
        assigned: The new values of variables, by number.
    """

    outputs: list[tf.Tensor]
    layouts: list[Layout]
    assigned: dict[int, tf.Tensor]


class LocalStep:
    """One replica's part of a step.

    Args:
        whole: The step as one device runs it: a traced function of the batch's tensors.
        leaves: These tensors.
        handles: The handles of the variables that the step may use, by number.
        batches: The size of each batch, by name: a number if the step was traced for it.
        exchange: How replicas exchange values.
        taps: Tensors that are needed besides the results; `scope` has their values.
        variables: The layouts in which it takes and leaves the variables; all whole by default.
        may_wait: Whether variables may hold open sums after it.
    """

    def __init__(
        self,
        whole: Any,
        leaves: Sequence[Leaf],
        handles: Sequence[tf.Tensor],
        batches: Mapping[str, AnySize],
        exchange: LocalExchange,
        taps: Sequence[tf.Tensor] = (),
        variables: Sequence[Layout] = (),
        may_wait: bool = False,
    ) -> None:
        self._whole = whole
        self._leaves, self._batches, self.exchange = leaves, dict(batches), exchange
        self._variables = dict(enumerate(variables or [REPLICATED] * len(handles)))
        numbers_of = {id(handle): number for number, handle in enumerate(handles)}
        captured = whole.captured_inputs
        self._dims = [*(leaf.dims for leaf in leaves), *(None for _ in captured)]
        numbers = [*(None for _ in leaves), *(numbers_of.get(id(each)) for each in captured)]
        self.program = Program(whole.graph, numbers, taps)
        self.facts = self._find_facts()
        self._may_wait = may_wait
        self.waiting: set[int | None] = set()
        """The numbers of the variables that may hold open sums, once it is planned."""
        self.splitter: Splitter | None = None
        """The splitter of the last call."""
        self.scope: Scope | None = None
        """The tensors of the global graph in the last call."""

    @functools.cached_property
    def planned(self) -> Planned:
        """How replicas share it, which is decided before anything is emitted."""
        closings = let_sums_wait(self.program) if self._may_wait else []
        if closings:
            self.facts = self._find_facts()
        planned = self._plan()
        at_once = [closing for closing in closings if not are_terms(closing, planned)]
        if at_once:
            for closing in at_once:
                take_at_once(closing, self.program)
            planned = self._plan()
        self.waiting = {each.accumulator for each in closings if each not in at_once}
        return planned

    def _find_facts(self) -> Facts:
        known = {n: leaf.value for n, leaf in enumerate(self._leaves) if leaf.value is not None}
        return find_facts(self.program, self._dims, self._batches, known)

    def _plan(self) -> Planned:
        layouts = [leaf.layout for leaf in self._leaves]
        layouts += [REPLICATED] * (len(self.program.inputs) - len(layouts))
        planner = Planner(self.facts)
        planned = planner.plan(self.program, layouts, self._variables, may_exchange=True)
        planned.scattered = scattered_in(planned, self._variables)
        planned.buckets = find_buckets(planned)
        return planned

    @functools.cached_property
    def part(self) -> Part:
        """What a replica runs."""
        return Part(self.planned, self.exchange.places, self.layouts(), self._variables)

    @functools.cached_property
    def cost(self) -> StepCost:
        """What replicas exchange, and what they share; raises `CannotSplit`."""
        finder = CostFinder(self.exchange.replicas)
        finder.add(self.part)
        return finder.cost

    @property
    def has_effects(self) -> bool:
        """Whether it has other effects than the new values of variables, which it returns."""
        return any(has_effect(op) and (op.inner or not op.writes) for op in self.program.operations)

    def layouts(self, whole_results: bool = False) -> list[Layout]:
        """The layouts of the results.

        Args:
            whole_results: Whether each replica gets all rows of the results.
        """
        # The parts of a result with several blocks, put together, are not in the order of its rows.
        return [
            layout
            if isinstance(layout, Rows) and len(layout.blocks) == 1 and not whole_results
            else REPLICATED
            for layout in self.planned.outs
        ]

    def __call__(
        self,
        index: tf.Tensor,
        counts: Any,
        leaves: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
        lengths: Mapping[str, tf.Tensor] | None = None,
        whole_results: bool = False,
        place: tf.Tensor | None = None,
        keeps_terms: tf.Tensor | None = None,
    ) -> Outcome:
        """Add a replica's part to the graph that is being traced.

        Args:
            index: The number of the part.
            counts: For each batch, how many examples the replica has, how many are before its own,
                and how many there are in all.
            leaves: Its rows of the batch's tensors.
            values: The values of the variables, in their layouts.
            lengths: The values of named sizes; by default, those of the leaves.
            whole_results: Whether each replica gets all rows of the results.
            place: The place of the replica among those that divide variables, if that is another.
            keeps_terms: As for `Replica`.
        """
        # Before anything is emitted, everything that cannot be is named.
        _ = self.cost
        replica = self._replica(index, counts, leaves, lengths or {}, place, keeps_terms)
        splitter = self.splitter = Splitter(self.exchange, replica)
        taken = {n: Value(self._variables[n], value) for n, value in enumerate(values)}
        scope = self.scope = Scope(self.planned, dict(taken))
        inner = self.program.inputs
        inputs = [
            Value(leaf.layout, tensor, source, scope)
            for leaf, tensor, source in zip(self._leaves, leaves, inner, strict=False)
        ]
        for outer, source in zip(self._whole.captured_inputs, inner[len(leaves) :], strict=True):
            inputs.append(Value(REPLICATED, outer, source))
        results, layouts = splitter.add(scope, inputs), self.layouts(whole_results)
        outputs = [splitter.convert(*each) for each in zip(results, layouts, strict=True)]
        assigned = {
            number: splitter.convert(value, self._variables[number])
            for number, value in scope.state.items()
            if value is not taken[number]
        }
        return Outcome(outputs, layouts, assigned)

    def _replica(
        self,
        index: tf.Tensor,
        counts: Any,
        leaves: Sequence[tf.Tensor],
        lengths: Mapping[str, tf.Tensor],
        place: tf.Tensor | None,
        keeps_terms: tf.Tensor | None,
    ) -> Replica:
        own: dict[str | Shard, tf.Tensor] = {}
        before: dict[str | Shard, tf.Tensor] = {}
        sizes = dict(lengths)
        for number, name in enumerate(self._batches):
            own[name], before[name], sizes[name] = (counts[number][n] for n in range(3))
        for leaf, tensor in zip(self._leaves, leaves, strict=True):
            for axis, dim in enumerate(leaf.dims or ()):
                is_own = isinstance(leaf.layout, Rows) and leaf.layout.axis == axis
                if isinstance(dim, Size) and len(dim.terms) == 1 and not is_own:
                    ((names, coefficient),) = dim.terms
                    if len(names) == 1 and coefficient == 1 and names[0] not in sizes:
                        sizes[names[0]] = tf.shape(tensor)[axis]
        exchange = self.exchange
        for shard in self._shards:
            first, stop = shard.bounds(index if place is None else place, exchange.places)
            own[shard], before[shard] = stop - first, first
        where = exchange.compiled, exchange.on_cpu
        return Replica(index, own, before, sizes, self._batches, place, *where, keeps_terms)

    @property
    def _shards(self) -> set[Shard]:
        """The axes of variables that replicas divide."""
        rows = [layout for layout in self._variables.values() if isinstance(layout, Rows)]
        found = {block.batch for layout in rows for block in layout.blocks}
        return {batch for batch in found if isinstance(batch, Shard)}
