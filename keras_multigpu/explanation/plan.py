"""`Plan`: a step that is split for any number of replicas and never runs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.finding import find_facts
from keras_multigpu.partition.planning.cost import HEAVY
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.partition.program import Program
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.exchange.cuts import descendants, stage_numbers
from keras_multigpu.training.exchange.sums import Cuts
from keras_multigpu.training.steps.batches import BATCH, BEFORE_DATA, PartArguments
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.passes import cuts_of
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.traced_step import TracedStep

OWN = "own "
"""A prefix of a batch's name: of its examples, how many one part has."""


class Plan:
    """What a step would cost, split over any number of replicas.

    Args:
        request: The step.
        replicas: How many replicas to plan for.

    Attributes:
        request: The step.
        step: The step, split.
    """

    def __init__(self, request: StepRequest, replicas: int) -> None:
        self.request = request
        traced = TracedStep(request._replace(probes=()))
        self.step = PartitionedStep(traced, cuts_of(request, replicas))
        try:
            _ = self.step.cost
        except CannotSplit as reason:
            self.step = PartitionedStep(traced, cuts_of(request, 1), unsplit_because=reason)

    @functools.cached_property
    def local(self) -> Any:
        """A part, traced; None if there is no graph of it."""
        with contextlib.suppress(CannotSplit):
            self.step.emit(self._trace)
        return self.step.local

    def _trace(self, local: Callable[..., Any], args: PartArguments, cuts: Cuts, *_: Any) -> Any:
        """Trace a part, without making stages of it."""
        with graph_internals.single_device():
            traced = tf.function(local, autograph=False).get_concrete_function(*args)
        self._cuts = {cut.name for cut in cuts.made}
        return traced

    @property
    def leaves(self) -> list[tuple[list[AnySize | None] | None, tf.DType]]:
        """The lengths of the axes of what a part is given of a batch, and the types."""
        inputs = self.step.inputs
        specs = tf.nest.flatten(inputs.specs, expand_composites=True)
        found = []
        for leaf, spec, holds_rows in zip(inputs.leaves, specs, inputs.hold_rows, strict=True):
            dims = None if leaf.dims is None else list(leaf.dims)
            if dims and holds_rows:
                dims[0] = Size.of(BATCH if self.step.unsplit_because else OWN + BATCH)
            found.append((dims, spec.dtype))
        return found

    @property
    def pieces_wait(self) -> bool:
        """Whether pieces of a share are kept until all of them have come as far."""
        if self.step.unsplit_because:
            return False
        graph = self.local.graph
        rows = [BEFORE_DATA + place for place in self.step.inputs.places_of_rows]
        numbers = stage_numbers(graph, self._cuts)
        of_piece = descendants(graph, {graph.inputs[place].op.name for place in rows}, self._cuts)
        return any(
            op.type in HEAVY and numbers.get(op.name) and op.name in of_piece
            for op in graph.get_operations()
        )

    def facts_of_part(self) -> Facts:
        """What is known of a part's graph, where its examples are `OWN` many."""
        step, dims = self.step, [dims for dims, _ in self.leaves]
        sizes = {BATCH: step.inputs.size}
        if self.local is None:
            graph = step.traced.whole.graph
            dims += [None] * (len(graph.inputs) - len(dims))
            return find_facts(Program(graph), dims, sizes)
        graph = self.local.graph
        own = Size.of(OWN + BATCH)
        given: list[Any] = [0, [own, 0], Size.of(BATCH), 0]
        known = {place: np.array(value, object) for place, value in enumerate(given)}
        dims = [*(list(value.shape) for value in known.values()), *dims]
        # The first part has the most rows of variables.
        shapes = [copies[0].shape for copies in step.copies]
        dims += [None if shape.rank is None else shape.as_list() for shape in shapes]
        dims += [None] * (len(graph.inputs) - len(dims))
        return find_facts(Program(graph), dims, sizes, known)
