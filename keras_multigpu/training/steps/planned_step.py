"""`PlannedStep`: a step that is split, but never runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.cost import HEAVY
from keras_multigpu.partition.exchange import Exchange
from keras_multigpu.partition.facts import BRANCHES, GraphFacts
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.exchange.cuts import descendants, stage_numbers
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.steps.batches import BEFORE_DATA, PartArguments
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.split_step import SplitStep

OWN = "own "
"""A prefix of a batch's name: of its examples, how many one part has."""


class PlannedStep(SplitStep):
    """A step that is split over any number of replicas and never runs, to see what it would cost.

    Args:
        request: The step.
        replicas: How many replicas to plan for.

    Attributes:
        cuts: The names of the operations that mark sums over replicas in a part's graph.
    """

    def __init__(self, request: StepRequest, replicas: int) -> None:
        super().__init__(request._replace(probes=(), trains=False), replicas)

    def _trace_part(self, local: Callable[..., Any], args: PartArguments, *others: Any) -> Any:
        with graph_internals.single_device():
            traced = tf.function(local, autograph=False).get_concrete_function(*args)
        self.cuts = {cut.name for cut in self._exchange.made}
        return traced

    def _divide_optimizer(self, exchange: Exchange) -> dict[int, int]:
        # A plan moves nothing.
        return {}

    def _stay_alone(self, reason: CannotSplit, warns: bool = True) -> None:
        super()._stay_alone(reason, warns=False)

    @property
    def leaves(self) -> list[tuple[list[AnySize | None] | None, tf.DType]]:
        """The lengths of the axes of what a part is given of a batch, and the types."""
        specs = tf.nest.flatten(self.inputs.specs, expand_composites=True)
        found = []
        for leaf, spec, name in zip(self.inputs.leaves, specs, self.inputs.batch_of, strict=True):
            dims = None if leaf.dims is None else list(leaf.dims)
            if dims and name is not None:
                dims[0] = Size.of(name if self.alone else OWN + name)
            found.append((dims, spec.dtype))
        return found

    @property
    def pieces_wait(self) -> bool:
        """Whether pieces of a share are kept until all of them have come as far."""
        if self.alone is not None:
            return False
        graph = self.local.graph
        rows = [BEFORE_DATA + place for place in self.inputs.places_of_rows]
        numbers = stage_numbers(graph, self.cuts)
        of_piece = descendants(graph, {graph.inputs[place].op.name for place in rows}, self.cuts)
        # On CPUs convolutions are inside of conditions.
        kinds = {*HEAVY, *BRANCHES}
        return any(
            op.type in kinds and numbers.get(op.name) and op.name in of_piece
            for op in graph.get_operations()
        )

    def divided(self) -> dict[int, int]:
        """The place of the replica that alone keeps a variable of an optimizer, by its first copy.

        There are none unless replicas divide the optimizer.
        """
        if self.alone is not None or not self._weight_owners:
            return {}
        found = self._slots().find(self.local_step.facts, self.local_step.numbers_of_inputs)
        weights = {id(copies_of(v)[0]) for v in self.model.trainable_variables}
        firsts = {id(self.traced.copies[number][0]): place for number, place in found.items()}
        return {first: place for first, place in firsts.items() if first not in weights}

    def facts_of_part(self) -> GraphFacts:
        """What is known of a part's graph, where its examples are `OWN` many."""
        dims = [dims for dims, _ in self.leaves]
        sizes = self.batches.sizes
        if self._unsplit is not None:
            graph = self.traced.whole.graph
            dims += [None] * (len(graph.inputs) - len(dims))
            return GraphFacts(graph, dims, sizes)
        graph = self.local.graph
        own = [Size.of(OWN + name) for name in self.batches.names]
        totals = [Size.of(name) for name in self.batches.names]
        given: list[Any] = [0, [[each, 0] for each in own], totals, own[0]]
        known = {place: np.array(value, object) for place, value in enumerate(given)}
        dims = [*(list(value.shape) for value in known.values()), *dims]
        dims += [None] * (len(graph.inputs) - len(dims))
        return GraphFacts(graph, dims, sizes, known)
