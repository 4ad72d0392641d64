"""The step of training, split over replicas; probes look into it, and may forbid it."""

import collections
import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.exchange.packing import SumAll
from keras_multigpu.training.exchange.stages import present_sum, summing
from keras_multigpu.training.replica_group import Replica, copies_of
from keras_multigpu.training.shares import Rows, batch_size_of, held_until, open_spec, tensors_of
from keras_multigpu.training.steps.probes import Times, now_that
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.split_step import BATCH, OfReplica, SplitStep, after, whole_batch
from keras_multigpu.training.steps.taps import joined_pieces
from keras_multigpu.training.steps.watched import Watched, part_of_one, rows_of_one

logger = logging.getLogger("keras_multigpu")

# A part of a step that is worth a warning.
DEAR = 0.1
# Keras's default.
USUAL_BATCH_SIZE = 32


class SplitTrainStep(SplitStep):
    """A step of training, split over replicas, with probes."""

    def __init__(self, request: StepRequest) -> None:
        self._watched = Watched(request.model, request.group, request.probes)
        self._watches: dict[int, Stopwatch] = {}
        self._make(request)
        if self._unsplit is not None:
            self._watched.unsplit(str(self.alone))
        self._warn_of_gathers()

    def _make(self, request: StepRequest) -> None:
        if self._watched.measures:
            # A number in the graph may be that of examples, or another one. But user code may need
            # to know the batch size.
            with contextlib.suppress(Exception):
                super().__init__(request._replace(spec=open_spec(request.spec)))
                return
        super().__init__(request)

    def _warn_of_gathers(self) -> None:
        """Name what makes the step slow, once for each place."""
        if self.alone or self._count == 1:
            return
        run = vars(self._model).get("training_run")
        size = batch_size_of(self.spec) or (run and run.global_batch_size) or USUAL_BATCH_SIZE
        # All batches count alike.
        numbers = collections.defaultdict(lambda: 1, dict.fromkeys(self._batches, size))
        part = self.cost.part_of_gathers(numbers, self._count)
        found = [each for each in self.cost.moved if each.kind == "gathered" and each.op]
        if part <= DEAR or not found:
            return
        most = max(found, key=lambda each: self.cost.bytes("gathered", numbers, [each]))
        assert most.op is not None
        place = place_of(most.op)
        if place in self._request.warned_of:
            return
        self._request.warned_of.add(place)
        logger.warning(
            "%s needs the rows of all replicas (%s): gathering them, and what every replica then "
            "computes in full, takes about %d %% of a step. The results are those of one device. "
            "`kmg.explain(model)` lists what each part costs.",
            place,
            most.op.type,
            round(100 * part),
        )

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Train on a batch; what the step returns, as one device gives it."""
        watched = self._watched
        watched.before_step()
        if self._unsplit is not None:
            return self._run_unsplit(shares)
        results = self._results(shares)
        with after(results):
            seen = watched.everyones([result.measured for result in results])
            # Exchanges come before and after.
            with self._group.change(results[0].goes_on):
                allowed = watched.verdict(seen)
                if allowed is None:
                    self._assign(results)
                else:
                    tf.cond(allowed, lambda: self._assigned_all(results), lambda: False)
            outputs = self._outputs(results)
            return outputs if allowed is None else watched.kept(outputs, allowed)

    def _assigned_all(self, results: Any) -> bool:
        self._assign(results)
        return True

    # While the step is traced.

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        return self._watched.recording()

    def _tensors_to_see(self) -> list[tf.Tensor]:
        taps = self._watched.taps
        return [] if taps is None else taps.record.tensors

    def _seen(self, share: tf.Tensor) -> Any:
        if self._watched.taps is None:
            return None
        splitter, scope = self._step.splitter, self._step.scope
        assert splitter is not None and scope is not None
        self._numbers = {id(copies[0]): number for number, copies in enumerate(self._copies)}
        changed = [
            self._number_of(variable)
            for variable in self._model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        ]
        statistics = [scope.state[n] for n in changed if n in self._assigned]
        return self._watched.taps.of_replica(splitter, scope, statistics, share, BATCH)

    def _number_of(self, variable: keras.Variable) -> int | None:
        """The number of a variable in the step; None if that does not use it."""
        return self._numbers.get(id(copies_of(variable)[0]))

    # While it runs.

    def _begun(self, rows: Rows, replica: Replica) -> Rows:
        """The rows of a replica; the time when it has them is taken, if a probe wants to know."""
        if not self._watched.timed:
            return rows
        x, *others = rows.data
        watch = self._watches[replica.place] = Stopwatch(now_that(tensors_of(x)))
        # Otherwise the time is taken when a thread has nothing else to do. Only the inputs wait
        # for it: to let targets and variables wait as well makes the step slower.
        return rows._replace(data=(held_until(watch.started, x), *others))

    def _on_replica(self, pieces: list[Any], replica: Replica) -> OfReplica:
        watch, sum_all = self._watches.get(replica.place), present_sum()
        if watch is not None and sum_all is not None:
            sum_all = functools.partial(watch.sum, sum_all)
        with summing(sum_all):
            return super()._on_replica(pieces, replica)

    def _looked_at_all(
        self, results: list[OfReplica], begun: Mapping[int, tuple[list[tf.Tensor], Rows]]
    ) -> list[OfReplica]:
        watches, self._watches = self._watches, {}
        if self._watched.taps is None:
            unseen: list[list[tf.Tensor]] = [[] for _ in self._watched.probes]
            return [result._replace(measured=unseen) for result in results]

        def look(replica: Replica) -> OfReplica:
            place = replica.place
            return self._looked_at(results[place], *begun[place], replica, watches.get(place))

        return self._group.run(look)

    def _run_alone(self, shares: Sequence[Rows]) -> list[OfReplica]:
        """The first replica takes the whole batch; the others have none of it."""
        results = super()._run_alone(shares)
        if self._watched.taps is None:
            unseen: list[list[tf.Tensor]] = [[] for _ in self._watched.probes]
            return [result._replace(measured=unseen) for result in results]
        batch, total = whole_batch(self._group, shares, self.spec), shares[0].global_batch_size
        found = []
        for replica, result in zip(self._group.replicas, results, strict=True):
            *others, tapped = result.pieces[0]
            own = OfReplica([[*others, part_of_one(replica, tapped)]])
            values = self._group.read(self._copies, replica)
            watch = Stopwatch(tf.timestamp()) if self._watched.timed else None
            rows = rows_of_one(replica, batch, total, self.spec)
            found.append(self._looked_at(own, values, rows, replica, watch))
        return found

    def _looked_at(
        self,
        result: OfReplica,
        values: Sequence[tf.Tensor],
        rows: Rows,
        replica: Replica,
        watch: "Stopwatch | None",
    ) -> OfReplica:
        """What a replica has, with what the probes measure there."""
        taps = self._watched.taps
        assert taps is not None
        tapped = joined_pieces([seen for *_, seen in result.pieces], taps.axes)
        before = dict(enumerate(values))
        present = before | dict(zip(self._assigned, result.pieces[0][1], strict=True))

        def before_of(variable: keras.Variable) -> tf.Tensor | None:
            number = self._number_of(variable)
            return None if number is None else before[number]

        def new_values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
            numbers = [self._number_of(variable) for variable in variables]
            unused = [v for v, number in zip(variables, numbers, strict=True) if number is None]
            rest = iter(self._group.read(self._group.copies(unused), replica))
            return [next(rest) if number is None else present[number] for number in numbers]

        scale = self._watched.scale(before_of)
        times = watch.times(tf.nest.flatten(tapped.own)) if watch else None
        measured = self._watched.measured(replica, rows, tapped, new_values, scale, times)
        return result._replace(measured=measured)


class Stopwatch:
    """When a replica began, when it had all that is summed, and when it had the sums."""

    def __init__(self, started: tf.Tensor) -> None:
        self.started = started
        self._computed: list[tf.Tensor] = []
        self._reduced: list[tf.Tensor] = []
        self._hidden: list[tf.Tensor] = []

    def sum(self, sum_all: SumAll, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors, and take the times before and after it."""
        ready = [now_that([tensor]) for tensor in tensors]
        summed = sum_all([held_until(*pair) for pair in zip(ready, tensors, strict=True)])
        there = [now_that([whole]) for whole in summed]
        self._computed.append(tf.reduce_max(ready))
        self._reduced.append(tf.reduce_max(there))
        # The last tensor ends what is computed meanwhile.
        self._hidden.append(time_within(ready, there, self._computed[-1]))
        return summed

    def times(self, gradients: Sequence[tf.Tensor]) -> Times:
        """The times of a step that yields these gradients; the last sums count."""
        if not self._computed:
            computed = now_that(gradients)
            with tf.control_dependencies([computed]):
                return Times(self.started, computed, tf.timestamp())
        computed, reduced = (tf.reduce_max(each) for each in (self._computed, self._reduced))
        return Times(self.started, computed, reduced, tf.add_n(self._hidden))


def time_within(
    begun: Sequence[tf.Tensor], ended: Sequence[tf.Tensor], until: tf.Tensor
) -> tf.Tensor:
    """How long, until some time, any of some things went on, one after another."""
    total, before = tf.zeros_like(until), begun[0]
    for begin, end in zip(begun, ended, strict=True):
        end = tf.minimum(end, until)
        total += tf.maximum(end - tf.maximum(begin, before), 0.0)
        before = tf.maximum(end, before)
    return total
