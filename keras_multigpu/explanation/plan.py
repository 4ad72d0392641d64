"""`Plan`: a step that is planned for any number of replicas, and neither emitted nor run."""

import functools

import tensorflow as tf

from keras_multigpu.explanation.part import OWN, Part, planned_whole
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.steps.batches import BATCH
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.passes import cuts_of
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.traced_step import TracedStep


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
    def part(self) -> Part:
        """What a replica runs."""
        step = self.step.local_step
        variables = dict(enumerate(self.step.variables))
        try:
            return Part(step.planned, step.exchange.places, step.layouts(), variables)
        except CannotSplit:
            whole = planned_whole(step.program, step.facts)
            return Part(whole, 1, whole.outs, variables)

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
