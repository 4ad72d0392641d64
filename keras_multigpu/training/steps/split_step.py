"""The step of one device, split over the replicas.

                    Keras's step, or the user's     a replica's part      new values,
    specs of  ───>  traced once for one       ───>  one graph that   ───> assigned
    a batch         device, unmodified              all replicas run      together

`partition` derives a replica's part of the step. What it needs from other replicas are sums between
the stages of its graph.
"""

import collections
import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.checks import runtime_error
from keras_multigpu.devices import forget_peaks
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.cost import HEAVY, StepCost
from keras_multigpu.partition.exchange import Exchange as PartExchange
from keras_multigpu.partition.local_step import LocalStep, Outcome
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.exchange.exchange import Exchange
from keras_multigpu.training.exchange.stage import RunStage, Stage
from keras_multigpu.training.exchange.stages import trace_stages
from keras_multigpu.training.exchange.sums import Cuts, Sums
from keras_multigpu.training.feed.cutter import has_own_memory
from keras_multigpu.training.replica_group import Replica, ReplicaGroup
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    batch_size_of,
    groups_of,
    join_shares,
    lengths_of,
    open_spec,
    present_leaves,
    shares_here,
    with_leaves,
)
from keras_multigpu.training.steps.batches import (
    BATCH,
    BEFORE_DATA,
    Batches,
    PartArguments,
    PartInputs,
)
from keras_multigpu.training.steps.divided_update import DividedUpdate
from keras_multigpu.training.steps.one_device import trace_for_one_device
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.results import (
    PartResults,
    ReplicaResult,
    after,
    at_once,
    joined_outputs,
)
from keras_multigpu.training.steps.same_on_workers import StepCheck
from keras_multigpu.training.steps.self_check import difference
from keras_multigpu.training.steps.stopwatch import Stopwatch
from keras_multigpu.training.steps.taps import Tapped, joined_pieces
from keras_multigpu.training.steps.traced_step import TracedStep
from keras_multigpu.training.steps.trial import Trial
from keras_multigpu.training.steps.watched import Watched, rows_if_alone, tapped_if_alone
from keras_multigpu.training.variables.owners import Slots, owners_of

# Gathers that take more than this part of a step are worth a warning.
COSTLY = 0.1
# How many numbers a variable has whose new value should not wait beside the old one.
LARGE = 2**16
# Keras's default.
USUAL_BATCH_SIZE = 32


