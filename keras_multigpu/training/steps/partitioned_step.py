"""`PartitionedStep`: a step traced for one device, and the part of it that each replica runs.

                    Keras's step, or the user's     a replica's part      new values,
    specs of  ───>  traced once for one       ───>  one graph that   ───> assigned
    a batch         device, unmodified              all replicas run      together

`partition` derives the part. What it needs from other replicas are sums between the stages of its
graph. Devices and replicas come later: `runners` run a step on them, `Trial` on a single device,
and `Plan` not at all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.partition.emission.exchange import LocalExchange
from keras_multigpu.partition.layouts import REPLICATED, Layout
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.partition.local_step import LocalStep, Outcome
from keras_multigpu.partition.planning.cost import StepCost
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.partition.program import Program
from keras_multigpu.training.exchange.stages import trace_stages
from keras_multigpu.training.exchange.sums import Cuts
from keras_multigpu.training.replica_group import Copies, ReplicaGroup, parts_or_copies
from keras_multigpu.training.shares import Batch, Rows
from keras_multigpu.training.steps.batches import (
    BATCH,
    BEFORE_DATA,
    PartArguments,
    PartInputs,
)
from keras_multigpu.training.steps.results import PartResults, ReplicaResult, joined_outputs
from keras_multigpu.training.steps.traced_step import TracedStep
from keras_multigpu.training.watching.recorded import Seen


class PartitionedStep:
    """A step in parts, which together compute what one device does.

    Args:
        traced: The step as one device runs it.
        cuts: Marks what its parts sum.
        pieces: How many of the parts are pieces of one replica's share.
        unsplit_because: Why there is a single part, if there should be more.

    Attributes:
        parts: How many parts there are.
        copies: What parts read and assign on each replica: copies of variables, or parts.
        inputs: What a part takes of a batch.
        variables: The layouts in which parts take and leave the variables: in rows if replicas
            divide them, and there are several.
        local_step: What splits it.
        local: A part, traced; None if there can be none.
        assigned: The numbers of the variables that it assigns.
        layouts: How the results of the parts make up those of the step.
    """

    local: Any = None
    assigned: list[int]
    layouts: list[Layout]

    def __init__(
        self,
        traced: TracedStep,
        cuts: Cuts,
        pieces: int = 1,
        unsplit_because: CannotSplit | None = None,
    ) -> None:
        self.traced, self.pieces = traced, pieces
        self.unsplit_because = unsplit_because
        self.parts = cuts.replicas
        self._cuts = cuts
        self.inputs = PartInputs(traced.spec, self.parts > 1, pieces > 1)
        # A single replica has all rows, of variables too.
        self.copies = traced.copies
        self.variables: list[Layout] = [REPLICATED] * len(self.copies)
        if self.parts > pieces:
            self.variables = traced.layouts
            self.copies = [c if len(c) > 1 else parts_or_copies(c[0]) for c in traced.copies]
        self.local_step = local_step(traced, self.inputs, cuts, self.variables)

    @property
    def spec(self) -> Batch:
        """The specs of the batch."""
        return self.traced.spec

    @property
    def program(self) -> Program:
        """The step as one device runs it."""
        return self.local_step.program

    @property
    def cost(self) -> StepCost:
        """What parts exchange, and what they share."""
        return self.local_step.cost

    def emit(self) -> None:
        """Make the graph of a part; raises `CannotSplit`."""
        outcomes: list[Outcome] = []

        def local(*args: Any) -> Any:
            given = PartArguments(*args)
            outcome = given.run(self.local_step)
            outcomes.append(outcome)
            self.assigned = sorted(outcome.assigned)
            new = [outcome.assigned[number] for number in self.assigned]
            # One tensor to wait for, and not a thousand for each of a thousand assignments.
            with tf.control_dependencies(new):
                barrier = tf.zeros(())
            return PartResults(outcome.outputs, new, barrier, self._seen())

        args = self._specs_of_arguments()
        first = BEFORE_DATA + len(args.lengths)
        of_piece: list[int] = []
        if self.pieces > 1:
            of_piece = [0, 1, 4, *(first + place for place in self.inputs.places_of_rows)]
        has_effects = self.local_step.has_effects
        self.local = trace_stages(
            local, args, self._cuts, self._cuts.compiled, of_piece, has_effects
        )
        placeholders = self.local.graph.inputs[first + len(args.data) :]
        self.names_of_values = [each.name for each in placeholders[: len(args.values)]]
        self.layouts = outcomes[-1].layouts

    @functools.cached_property
    def waiting(self) -> list[Copies]:
        """The copies of the variables that may hold open sums after it."""
        return [each for n, each in enumerate(self.copies) if n in self.local_step.waiting]

    @property
    def pieces_wait(self) -> bool:
        """Whether pieces are kept until all have come as far, so that they save little memory."""
        return self.pieces > 1 and self.cost.pieces_wait

    def arguments(
        self,
        replica: int,
        rows: Rows,
        before: tf.Tensor,
        data: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
        pieces: int | None = None,
        are_open: Any = False,
    ) -> list[PartArguments]:
        """The arguments of a replica's part, for each piece of its share.

        Args:
            rows: Its rows of the batch.
            before: How many examples the replicas before it have.
            data: The tensors of its rows.
            pieces: In how many pieces it takes them; those of the step by default.
            are_open: Whether variables of `waiting` hold open sums.
        """
        lengths, pieces = self.inputs.lengths(data), pieces or self.pieces
        found = []
        for piece in range(pieces):
            size, earlier, taken = rows.examples, before, data
            if pieces > 1:
                start, stop = share_bounds(size, piece, pieces)
                size, earlier = stop - start, before + start
                taken = self.inputs.cut(data, start, stop)
            number = replica * pieces + piece
            counts, total = tf.stack([size, earlier]), rows.global_batch_size
            place = tf.constant(number // self.pieces % self._cuts.places)
            # The pieces of a share have one term together.
            keeps = tf.convert_to_tensor(are_open if piece == 0 else False)
            own = tf.constant(number), counts, total, place, keeps, lengths, taken, values
            found.append(PartArguments(*own))
        return found

    def joined(self, group: ReplicaGroup, results: Sequence[ReplicaResult]) -> list[tf.Tensor]:
        """The results of the step, of those of the replicas; see `TracedStep.with_structure`."""
        return joined_outputs(group, results, self.layouts if self.parts > 1 else ())

    def _specs_of_arguments(self) -> PartArguments:
        number = tf.TensorSpec((), tf.int32)
        counts = tf.TensorSpec((2,), tf.int32)
        lengths = dict.fromkeys(self.inputs.lengths(self.inputs.specs), number)
        values = [
            tf.TensorSpec(shape_of_part(copies[0].shape, layout), copies[0].dtype)
            for copies, layout in zip(self.traced.copies, self.variables, strict=True)
        ]
        keeps, specs = tf.TensorSpec((), tf.bool), self.inputs.specs
        return PartArguments(number, counts, number, number, keeps, lengths, specs, values)

    def _seen(self) -> Seen | None:
        """What probes see of a part."""
        recorded = self.traced.watched.recorded
        if recorded is None:
            return None
        splitter, scope = self.local_step.splitter, self.local_step.scope
        assert splitter is not None and scope is not None
        changed = [number for number in self.traced.statistics if number in self.assigned]
        statistics = [scope.state[number] for number in changed]
        return recorded.of_replica(splitter, scope, statistics, BATCH)


def local_step(
    traced: TracedStep,
    inputs: PartInputs,
    exchange: LocalExchange,
    variables: Sequence[Layout] = (),
) -> LocalStep:
    """What splits a traced step for this exchange; `variables` as in `LocalStep`."""
    recorded = traced.watched.recorded
    return LocalStep(
        traced.whole,
        inputs.leaves,
        traced.handles,
        {BATCH: inputs.size},
        exchange,
        [] if recorded is None else recorded.tensors,
        variables,
        traced.request.accumulates and exchange.replicas > exchange.pieces,
    )


def shape_of_part(shape: tf.TensorShape, layout: Layout) -> tf.TensorShape | list[int | None]:
    """The shape that a variable's part has on every replica."""
    if not isinstance(layout, InRows):
        return shape
    return [None if axis == layout.axis else length for axis, length in enumerate(shape)]
