"""The step of one device, split over the replicas.

                    Keras's step, or the user's     a replica's part      new values,
    specs of  ───>  traced once for one       ───>  one graph that   ───> assigned
    a batch         device, unmodified              all replicas run      together

What a replica needs of the others are sums between the stages of its graph; see `partition`.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.checks import runtime_error
from keras_multigpu.keras_internals import graph_internals, variable_internals
from keras_multigpu.partition.conversions import Exchange
from keras_multigpu.partition.cost import HEAVY, StepCost
from keras_multigpu.partition.layouts import Block
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.partition.local_step import Leaf, LocalStep, Outcome
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.exchange.gradients import gradients_among
from keras_multigpu.training.exchange.stages import riding, totals, traced
from keras_multigpu.training.feed.cutter import has_own_memory
from keras_multigpu.training.replica_group import (
    Copies,
    Replica,
    ReplicaGroup,
    copies_in,
    copies_of,
    is_shared,
)
from keras_multigpu.training.shares import (
    Batch,
    Groups,
    Rows,
    batch_size_of,
    cut,
    filled,
    gathered,
    groups_of,
    is_cut,
    is_one_row,
    length_of,
    lengths_of,
    present,
    those_here,
)
from keras_multigpu.training.steps.one_device import known_variables, traced_for_one_device
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.same_on_workers import Asked, require_same_graph
from keras_multigpu.training.steps.self_check import difference
from keras_multigpu.training.steps.trial import Trial, following
from keras_multigpu.training.variables.owners import Slots, owners_of
from keras_multigpu.training.variables.placement import optimizers_of

logger = logging.getLogger("keras_multigpu")

BATCH = "batch"


class Sums:
    """Exchanges between replicas, at which their graph is cut into stages."""

    has_equal_shares = False

    def __init__(self, replicas: int, on_cpu: bool, compiled: bool) -> None:
        self.replicas, self.on_cpu, self.compiled = replicas, on_cpu, compiled

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor if self.replicas == 1 else totals([tensor])[0]


class SplitStep:
    """A step of a model, traced for one device and split over replicas."""

    _workers = 1
    """Among how many workers a replica divides its share."""

    def __init__(self, request: StepRequest) -> None:
        self._request, self._model, self._group = request, request.model, request.group
        self.spec = spec = request.spec
        self._name = getattr(request.function, "__name__", "the step")
        self.is_checked = not request.self_check
        """Whether it has shown that it gives the numbers of one device."""
        self._pieces = request.pieces * self._workers
        self._count = self._replicas()
        self._devices = [replica.device for replica in self._group.replicas]
        self._of_weights = owners_of(self._model, self._devices) if request.shards else {}
        self._owners: dict[int, int] = {}
        """The places of the replicas that alone compute new values, by number of the variable."""
        self._step: LocalStep
        self._trace()
        self._leaves = present(spec)
        groups = request.groups or groups_of(lengths_of(spec))
        # What is not cut need not have equally many rows.
        groups = groups if self._count * self._pieces > 1 else ()
        self._batch_of = batches_of_leaves(self._leaves, groups)
        self._batches = list(dict.fromkeys([BATCH, *(each for each in self._batch_of if each)]))
        self.alone: CannotSplit | None = None
        """Why one replica takes the whole batch, if it does."""
        self._unsplit: Any = None
        self.may_drop = request.may_stop
        """Whether it changes nothing where a worker wants to stop."""
        try:
            self._split(self._count)
        except CannotSplit as reason:
            if self._count * self._pieces > 1:
                self._stay_alone(reason)
            self.alone, self._pieces = reason, 1
            try:
                self._split(1)
            except CannotSplit:
                # It changes variables in a way that is not known, so their values cannot be handed
                # in and out. Since it was traced they may have been placed.
                self._whole = traced_for_one_device(self._model, request.function, spec)
                self.may_drop = False
                self._unsplit = tf.function(
                    self._whole, autograph=False, jit_compile=bool(self._model.jit_compile)
                )

    def _trace(self) -> None:
        """Trace the step as one device runs it."""
        of_weights = self._of_weights
        with self._recording():
            self._whole = traced_for_one_device(
                self._model, self._request.function, self.spec, of_weights
            )
        require_same_graph(self._group, self._whole.graph)
        self._find_captured()

    def _find_captured(self) -> None:
        """Find the variables that the step uses, and where their values are."""
        others = {id(variable.handle): variable for variable in self._whole.graph.variables}
        known = known_variables(self._model)
        storages = variable_internals.storages_of(known)
        handles = [copies_in(storage)[0].handle for storage in storages]
        # A custom step builds its optimizers while it is traced, if at all.
        self._request.placement.place_optimizers(self._model)
        storages = variable_internals.storages_of(known)
        tracked = {id(h): copies_in(s) for h, s in zip(handles, storages, strict=True)}
        # A function of the user's that was traced before knows the copies of then.
        former = self._request.placement.former
        tracked |= {id(handle): copies_of(variable) for handle, variable in former}
        captured = self._whole.captured_inputs
        self._handles = [h for h in captured if id(h) in tracked or id(h) in others]
        self._captured = [
            others[id(h)] if id(h) in others else tracked[id(h)][0] for h in self._handles
        ]
        """The variables that the unsplit step has, until it has been tried."""
        untracked = [others[id(h)] for h in self._handles if id(h) not in tracked]
        self._request.placement.take(untracked)
        self._copies: list[Copies] = [
            tracked[id(h)] if id(h) in tracked else (others[id(h)],) for h in self._handles
        ]

    def _stay_alone(self, reason: CannotSplit) -> None:
        """Let one replica take the whole batch from now on."""
        self.alone = reason
        self._say_alone(reason)

    def _local_step(self, exchange: Exchange) -> LocalStep:
        """A replica's part of the step, with this exchange."""
        sizes = self._sizes()
        leaves: list[Leaf] = []
        self._specs = []
        for leaf, of_batch in zip(self._leaves, self._batch_of, strict=True):
            name = None if exchange.replicas == 1 or is_composite(leaf) else of_batch
            first = len(leaves)
            for tensor in tf.nest.flatten(leaf, expand_composites=True):
                leaves.append(described(tensor, len(leaves), name, sizes))
                # A replica has fewer rows than the batch.
                self._specs.append(tensor if name is None else opened(tensor))
            if of_batch is not None:
                leaves[first:] = counting_rows(leaf, leaves[first:], sizes[of_batch])
        self._described = leaves
        taps = self._tensors_to_see()
        return LocalStep(self._whole, leaves, self._handles, sizes, exchange, taps)

    def _sizes(self) -> dict[str, AnySize]:
        """How many examples each batch has: a number if the step is made for that alone."""
        sizes: dict[str, AnySize] = {name: Size.of(name) for name in self._batches}
        for leaf, name in zip(self._leaves, self._batch_of, strict=True):
            if name is not None and not is_composite(leaf) and leaf.shape[0] is not None:
                sizes[name] = leaf.shape[0]
        return sizes

    def _share_out(self, sums: Exchange) -> None:
        """Find out what one replica does for all, and put what it needs there."""
        self._owners = {}
        if sums.replicas == 1 or not self._of_weights:
            return
        placement = self._request.placement
        slots = Slots(self._model, self._of_weights, self._devices, self._copies, placement)
        self._owners = slots.find(self._step.facts, self._step.numbers_of_inputs)
        if slots.settle(self._owners, self._request.warn):
            # The traced step would keep the copies of before.
            self._trace()
            self._step = self._local_step(sums)
            self._share_out(sums)
        self._step.owners = self._owners

    def _split(self, replicas: int) -> None:
        """Make the graph that each replica runs."""
        on_cpu = not all(has_own_memory(device) for device in self._devices)
        sums = Sums(replicas * self._pieces, on_cpu, bool(self._model.jit_compile))
        self._step = self._local_step(sums)
        self._share_out(sums)
        leaves = self._described
        outcomes: list[Outcome] = []
        own: list[tf.Tensor] = []

        def local(
            number: Any, counts: Any, totals: Any, share: Any, lengths: Any, data: Any, values: Any
        ) -> Any:
            outcome = self._step(number, of_each_batch(counts, totals), data, values, lengths)
            outcomes.append(outcome)
            own[:] = [number, counts, *data]
            self._assigned = sorted(outcome.assigned)
            made = [outcome.assigned[number] for number in self._assigned]
            # One tensor to wait for, and not a thousand for each of a thousand assignments; one
            # more for what each replica alone has made.
            done = []
            for place in self._places:
                with tf.control_dependencies(
                    [outcome.assigned[n] for n in self._assigned if self._owners.get(n) == place]
                ):
                    done.append(tf.zeros(()))
            return outcome.outputs, made, done, self._seen(share)

        args = self._specs_of_arguments()
        *_, lengths, specs, values = args
        places: list[int] = []
        if self._pieces > 1:
            rows = [n for n, leaf in enumerate(leaves) if isinstance(leaf.layout, InRows)]
            places = [0, 1, *(4 + len(lengths) + place for place in rows)]

        def rounded(cuts: Collection[str]) -> Collection[str]:
            return self._gradients(cuts, outcomes[-1], own) if self._group.sent_as else ()

        self._local = self._traced(local, args, places, rounded, self._owned)
        placeholders = self._local.graph.inputs[4 + len(lengths) + len(specs) :]
        self._names_of_values = [each.name for each in placeholders[: len(values)]]
        self._layouts = outcomes[-1].layouts
        if self._pieces > 1 and self._local.types_of_later_pieces() & HEAVY:
            logger.warning(self._said_of_waiting_pieces())

    def _specs_of_arguments(self) -> tuple[Any, ...]:
        """The specs of what a replica's part is given."""
        number = tf.TensorSpec((), tf.int32)
        values = [tf.TensorSpec(copies[0].shape, copies[0].dtype) for copies in self._copies]
        lengths = dict.fromkeys(self._lengths(self._specs), number)
        batches = len(self._batches)
        counts = [tf.TensorSpec(shape, tf.int32) for shape in [(batches, 2), (batches,)]]
        return number, *counts, number, lengths, self._specs, values

    def _said_of_waiting_pieces(self) -> str:
        """What it means that pieces of a replica's share wait for sums in the middle of a step."""
        return (
            f"`micro_batches={self._pieces}` saves little memory with this model: each piece waits "
            "for sums over all of them, as BatchNormalization needs, and is kept until then. The "
            "results are the same."
        )

    def _gradients(
        self, cuts: Collection[str], outcome: Outcome, own: Sequence[tf.Tensor]
    ) -> set[str]:
        """The names of the sums in a replica's part that are gradients."""
        optimizers = [v for each in optimizers_of(self._model) for v in each.variables]
        weights = {id(copies_of(v)[0]) for v in (*self._model.trainable_variables, *optimizers)}
        new: dict[bool, list[tf.Tensor]] = {True: [], False: []}
        for number, tensor in outcome.assigned.items():
            new[id(self._copies[number][0]) in weights].append(tensor)
        results = [*new[False], *outcome.outputs]
        splitter = self._step.splitter
        assert splitter is not None
        return gradients_among(splitter.conversions.sums_of_parts, cuts, new[True], results, own)

    def _replicas(self) -> int:
        return self._group.count

    @property
    def _places(self) -> list[int | None]:
        """Those of the replicas that do something alone, and None for what all do."""
        return [None, *sorted(set(self._owners.values()))]

    def _owned(self, results: Any) -> dict[str, int]:
        """The names of results that one replica computes alone, with its place."""
        _, made, done, _ = results
        of_made = [self._owners.get(number) for number in self._assigned]
        pairs = [*zip(made, of_made, strict=True), *zip(done, self._places, strict=True)]
        return {tensor.name: place for tensor, place in pairs if place is not None}

    def _traced(self, local: Callable[..., Any], args: Sequence[Any], *others: Any) -> Any:
        """What runs a replica's part."""
        return traced(local, args, bool(self._model.jit_compile), *others)

    def _say_alone(self, reason: CannotSplit) -> None:
        self._request.warn_of_one_replica(self._name, str(reason))

    @property
    def cost(self) -> StepCost:
        """What replicas exchange in this step, and what they share."""
        assert self._step.splitter is not None
        return self._step.splitter.cost

    # What training does besides.

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the step is traced for one device."""
        return contextlib.nullcontext()

    def _tensors_to_see(self) -> list[tf.Tensor]:
        """The tensors of the step that `_seen` needs."""
        return []

    def _seen(self, share: tf.Tensor) -> Any:
        """What else a replica's part yields, given the number of its examples."""
        return None

    def _begun(self, rows: Rows, replica: Replica) -> Rows:
        """The rows of a replica, which begins now."""
        return rows

    def _on_replica(self, pieces: list[Any], replica: Replica) -> "OfReplica":
        """What a replica has, given its arguments for each piece of its share."""
        if self._owners:
            return OfReplica(self._local.in_pieces(pieces, place=replica.place))
        if self._pieces == 1:
            return OfReplica([self._local(*pieces[0])])
        return OfReplica(self._run_in_pieces(pieces))

    def _run_in_pieces(self, pieces: list[Any]) -> list[Any]:
        """What the graph yields for each piece of a share."""
        found: list[Any] = self._local.in_pieces(pieces)
        return found

    # Tried on one device, see `self_check`.

    @property
    def parts(self) -> int:
        """In how many parts the batch is taken."""
        return self._count * self._pieces

    @property
    def takes_any_number(self) -> bool:
        """Whether the step is made for batches of every size."""
        return len(self._batches) == 1 and not isinstance(self._sizes()[BATCH], int)

    def _trial(self) -> Trial:
        """What it takes to try the step."""
        return Trial(
            whole=self._whole,
            local=self._local,
            layouts=self._layouts,
            assigned=self._assigned,
            copies=self._copies,
            # They are the first copies, unless these are on another device.
            variables=self._captured,
            follow=following(optimizers_of(self._model)),
            parts=self.parts,
            takes_any_number=self.takes_any_number,
            rounds_sums=bool(self._group.sent_as),
            hub=self._group.hub,
            facts=self._step.facts,
            given=self._given,
            traced_again=self._traced_again,
        )

    def _given(self, batch: Batch, parts: int) -> tuple[list[tf.Tensor], list[tuple[Any, ...]]]:
        """The values of variables, and the arguments for each part of a batch."""
        values = [copies[0].read_value() for copies in self._copies]
        data = tf.nest.flatten(present(batch), expand_composites=True)
        sizes: dict[str | None, Any] = dict.fromkeys(self._batches, batch_size_of(batch))
        for leaf, name in zip(present(batch), self._batch_of, strict=True):
            if name is not None:
                sizes[name] = length_of(leaf)
        totals = tf.constant([int(sizes[name]) for name in self._batches])
        lengths, given = self._lengths(data), []
        for number in range(parts):
            start, stop = share_bounds(totals, number, parts)
            own, counts = self._rows_of(data, start, stop), tf.stack([stop - start, start], axis=1)
            share = counts[0, 0]
            given.append((tf.constant(number), counts, totals, share, lengths, own, values))
        return values, given

    def _traced_again(
        self, batch: Batch, parts: int, chosen: Callable[[LocalStep], list[tf.Tensor]]
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """A function that returns tensors chosen from a part, and the arguments for each part.

        The step cannot run any more then.
        """
        # Pieces are given other arguments than parts.
        pieces, self._pieces = self._pieces, 1
        step = self._local_step(Sums(parts, True, False))

        def local(number: Any, counts: Any, totals: Any, share: Any, *rest: Any) -> list[tf.Tensor]:
            lengths, data, values = rest
            step(number, of_each_batch(counts, totals), data, values, lengths)
            return chosen(step)

        function = traced(local, self._specs_of_arguments(), False)
        _, given = self._given(batch, parts)
        self._pieces = pieces
        return function, given

    def check(self, shares: Sequence[Rows]) -> None:
        """Try the step on some rows of its first batch; one replica takes it all if that fails."""
        if self.is_checked or self._group.pretends:
            return
        self.is_checked = True
        own = [rows for rows in shares if rows.is_here]
        found = None
        # What has effects, or draws from a state of its own, would leave traces.
        if not (self.alone or self.parts == 1 or self.cost.once):
            if len(own) == len(shares) or self.takes_any_number:
                found = difference(self._trial(), gathered(own, self.spec))
        self._captured = []
        if not self._group.agree(found is not None):
            return
        what = found or "as another worker found"
        if self._request.on_inexact == "error":
            raise runtime_error(
                f"Split over {self.parts} parts, `{self._name}` does not give the numbers of one "
                f"device: {what}.",
                "Expected the same numbers, but for rounding.",
                "Leave out `on_inexact`: one replica then computes the whole step. And please "
                "report it: this is a bug in keras_multigpu.",
                on_inexact="error",
            )
        reason = f"split, it would not give the numbers of one device ({what})"
        self._stay_alone(CannotSplit(reason))
        self._pieces = 1
        self._split(1)

    # The step.

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on a batch; its results, as one device gives them."""
        if self._unsplit is not None:
            return self._run_unsplit(shares)
        results = self._results(shares)
        with after(results):
            self._assign(results)
        return self._outputs(results)

    def _results(self, shares: Sequence[Rows]) -> "list[OfReplica]":
        """What each replica of this process has; nothing is assigned yet."""
        if self.may_drop:
            # What has effects would have them all the same.
            self.may_drop = not (self.alone or self.cost.once)
        asked = Asked(self._group, shares, self.may_drop)
        results = self._run_alone(shares) if self.alone else self._run(shares, asked)
        sums = results[0].asked
        self.may_drop &= bool(sums)
        goes_on = asked.answered(sums[0]) if sums else asked.alone()
        return [result._replace(goes_on=goes_on) for result in results]

    def _assign(self, results: Sequence["OfReplica"]) -> None:
        """Assign the new values; nothing if the step is dropped."""
        if not self.may_drop:
            self._assign_all(results)
            return
        goes_on = results[0].goes_on
        self._group.stop_flags[1].assign(goes_on, read_value=False)
        tf.cond(goes_on, lambda: self._assign_all(results), lambda: False)

    def _assign_all(self, results: Sequence["OfReplica"]) -> bool:
        places = [self._copies[number] for number in self._assigned]
        for replica, result in zip(self._group.replicas, results, strict=True):
            self._group.assign(places, result.pieces[0][1], replica)
        return True

    def _outputs(self, results: Sequence["OfReplica"]) -> Any:
        return self._filled(self._joined([[each[0] for each in one.pieces] for one in results]))

    def _filled(self, tensors: Sequence[Any]) -> Any:
        flat = iter(tensors)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            self._whole.structured_outputs,
            expand_composites=True,
        )

    def _run(self, shares: Sequence[Rows], asked: Asked) -> "list[OfReplica]":
        counts = [self._counts(rows) for rows in shares]
        # What is one row is all replicas', or that of the only example.
        wholes = [
            place
            for place, leaf in enumerate(self._leaves)
            if is_composite(leaf) or is_one_row(leaf)
        ]
        whole = None
        if wholes and len(shares) > 1:
            whole = present(whole_batch(self._group, shares, self.spec))

        def on_replica(replica: Replica) -> "OfReplica":
            values = self._group.read(self._copies, replica)
            rows = self._begun(shares[replica.id], replica)
            own, totals = tf.unstack(counts[replica.id], axis=1)
            before = tf.add_n([tf.zeros_like(own), *(each[:, 0] for each in counts[: replica.id])])
            data: list[Any] = []
            for place, tensor in enumerate(present(rows.data)):
                if whole is not None and place in wholes:
                    tensor = whole[place]
                data += tf.nest.flatten(tensor, expand_composites=True)
            pieces = self._taken_in_pieces(replica, own, before, data)
            given = totals, own[0], self._lengths(data)
            args = [(*numbers, *given, taken, values) for *numbers, taken in pieces]
            begun[replica.place] = values, rows
            with riding(tf.identity(asked.numbers)) as sums:
                result = self._on_replica(args, replica)
            return result._replace(asked=sums)

        begun: dict[int, tuple[list[tf.Tensor], Rows]] = {}
        results = self._with_others(self._group.run(on_replica))
        return self._looked_at_all(results, begun)

    def _with_others(self, results: list["OfReplica"]) -> list["OfReplica"]:
        """What each replica has, with the values that others have made for it."""
        if not self._owners:
            return results
        found = []
        for replica, result in zip(self._group.replicas, results, strict=True):
            (outputs, made, done, seen), *others = result.pieces
            made, copied = list(made), []
            for place, number in enumerate(self._assigned):
                owner = self._owners.get(number, replica.place)
                if owner != replica.place:
                    made[place] = results[owner].pieces[0][1][place]
                    if not is_shared(self._copies[number]):
                        with tf.device(replica.device):
                            made[place] = tf.identity(made[place])
                        copied.append(made[place])
            # What fails to come leaves nothing half done.
            with tf.device(replica.device), tf.control_dependencies(copied):
                done = [*done, tf.zeros(())]
            found.append(result._replace(pieces=[(outputs, made, done, seen), *others]))
        return found

    def _looked_at_all(
        self, results: "list[OfReplica]", begun: Mapping[int, tuple[list[tf.Tensor], Rows]]
    ) -> "list[OfReplica]":
        """What replicas have, given the values of variables and the rows that each began with."""
        return results

    def _counts(self, rows: Rows) -> tf.Tensor:
        """For each batch how many examples are here, and how many there are in all."""
        if rows.lengths is None:
            found = tf.stack([[rows.examples, rows.global_batch_size]])
        else:
            cut_ones = [name for name in self._batch_of if name is not None]
            found = tf.gather(rows.lengths, [cut_ones.index(name) for name in self._batches])
        return tf.cast(found, tf.int32)

    def _taken_in_pieces(
        self, replica: Replica, own: tf.Tensor, before: tf.Tensor, data: Sequence[tf.Tensor]
    ) -> list[tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]:
        """The number of each piece among all, its size and those before it, and its rows."""
        if self._pieces == 1:
            return [(tf.constant(replica.id), tf.stack([own, before], axis=1), list(data))]
        found = []
        for piece in range(self._pieces):
            start, stop = share_bounds(own, piece, self._pieces)
            taken = self._rows_of(data, start, stop)
            number = tf.constant(replica.id * self._pieces + piece)
            found.append((number, tf.stack([stop - start, before + start], axis=1), taken))
        return found

    def _rows_of(self, data: Sequence[tf.Tensor], start: Any, stop: Any) -> list[tf.Tensor]:
        """Rows of the tensors that are cut, given where they begin and end in each batch."""
        found = []
        for leaf, tensor in zip(self._described, data, strict=True):
            if isinstance(leaf.layout, InRows):
                place = self._batches.index(leaf.layout.blocks[0].batch)
                tensor = cut(tensor, start[place], stop[place])
            found.append(tensor)
        return found

    def _lengths(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The lengths of axes that have names, for pieces, which have them in common."""
        found: dict[str, Any] = {}
        for leaf, tensor in zip(self._described, tensors, strict=True):
            for axis, dim in enumerate(leaf.dims or ()):
                is_own = isinstance(leaf.layout, InRows) and leaf.layout.axis == axis
                if self._pieces > 1 and isinstance(dim, Size) and not is_own:
                    is_spec = isinstance(tensor, tf.TypeSpec)
                    found[repr(dim)] = tensor if is_spec else tf.shape(tensor)[axis]
        return found

    def _run_alone(self, shares: Sequence[Rows]) -> "list[OfReplica]":
        """What one replica has, for each of this process."""
        totals = self._counts(shares[0])[:, 1]
        batch = whole_batch(self._group, shares, self.spec)
        data = tf.nest.flatten(present(batch), expand_composites=True)
        with graph_internals.single_device(), tf.device(self._group.hub):
            values = self._group.read(self._copies, self._group.replicas[0])
            own = tf.stack([totals, tf.zeros_like(totals)], axis=1)
            made = self._local(tf.constant(0), own, totals, totals[0], {}, data, values)
        result = OfReplica([made])
        return [result] * len(self._group.replicas)

    def _run_unsplit(self, shares: Sequence[Rows]) -> Any:
        """Run the step as it is on one replica, and give the others the values that it leaves."""
        batch = whole_batch(self._group, shares, self.spec)
        with self._group.change():
            with graph_internals.single_device(), tf.device(self._group.hub):
                results = self._unsplit(*batch)
            for first, *others in self._copies:
                for other in others:
                    other.assign(first)
        return results

    def _joined(self, parts: Sequence[Sequence[Sequence[tf.Tensor]]]) -> list[tf.Tensor]:
        """The results of all replicas: those that are alike once, and rows one after another."""
        found = dict(enumerate(parts[0][0]))
        rows = {n: at for n, at in enumerate(self._layouts) if isinstance(at, InRows)}
        if self._group.count * self._pieces > 1 and not self.alone and rows:
            own = [
                [
                    one_after_another([led_by(each[n], at.axis) for each in pieces])
                    for n, at in rows.items()
                ]
                for pieces in parts
            ]
            wholes = own[0] if self._group.count == 1 else self._group.joined(own)
            for (place, layout), whole in zip(rows.items(), wholes, strict=True):
                found[place] = led_by(whole, layout.axis, back=True)
        return [found[place] for place in range(len(found))]


class OfReplica(NamedTuple):
    """What one replica has of a step.

    Attributes:
        pieces: For each piece of its share the step's results, new values of variables, tensors
            that are there once these are, and what else its part yields.
        measured: What each probe has measured.
        asked: The sums of what workers ask each other, where these came with others.
        goes_on: Whether no worker wants to stop, once it is known that batches are the same.
    """

    pieces: list[Any]
    measured: list[list[tf.Tensor]] = []
    asked: list[tf.Tensor] = []
    goes_on: tf.Tensor | None = None


@contextlib.contextmanager
def after(results: Sequence[OfReplica]) -> Iterator[None]:
    """Let nothing be assigned before every replica has computed all that it assigns."""
    done = [each for result in results for _, _, all_of, _ in result.pieces for each in all_of]
    done += [result.goes_on for result in results]
    with tf.control_dependencies([tf.identity(each) for each in done if each is not None]):
        yield


def one_after_another(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def led_by(tensor: tf.Tensor, axis: int, back: bool = False) -> tf.Tensor:
    """A tensor with this axis as its first, or with its first one as this axis."""
    if axis == 0:
        return tensor
    order = [axis, *(each for each in range(tensor.shape.rank) if each != axis)]
    return tf.transpose(tensor, tf.math.invert_permutation(order) if back else order)


def is_composite(leaf: Any) -> bool:
    return not isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def of_each_batch(counts: tf.Tensor, totals: tf.Tensor) -> list[list[tf.Tensor]]:
    """The numbers of each batch: examples of this part, before it, and in all."""
    # Apart from each other: what is made of totals alone does not belong to one replica.
    parts = zip(tf.unstack(counts), tf.unstack(totals), strict=True)
    return [[*tf.unstack(own), total] for own, total in parts]


def batches_of_leaves(leaves: Sequence[Any], groups: Groups) -> list[str | None]:
    """The name of the batch whose examples have the rows of each leaf; None for one of all."""
    numbers = iter(groups or itertools.repeat(0))
    found: list[str | None] = []
    for leaf in leaves:
        number = next(numbers) if is_cut(leaf) else -1
        found.append(None if number < 0 else f"{BATCH}_{number}" if number else BATCH)
    return found


def opened(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)


def described(
    spec: tf.TensorSpec, number: int, name: str | None, sizes: Mapping[str, AnySize]
) -> Leaf:
    """What the partition has to know of a tensor, whose rows are those of this batch."""
    if spec.shape.rank is None:
        return Leaf(None)
    dims: list[Any] = [
        Size.of(f"axis_{axis}_of_{number}") if length is None else length
        for axis, length in enumerate(spec.shape)
    ]
    if name is None:
        return Leaf(dims)
    return Leaf([sizes[name], *dims[1:]], InRows(0, (Block(name),)))


def counting_rows(leaf: Any, parts: list[Leaf], batch: AnySize) -> list[Leaf]:
    """The components of a leaf, with what those of a composite tensor say of the batch's size."""
    if isinstance(leaf, tf.SparseTensorSpec) and leaf.shape.rank:
        *others, shape = parts
        return [
            *others,
            shape._replace(value=np.array([batch, *leaf.shape[1:], None], object)[:-1]),
        ]
    if isinstance(leaf, tf.RaggedTensorSpec) and leaf.ragged_rank:
        values, splits, *others = parts
        return [values, splits._replace(dims=[batch + 1]), *others]
    return parts


def whole_batch(group: ReplicaGroup, shares: Sequence[Rows], spec: Batch) -> Batch:
    """The global batch, of which processes that have read their own rows get the others'."""
    if not those_here(shares):
        return gathered(shares, spec)
    own = [shares[replica.id] for replica in group.replicas]
    if group.count == 1:
        # Its leaves may have different numbers of rows.
        return own[0].data
    parts = [present(rows.data) for rows in own]
    batch: Batch = filled(spec, group.joined(parts))
    return batch
