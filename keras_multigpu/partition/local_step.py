"""One replica's part of a step that was traced for one device."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.conversions import Exchange, Value
from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.planner import TABLE_WRITES, Scope
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.partition.splitter import Splitter


class Leaf(NamedTuple):
    """A tensor of the batch.

    Args:
        dims: The lengths of its axes.
        layout: How it comes to the replicas.
        value: What is known of its value, if it is part of a shape.
    """

    dims: list[AnySize | None] | None
    layout: Layout = REPLICATED
    value: np.ndarray | None = None


class Outcome(NamedTuple):
    """The results of a replica's part of a step.

    Args:
        outputs: The step's results; None where the step has None.
        layouts: How they lie.
        assigned: The new values of variables, by their numbers.
    """

    outputs: list[tf.Tensor | None]
    layouts: list[Layout]
    assigned: dict[int, tf.Tensor]


def is_in_order(layout: Layout) -> bool:
    """Whether the replicas' parts, concatenated in their order, are the whole."""
    # Of two blocks the second begins after all replicas' rows of the first.
    return layout != PARTIAL and not (isinstance(layout, Rows) and len(layout.blocks) > 1)


class LocalStep:
    """One replica's part of a step.

    Args:
        whole: The step as one device runs it: a traced function of the batch's tensors.
        leaves: What these are, in their order.
        handles: The handles of the variables that the step may use, by number.
        batches: The size of each batch, by name: a number where the step was traced for it.
        exchange: How replicas exchange values.
        taps: Tensors of the step that are needed besides its results; see `scope`.
    """

    def __init__(
        self,
        whole: Any,
        leaves: Sequence[Leaf],
        handles: Sequence[tf.Tensor],
        batches: Mapping[str, AnySize],
        exchange: Exchange,
        taps: Sequence[tf.Tensor] = (),
    ) -> None:
        self._whole = whole
        self._leaves, self._batches, self._exchange = leaves, dict(batches), exchange
        self._numbers_of = {id(handle): number for number, handle in enumerate(handles)}
        captured = whole.captured_inputs
        dims = [*(leaf.dims for leaf in leaves), *(None for _ in captured)]
        known = {n: leaf.value for n, leaf in enumerate(leaves) if leaf.value is not None}
        self.facts = GraphFacts(whole.graph, dims, self._batches, known, taps=taps)
        # Probes that look at parts of a sum want those of a replica's own examples.
        self._evenly = bool(taps)
        self.owners: Mapping[int, int] = {}
        """Which variables' new values one replica alone computes, by number, and its place."""
        self.splitter: Splitter | None = None
        """What split the step last, with its counts."""
        self.scope: Scope | None = None
        """What became of the tensors of the global graph then."""

    @property
    def numbers_of_inputs(self) -> list[int | None]:
        """Which variable each input of the step's graph is; None for all others."""
        captured = [self._numbers_of.get(id(each)) for each in self._whole.captured_inputs]
        return [*(None for _ in self._leaves), *captured]

    def __call__(
        self,
        replica: tf.Tensor,
        counts: Any,
        leaves: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
        lengths: Mapping[str, tf.Tensor] | None = None,
        whole_results: bool = False,
    ) -> Outcome:
        """Add a replica's part to the graph that is being traced.

        Args:
            replica: The replica's number.
            counts: For each batch how many examples it has, how many those before it, and how
                many all of them together.
            leaves: Its rows of the batch's tensors.
            values: The values of the variables.
            lengths: How long axes are that have names; by default those of the leaves.
            whole_results: Whether each replica shall have the rows of all in the results.
        """
        numbers = self._numbers(replica, counts, leaves, lengths or {})
        splitter = self.splitter = Splitter(self._exchange, numbers, self._evenly, self.owners)
        types = {op.type for op in self.facts.all_operations()}
        splitter.planner.changes_tables = not types.isdisjoint(TABLE_WRITES)
        state = {number: Value(REPLICATED, value) for number, value in enumerate(values)}
        scope = self.scope = Scope(self.facts, dict(state))
        scope.may_exchange = True
        graph_inputs = self._whole.graph.inputs
        inputs = [
            Value(leaf.layout, tensor, source, scope)
            for leaf, tensor, source in zip(self._leaves, leaves, graph_inputs, strict=False)
        ]
        for outer, inner in zip(
            self._whole.captured_inputs, graph_inputs[len(leaves) :], strict=True
        ):
            variable = self._numbers_of.get(id(outer))
            inputs.append(Value(REPLICATED, outer, inner, variable=variable))
        found = splitter.add(scope, inputs)
        layouts = [
            value.layout if is_in_order(value.layout) and not whole_results else REPLICATED
            for value in found
        ]
        outputs = [
            splitter.convert(value, layout) for value, layout in zip(found, layouts, strict=True)
        ]
        assigned = {
            number: splitter.convert(value, REPLICATED)
            for number, value in scope.state.items()
            if value is not state[number]
        }
        return Outcome(list(outputs), layouts, assigned)

    def _numbers(
        self,
        replica: tf.Tensor,
        counts: Any,
        leaves: Sequence[tf.Tensor],
        lengths: Mapping[str, tf.Tensor],
    ) -> LocalNumbers:
        own, before, sizes = {}, {}, dict(lengths)
        for place, name in enumerate(self._batches):
            own[name], before[name], sizes[name] = (counts[place][n] for n in range(3))
        for leaf, tensor in zip(self._leaves, leaves, strict=True):
            for axis, dim in enumerate(leaf.dims or ()):
                is_own = isinstance(leaf.layout, Rows) and leaf.layout.axis == axis
                if isinstance(dim, Size) and len(dim.terms) == 1 and not is_own:
                    ((names, coefficient),) = dim.terms
                    if len(names) == 1 and coefficient == 1 and names[0] not in sizes:
                        sizes[names[0]] = tf.shape(tensor)[axis]
        compiled = self._exchange.compiled
        return LocalNumbers(replica, own, before, sizes, self._batches, compiled)
