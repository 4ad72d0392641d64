"""`ReplicaRunner`: runs a split step on the replicas of this process, and with those of others.

variables ──> stages of each replica's part, between them sums over all ──> new values, assigned
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.layouts import REPLICATED
from keras_multigpu.training.agreement import numbers_of_batch, require_same_batch
from keras_multigpu.training.exchange.exchange import Exchange
from keras_multigpu.training.exchange.stage import RunStage, Stage
from keras_multigpu.training.exchange.sums import Sums
from keras_multigpu.training.replica_group import Copies, Replica
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import whole_batch
from keras_multigpu.training.shares import Rows, present_leaves, tensors_of
from keras_multigpu.training.steps.batches import PartArguments
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.results import ReplicaResult, after, at_once
from keras_multigpu.training.watching.progress import Progress
from keras_multigpu.training.watching.stopwatch import Stopwatch
from keras_multigpu.training.watching.watched import if_alone

# How many numbers a variable has whose new value should not wait beside the old one.
LARGE = 2**16


class ReplicaRunner(Runner):
    """Runs a split step on replicas; probes may look into it.

    Args:
        step: The step.
        run_stage: Runs a stage for all pieces of a replica's share.
        begin: Called before a step reads variables.
    """

    step: PartitionedStep

    def __init__(
        self,
        step: PartitionedStep,
        run_stage: RunStage = Stage.run,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.step, self.request = step, step.traced.request
        request = self.request
        self._run_stage, self._begin = run_stage, begin
        self._group, self._watched = request.group, step.traced.watched
        self.open_sums = request.open_sums
        self.is_checked = not request.self_check
        if self._group.count > 1:
            self.progress = Progress(self._group.exchange.devices)
        self._at_once = False
        self._stay_open: tf.Tensor | None = None

    @property
    def waiting(self) -> list[Copies]:
        # What measures the times of sums measures them in each step.
        return [] if self._watched.timed else self.step.waiting

    @property
    def unsplit_because(self) -> object:  # type: ignore[override]
        return self.step.unsplit_because

    def __call__(self, shares: Sequence[Rows]) -> Any:
        watched = self._watched
        watched.before_step()
        self._begin()
        # Nothing is assigned yet. If batches differ between workers, it fails.
        results, is_same = self._results(shares)
        self._at_once = self.request.at_once and not watched.may_forbid
        # Even a counter of steps waits for the batch, which may be refused.
        with at_once(shares) if self._at_once else after(results, is_same):
            seen = watched.gathered([result.measured for result in results])
            # Inside a change there are no exchanges.
            with self.request.change():
                allowed = watched.verdict(seen)
                if allowed is None:
                    self._assign(results)
                else:
                    tf.cond(allowed, lambda: self._assign(results), lambda: False)
            outputs = self.step.traced.with_structure(self.step.joined(self._group, results))
            return outputs if allowed is None else watched.logs_after(outputs, allowed)

    def _results(self, shares: Sequence[Rows]) -> tuple[list[ReplicaResult], tf.Tensor | None]:
        """What each replica of this process has, and what the check of the batch waits for."""
        numbers = numbers_of_batch(self._group, shares)
        if self.unsplit_because:
            results, total = self._run_alone(shares), None
        else:
            results, total = self._run(shares, numbers)
        return results, require_same_batch(self._group, numbers, total)

    def _run(
        self, shares: Sequence[Rows], numbers: tf.Tensor | None
    ) -> tuple[list[ReplicaResult], tf.Tensor | None]:
        """What each replica of this process has, and the sum of `numbers`, if sums took them."""
        step, group = self.step, self._group
        # A leaf of one row goes to all replicas, even if it was cut as that of the only example.
        places = step.inputs.whole_leaves if len(shares) > 1 else []
        whole = present_leaves(whole_batch(group, shares, step.spec)) if places else []
        may_wait, are_open = None, False
        if self.open_sums is not None and self.waiting:
            may_wait, are_open = self.open_sums.read()

        def begin(replica: Replica) -> tuple[list[PartArguments], ReplicaResult]:
            values = group.read(step.copies, replica)
            rows, watch = self._watched.begin(shares[replica.id])
            earlier = [each.examples for each in shares[: replica.id]]
            before = tf.add_n([tf.zeros_like(rows.examples), *earlier])
            leaves = present_leaves(rows.data)
            for place in places:
                leaves[place] = whole[place]
            data = tf.nest.flatten(leaves, expand_composites=True)
            pieces = step.arguments(replica.id, rows, before, data, values, are_open=are_open)
            return pieces, ReplicaResult([], values, rows, watch)

        pieces, results = zip(*group.run(begin), strict=True)
        sums = Sums(
            group.exchange,
            None if numbers is None else [numbers] * len(results),
            [result.watch for result in results] if self._watched.timed else None,
            may_wait,
            self.progress,
        )
        found = step.local(pieces, sums, self._run_stage)
        results = [
            result._replace(pieces=own, summed=packs)
            for result, own, packs in zip(results, found, sums.packs, strict=True)
        ]
        if self._watched.recorded is not None:
            results = group.run(lambda replica: self._measure(replica, results[replica.place]))
        if may_wait is not None:
            self._stay_open = may_wait & ~tf.reduce_all(sums.due)
        return results, sums.of_riders[0] if sums.of_riders else None

    def _run_alone(self, shares: Sequence[Rows]) -> list[ReplicaResult]:
        """The results of a step that one replica computes, for each replica of this process."""
        step, group = self.step, self._group
        batch, total = whole_batch(group, shares, step.spec), shares[0].global_batch_size
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        with graph_internals.single_device(), tf.device(group.first_device):
            values = group.read(step.copies, group.replicas[0])
            rows = Rows(batch, total, total)
            args = step.arguments(0, rows, tf.zeros_like(total), data, values)
            ((piece,),) = step.local([args], Sums(Exchange([group.first_device])))
        if self._watched.recorded is None:
            return [ReplicaResult([piece])] * len(group.replicas)
        found = []
        for replica in group.replicas:
            values = group.read(step.copies, replica)
            watch = Stopwatch(tf.timestamp()) if self._watched.timed else None
            rows, seen = if_alone(replica, batch, total, step.spec, piece.seen)
            own = ReplicaResult([piece._replace(seen=seen)], values, rows, watch)
            found.append(self._measure(replica, own))
        return found

    def _measure(self, replica: Replica, result: ReplicaResult) -> ReplicaResult:
        """What a replica has, with what the probes measure there."""
        assert self._watched.recorded is not None
        seen = self._watched.recorded.joined([piece.seen for piece in result.pieces])
        values = dict(enumerate(result.values))
        new = values | dict(zip(self.step.assigned, result.pieces[0].new, strict=True))

        def before(variable: keras.Variable) -> tf.Tensor | None:
            number = self.step.traced.number_of(variable)
            if number is None or self.step.variables[number] != REPLICATED:
                return None
            return values[number]

        def after(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
            numbers = [self.step.traced.number_of(variable) for variable in variables]
            unused = [v for v, number in zip(variables, numbers, strict=True) if number is None]
            rest = iter(self._group.read(self._group.copies(unused), replica))
            return [next(rest) if number is None else new[number] for number in numbers]

        times = result.watch.times(tensors_of(seen.gradients)) if result.watch else None
        measured = self._watched.measured(replica, result.rows, seen, before, after, times)
        return result._replace(measured=measured)

    def _assign(self, results: Sequence[ReplicaResult]) -> bool:
        if self.open_sums is not None and self._stay_open is not None:
            self.open_sums.note(self._stay_open)
        places = range(len(self.step.assigned))
        copies = [self.step.copies[number] for number in self.step.assigned]
        large = [n for n in places if (copies[n][0].shape.num_elements() or 0) >= LARGE]
        sums = [result.summed for result in results]
        # Most errors come before the sums, and then leave nothing behind. Large weights whose
        # gradients were summed earlier do not wait for the rest: memory is scarcest in the update.
        for those in (large, [n for n in places if n not in large]):
            with at_once(sums if self._at_once and those is not large else ()):
                for replica, result in zip(self._group.replicas, results, strict=True):
                    new = [result.pieces[0].new[n] for n in those]
                    self._group.assign([copies[n] for n in those], new, replica)
        return True