class SplitStep:
    """A step of a model, traced for one device and split over replicas; probes may look into it.

    Args:
        request: The step.
        replicas: How many replicas to split it for; the group's by default.
        pieces: In how many pieces each takes its share; those of the request by default.

    Attributes:
        name: Its name.
        alone: Why one replica takes the whole batch, if it does.
        is_checked: Whether it has been compared with the unsplit step.
        can_skip: Whether it changes nothing when a worker wants to stop.
        traced: The step as one device runs it.
        local: A part of the step, traced.
        assigned: The numbers of the variables that the step assigns.
        layouts: How the parts' results make up those of the step.
    """

    _run_stage: RunStage | None = None
    _at_once = False

    def __init__(
        self, request: StepRequest, replicas: int | None = None, pieces: int | None = None
    ) -> None:
        self.request, self.model, self.group = request, request.model, request.group
        self.name = getattr(request.function, "__name__", "the step")
        self.is_checked = not request.self_check
        self._devices = [replica.device for replica in self.group.replicas]
        self._weight_owners = owners_of(self.model, self._devices) if request.shards else {}
        self._watched = Watched(self.model, self.group, request.probes)
        self.local_step: LocalStep
        self._split_into = replicas or self.group.count, pieces or request.pieces
        # An open batch size cannot be mistaken for another number of the graph.
        spec = open_spec(request.spec) if self._watched.measures else request.spec
        try:
            self._make(spec)
        except Exception:
            if spec == request.spec:
                raise
            # User code may need to know the batch size.
            self._make(request.spec)
        if self._unsplit is not None:
            self._watched.unsplit(str(self.alone))
        if request.trains:
            self._warn_of_gathers()

    def _make(self, spec: Batch) -> None:
        self.spec = spec
        self._count, self.pieces = self._split_into
        self.alone: CannotSplit | None = None
        self.can_skip = self.request.may_stop
        self._unsplit: Any = None
        self.traced = self._trace()
        groups = self.request.groups or groups_of(lengths_of(spec))
        # Leaves that are not cut may differ in length.
        self.batches = Batches(spec, groups if self.parts > 1 else ())
        try:
            self._split()
        except CannotSplit as reason:
            self._stay_alone(reason, warns=self.parts > 1)
            try:
                self._split()
            except CannotSplit:
                # It changes variables in an unknown way, so their values cannot be passed in and
                # out. They may have been placed since it was traced, so it is traced again.
                whole = trace_for_one_device(self.model, self.request.function, spec)
                self.can_skip = False
                self._unsplit = tf.function(
                    whole, autograph=False, jit_compile=bool(self.model.jit_compile)
                )

    @property
    def parts(self) -> int:
        return self._count * self.pieces

    @property
    def cost(self) -> StepCost:
        """What replicas exchange in this step, and what they share."""
        assert self.local_step.splitter is not None
        return self.local_step.splitter.cost

    def _trace(self) -> TracedStep:
        with self._watched.recording():
            return TracedStep(self.request, self.spec, self._weight_owners)

    # Splitting.

    def _split(self) -> None:
        """Make the graph that each replica runs."""
        on_cpu = not all(has_own_memory(device) for device in self._devices)
        exchange = self._exchange = Cuts(self.parts, on_cpu, bool(self.model.jit_compile))
        self.inputs = PartInputs(self.batches, self.parts > 1, self.pieces > 1)
        self.local_step = self.local_step_of(exchange, self.inputs)
        self._division = DividedUpdate(self._divide_optimizer(exchange))
        self.local_step.owners = self._division.owners
        outcomes: list[Outcome] = []

        def local(*args: Any) -> Any:
            given = PartArguments(*args)
            outcome = given.run(self.local_step)
            outcomes.append(outcome)
            self.assigned = sorted(outcome.assigned)
            new = [outcome.assigned[number] for number in self.assigned]
            barriers = self._division.barriers(outcome.assigned)
            return PartResults(outcome.outputs, new, barriers, self._tapped(given.share))

        def owned(results: PartResults) -> dict[str, int]:
            return self._division.owned(self.assigned, results.new, results.barriers)

        args = self.specs_of_arguments(self.inputs)
        first = BEFORE_DATA + len(args.lengths)
        of_piece: list[int] = []
        if self.pieces > 1:
            of_piece = [0, 1, *(first + place for place in self.inputs.places_of_rows)]
        self.local = self._trace_part(local, args, of_piece, owned)
        placeholders = self.local.graph.inputs[first + len(args.data) :]
        self._names_of_values = [each.name for each in placeholders[: len(args.values)]]
        self.layouts = outcomes[-1].layouts
        if self.pieces > 1 and self.local.types_after_sums() & HEAVY:
            self.request.warn(self._text_on_waiting_pieces())

    def local_step_of(self, exchange: Any, inputs: PartInputs) -> LocalStep:
        """The object that splits the step, with this exchange."""
        taps = self._watched.taps
        return LocalStep(
            self.traced.whole,
            inputs.leaves,
            self.traced.handles,
            self.batches.sizes,
            exchange,
            [] if taps is None else taps.record.tensors,
        )

    def specs_of_arguments(self, inputs: PartInputs) -> PartArguments:
        number = tf.TensorSpec((), tf.int32)
        batches = len(self.batches.names)
        counts, totals = (tf.TensorSpec(shape, tf.int32) for shape in [(batches, 2), (batches,)])
        lengths = dict.fromkeys(inputs.lengths(inputs.specs), number)
        values = [tf.TensorSpec(copies[0].shape, copies[0].dtype) for copies in self.traced.copies]
        return PartArguments(number, counts, totals, number, lengths, inputs.specs, values)

    def _trace_part(self, local: Callable[..., Any], args: PartArguments, *others: Any) -> Any:
        """Trace what each replica runs."""
        return trace_stages(local, args, self._exchange, bool(self.model.jit_compile), *others)

    def _divide_optimizer(self, exchange: PartExchange) -> dict[int, int]:
        """Move the optimizer's state to its owners.

        Returns:
            The place of the replica that alone computes a new value, by the variable's number.
        """
        if not self._weight_owners:
            return {}
        owners: dict[int, int] = {}
        if exchange.replicas == 1:
            moved = self.request.placement.release()
        else:
            slots = self._slots()
            owners = slots.find(self.local_step.facts, self.local_step.numbers_of_inputs)
            moved = slots.settle(owners, self.request.warn)
        if not moved:
            return owners
        # The traced step has captured the former copies.
        self.traced = self._trace()
        self.local_step = self.local_step_of(exchange, self.inputs)
        # Graphs are circles, and the former one holds the memory of the former copies.
        gc.collect()
        return self._divide_optimizer(exchange)

    def _slots(self) -> Slots:
        placement = self.request.placement
        return Slots(self.model, self._weight_owners, self._devices, self.traced.copies, placement)

    def _tapped(self, share: tf.Tensor) -> Tapped | None:
        """What probes see of a part, given the number of the replica's examples."""
        if self._watched.taps is None:
            return None
        splitter, scope = self.local_step.splitter, self.local_step.scope
        assert splitter is not None and scope is not None
        changed = [
            self.traced.number_of(variable)
            for variable in self.model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        ]
        statistics = [scope.state[n] for n in changed if n in self.assigned]
        return self._watched.taps.of_replica(splitter, scope, statistics, share, BATCH)

    # Steps that are not split, or cost too much.

    def _stay_alone(self, reason: CannotSplit, warns: bool = True) -> None:
        """Let one replica take the whole batch from now on."""
        if warns:
            self.request.warn_of_one_replica(self.name, str(reason))
        self.alone = reason
        self._count = self.pieces = 1

    def _text_on_waiting_pieces(self) -> str:
        """The warning if pieces of a share wait for sums in the middle of a step."""
        return (
            f"`micro_batches={self.pieces}` saves little memory with this model: each piece waits "
            "for sums over all of them, as BatchNormalization needs, and is kept until then. The "
            "results are the same."
        )

    def _warn_of_gathers(self) -> None:
        """Warn of the gather that makes the step slow, once for each source line."""
        if self.alone or self._count == 1:
            return
        run = vars(self.model).get("training_run")
        size = batch_size_of(self.spec) or (run and run.global_batch_size) or USUAL_BATCH_SIZE
        # As if all batches had this size.
        numbers = collections.defaultdict(lambda: 1, dict.fromkeys(self.batches.names, size))
        part = self.cost.part_of_gathers(numbers, self._count)
        found = [each for each in self.cost.moved if each.kind == "gathered" and each.op]
        if part <= COSTLY or not found:
            return
        most = max(found, key=lambda each: self.cost.bytes("gathered", numbers, [each]))
        assert most.op is not None
        place = place_of(most.op)
        self.request.warn(
            f"{place} needs the rows of all replicas ({most.op.type}): gathering them, and what "
            f"every replica then computes in full, takes about {round(100 * part)} % of a step. "
            "The results are those of one device. `kmg.explain(model)` lists what each part costs.",
            key=place,
        )

    def check(self, shares: Sequence[Rows]) -> None:
        """Compare with the unsplit step on rows of the first batch; stay alone if they differ."""
        if self.is_checked or self.group.pretends:
            return
        self.is_checked = True
        own = [rows for rows in shares if rows.is_here]
        found = None
        # Effects, and draws from a state of their own, cannot be undone.
        if not (self.alone or self.parts == 1 or self.cost.once):
            if len(own) == len(shares) or self.batches.takes_any_size:
                found = difference(Trial(self), join_shares(own, self.spec))
                # What the trial needed on GPUs is not what the step needs.
                forget_peaks()
        # These may be copies of before the model was placed.
        self.traced.variables = []
        if not self.group.any_worker(found is not None):
            return
        what = found or "as another worker found"
        if self.request.on_inexact == "error":
            raise runtime_error(
                f"Split over {self.parts} parts, `{self.name}` does not give the numbers of one "
                f"device: {what}.",
                "Expected the same numbers, but for rounding.",
                "Leave out `on_inexact`: one replica then computes the whole step. And please "
                "report it: this is a bug in keras_multigpu.",
                on_inexact="error",
            )
        reason = f"split, it would not give the numbers of one device ({what})"
        self._stay_alone(CannotSplit(reason))
        self._split()

    # Running.

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on a batch; its results, as one device gives them."""
        watched = self._watched
        watched.before_step()
        if self._unsplit is not None:
            return self._run_unsplit(shares)
        results = self._results(shares)
        self._at_once = self.request.at_once and not watched.may_forbid
        # Even a counter of steps waits for the batch, which may be refused.
        with at_once(shares) if self._at_once else after(results):
            seen = watched.gathered([result.measured for result in results])
            # Inside a change there are no exchanges.
            with self._change(results[0].goes_on):
                allowed = watched.verdict(seen)
                if allowed is None:
                    self._assign(results)
                else:
                    tf.cond(allowed, lambda: self._assign(results), lambda: False)
            outputs = self.with_structure(self._outputs(results))
            return outputs if allowed is None else watched.logs_after(outputs, allowed)

    def _change(self, happens: tf.Tensor | None = None) -> contextlib.AbstractContextManager[None]:
        """The context in which variables change; the group counts the changes of training."""
        return self.group.change(happens) if self.request.trains else contextlib.nullcontext()

    def _results(self, shares: Sequence[Rows]) -> list[ReplicaResult]:
        """What each replica of this process has; nothing is assigned yet."""
        if self.can_skip:
            # A skipped step would still have its effects.
            self.can_skip = not (self.alone or self.cost.once)
        check = StepCheck(self.group, shares, self.can_skip)
        results = self._run_alone(shares) if self.alone else self._run(shares, check)
        sums = results[0].sums
        self.can_skip &= sums is not None
        goes_on = check.exchanged() if sums is None else check.result(sums)
        return [result._replace(goes_on=goes_on) for result in results]

    def _run(self, shares: Sequence[Rows], check: StepCheck) -> list[ReplicaResult]:
        counts = [self.batches.counts(rows) for rows in shares]
        # A leaf of one row goes to all replicas, even if it was cut as that of the only example.
        places = self.batches.whole_leaves if len(shares) > 1 else []
        whole = present_leaves(whole_batch(self.group, shares, self.spec)) if places else []

        def begin(replica: Replica) -> tuple[list[PartArguments], ReplicaResult]:
            values = self.group.read(self.traced.copies, replica)
            rows, watch = self._watched.begin(shares[replica.id])
            own, totals = counts[replica.id]
            before = tf.add_n([tf.zeros_like(own), *(each for each, _ in counts[: replica.id])])
            leaves = present_leaves(rows.data)
            for place in places:
                leaves[place] = whole[place]
            data = tf.nest.flatten(leaves, expand_composites=True)
            pieces = self.arguments(replica.id, own, before, totals, data, values)
            return pieces, ReplicaResult([], values, rows, watch)

        pieces, results = zip(*self.group.run(begin), strict=True)
        sums = Sums(
            self.group.exchange,
            [check.numbers] * len(results) if check.numbers.shape[0] else None,
            [result.watch for result in results] if self._watched.timed else None,
        )
        found = self.local(pieces, sums, self._run_stage or Stage.run, bool(self._division.owners))
        of_check = sums.of_riders or [None for _ in found]
        results = [
            result._replace(pieces=of_pieces, sums=own, summed=packs)
            for result, of_pieces, own, packs in zip(
                results, found, of_check, sums.packs, strict=True
            )
        ]
        if self._division.owners:
            results = [
                self._with_values_of_others(replica, results) for replica in self.group.replicas
            ]
        if self._watched.taps is None:
            return results
        return self.group.run(lambda replica: self._measure(replica, results[replica.place]))

    def arguments(
        self,
        replica: int,
        own: tf.Tensor,
        before: tf.Tensor,
        totals: tf.Tensor,
        data: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
    ) -> list[PartArguments]:
        """The arguments of a replica's part, for each piece of its share.

        Args:
            own: How many examples of each batch the replica has.
            before: How many the replicas before it have.
            totals: How many there are.
            data: Its rows.
        """
        lengths = self.inputs.lengths(data)
        found = []
        for piece in range(self.pieces):
            size, earlier, taken = own, before, data
            if self.pieces > 1:
                start, stop = share_bounds(own, piece, self.pieces)
                size, earlier, taken = (
                    stop - start,
                    before + start,
                    self.inputs.cut(data, start, stop),
                )
            number = tf.constant(replica * self.pieces + piece)
            counts = tf.stack([size, earlier], axis=1)
            found.append(PartArguments(number, counts, totals, own[0], lengths, taken, values))
        return found

    def _with_values_of_others(
        self, replica: Replica, results: Sequence[ReplicaResult]
    ) -> ReplicaResult:
        """What a replica has, with the new values that others have computed for it."""
        own, *others = results[replica.place].pieces
        everyones = [result.pieces[0].new for result in results]
        new, barrier = self._division.completed(
            replica, self.assigned, everyones, self.traced.copies
        )
        own = own._replace(new=new, barriers=[*own.barriers, barrier])
        return results[replica.place]._replace(pieces=[own, *others])

    def _run_alone(self, shares: Sequence[Rows]) -> list[ReplicaResult]:
        """The results of a step that one replica computes, for each replica of this process."""
        _, totals = self.batches.counts(shares[0])
        batch, zeros = whole_batch(self.group, shares, self.spec), tf.zeros_like(totals)
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        with graph_internals.single_device(), tf.device(self.group.hub):
            values = self.group.read(self.traced.copies, self.group.replicas[0])
            args = self.arguments(0, totals, zeros, totals, data, values)
            ((piece,),) = self.local([args], Sums(Exchange([self.group.hub])))
        if self._watched.taps is None:
            return [ReplicaResult([piece])] * len(self.group.replicas)
        found = []
        for replica in self.group.replicas:
            values = self.group.read(self.traced.copies, replica)
            watch = Stopwatch(tf.timestamp()) if self._watched.timed else None
            rows = rows_if_alone(replica, batch, shares[0].global_batch_size, self.spec)
            own = piece._replace(tapped=tapped_if_alone(replica, piece.tapped))
            found.append(self._measure(replica, ReplicaResult([own], values, rows, watch)))
        return found

    def _measure(self, replica: Replica, result: ReplicaResult) -> ReplicaResult:
        """What a replica has, with what the probes measure there."""
        taps = self._watched.taps
        assert taps is not None
        tapped = joined_pieces([piece.tapped for piece in result.pieces], taps.axes)
        before = dict(enumerate(result.values))
        after = before | dict(zip(self.assigned, result.pieces[0].new, strict=True))

        def value_before(variable: keras.Variable) -> tf.Tensor | None:
            number = self.traced.number_of(variable)
            return None if number is None else before[number]

        def new_values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
            numbers = [self.traced.number_of(variable) for variable in variables]
            unused = [v for v, number in zip(variables, numbers, strict=True) if number is None]
            rest = iter(self.group.read(self.group.copies(unused), replica))
            return [next(rest) if number is None else after[number] for number in numbers]

        scale = self._watched.scale(value_before)
        times = result.watch.times(tf.nest.flatten(tapped.own)) if result.watch else None
        measured = self._watched.measured(replica, result.rows, tapped, new_values, scale, times)
        return result._replace(measured=measured)

    def _run_unsplit(self, shares: Sequence[Rows]) -> Any:
        """Run the unsplit step on one replica, and copy its variables to the others."""
        batch = whole_batch(self.group, shares, self.spec)
        with self._change():
            with graph_internals.single_device(), tf.device(self.group.hub):
                results = self._unsplit(*batch)
            self.equalize()
        return results

    def equalize(self) -> None:
        """Give all replicas the values of the first one, after a step that has failed halfway."""
        for first, *others in self.traced.copies:
            for other in others:
                other.assign(first)

    def _assign(self, results: Sequence[ReplicaResult]) -> bool:
        """Assign the new values; nothing if a worker wants to stop."""
        if not self.can_skip:
            return self._assign_all(results)
        goes_on = results[0].goes_on
        self.group.stop_flags[1].assign(goes_on, read_value=False)
        tf.cond(goes_on, lambda: self._assign_all(results), lambda: False)
        return True

    def _assign_all(self, results: Sequence[ReplicaResult]) -> bool:
        places = range(len(self.assigned))
        copies = [self.traced.copies[number] for number in self.assigned]
        large = [n for n in places if (copies[n][0].shape.num_elements() or 0) >= LARGE]
        sums = [result.summed for result in results]
        # Most errors come before the sums, and then leave nothing behind. Large weights whose
        # gradients were summed earlier do not wait for the rest: memory is scarcest in the update.
        for those in (large, [n for n in places if n not in large]):
            with at_once(sums if self._at_once and those is not large else ()):
                for replica, result in zip(self.group.replicas, results, strict=True):
                    new = [result.pieces[0].new[n] for n in those]
                    self.group.assign([copies[n] for n in those], new, replica)
        return True

    def _outputs(self, results: Sequence[ReplicaResult]) -> list[tf.Tensor]:
        return joined_outputs(self.group, results, self.layouts if self.parts > 1 else ())

    def with_structure(self, outputs: Sequence[Any]) -> Any:
        """Outputs in the structure that the step returns."""
        flat = iter(outputs)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            self.traced.whole.structured_outputs,
            expand_composites=True,
        )


def whole_batch(group: ReplicaGroup, shares: Sequence[Rows], spec: Batch) -> Batch:
    """The global batch; processes that have read only their own rows exchange them."""
    if not shares_here(shares):
        return join_shares(shares, spec)
    own = [shares[replica.id] for replica in group.replicas]
    if group.count == 1:
        # Its leaves may have different numbers of rows.
        return own[0].data
    parts = [present_leaves(rows.data) for rows in own]
    batch: Batch = with_leaves(spec, group.gather_on_hub(parts))
    return batch
