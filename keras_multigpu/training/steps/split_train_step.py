"""The split step of training, into which probes look, and which they may forbid."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.exchange.packing import SumAll
from keras_multigpu.training.exchange.stages import present_sum, summing
from keras_multigpu.training.replica_group import Replica, copies_of
from keras_multigpu.training.shares import Batch, Rows, held_until, open_spec, tensors_of
from keras_multigpu.training.steps.noted_step import noted_step
from keras_multigpu.training.steps.probes import Probe, Times, collect, now_that, verdict
from keras_multigpu.training.steps.split_seen import NewValues, SplitSeen
from keras_multigpu.training.steps.split_step import BATCH, OfReplica, SplitStep, after
from keras_multigpu.training.steps.taps import Taps, joined_pieces
from keras_multigpu.training.update import loss_scale, state_of
from keras_multigpu.training.variables.placement import MadeOutside

if TYPE_CHECKING:
    from keras_multigpu.training.replication import Replication


class SplitTrainStep(SplitStep):
    """A step of training, split over replicas, with probes.

    Args:
        model: The model, whose variables are where they belong.
        replication: Its replicas, with the probes, and in how many pieces they take their shares.
        spec: The specs of a global batch.
        function: The model's step.
    """

    def __init__(
        self,
        model: keras.Model,
        replication: "Replication",
        spec: Batch,
        function: Callable[[Any], Any],
    ) -> None:
        self._probes = replication.probes
        self._measuring = [p for p in self._probes if type(p).on_replica is not Probe.on_replica]
        self._timed = any(probe.timed for probe in self._measuring)
        self._taps: Taps | None = None
        self._watches: dict[int, Stopwatch] = {}
        pieces = replication.pieces
        if self._measuring:
            try:
                # What is a number in the graph is not known to be that of examples.
                super().__init__(model, replication, open_spec(spec), function, pieces)
                return
            except MadeOutside:
                raise
            except Exception:  # Code of the user's may want to know the batch's size.
                pass
        super().__init__(model, replication, spec, function, pieces)

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Train on a batch; what the step returns, as one device gives it."""
        for probe in self._probes:
            probe.before_step()
        results = self._results(shares)
        with after(results):
            allowed = self._verdict(results) if self._probes else None
            if allowed is None:
                self._assign(results)
                return self._outputs(results)
            tf.cond(allowed, lambda: self._assigned_all(results), lambda: False)
            return self._kept(self._outputs(results), allowed)

    def _assigned_all(self, results: Any) -> bool:
        self._assign(results)
        return True

    # While the step is traced.

    def _noting(self) -> contextlib.AbstractContextManager[Any]:
        return self._noted() if self._measuring else contextlib.nullcontext()

    @contextlib.contextmanager
    def _noted(self) -> Any:
        with noted_step(self._model) as noted:
            self._taps = Taps(noted, any(probe.by_piece for probe in self._measuring))
            yield

    def _tensors_to_see(self) -> list[tf.Tensor]:
        if self._taps is None:
            return []
        noted = self._taps.noted
        trains = bool(self._model.trainable_variables)
        if len(noted.losses) != 1 or (trains and not noted.gradients):
            refuse_to_measure(self._measuring[0])
        return noted.tensors

    def _seen(self, share: tf.Tensor) -> Any:
        if self._taps is None:
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
        return self._taps.of_replica(splitter, scope, statistics, share, BATCH)

    def _number_of(self, variable: keras.Variable) -> int | None:
        """The number of a variable in the step; None if that does not use it."""
        return self._numbers.get(id(copies_of(variable)[0]))

    # While it runs.

    def _begun(self, rows: Rows, replica: Replica) -> Rows:
        """The rows of a replica; the time when it has them is taken, if a probe wants to know."""
        if not self._timed:
            return rows
        x, *others = rows.data
        watch = self._watches[replica.place] = Stopwatch(now_that(tensors_of(x)))
        # Otherwise the time is taken when a thread has nothing else to do. Only the inputs wait
        # for it: to let targets and variables wait as well makes the step slower.
        return rows._replace(data=(held_until(watch.started, x), *others))

    def _on_replica(
        self, pieces: list[Any], values: Sequence[tf.Tensor], rows: Rows, replica: Replica
    ) -> OfReplica:
        if self._taps is None:
            return super()._on_replica(pieces, values, rows, replica)._replace(
                measured=[[] for _ in self._probes]
            )
        watch, sum_all = self._watches.pop(replica.place, None), present_sum()
        with summing(sum_all if watch is None else functools.partial(watch.sum, sum_all)):
            result = super()._on_replica(pieces, values, rows, replica)
        tapped = joined_pieces([each[-1] for each in result.pieces], self._taps.axes)
        known = dict(enumerate(values)) | dict(
            zip(self._assigned, result.pieces[0][1], strict=True)
        )
        state = state_of(self._model.optimizer)
        of_state = [(v, self._number_of(v)) for v in state]
        used = [(v, values[number]) for v, number in of_state if number is not None]
        seen = SplitSeen(
            replica=replica.id,
            replicas=self._group.count,
            rows=rows,
            taps=self._taps,
            tapped=tapped,
            update=NewValues(
                self._new_values(self._model.trainable_variables, known, replica),
                self._new_values(state, known, replica),
            ),
            scale=loss_scale(self._model.optimizer, *zip(*used, strict=True)) if used else tf.ones(()),
            times=watch.times(tf.nest.flatten(tapped.own)) if watch else None,
        )
        return result._replace(measured=[probe.on_replica(seen) for probe in self._probes])

    def _new_values(
        self, variables: Sequence[keras.Variable], known: dict[int, tf.Tensor], replica: Replica
    ) -> list[tf.Tensor]:
        """The values of variables after the step, also of those that it does not use."""
        numbers = [self._number_of(variable) for variable in variables]
        unused = [v for v, number in zip(variables, numbers, strict=True) if number is None]
        rest = iter(self._group.read(self._group.copies(unused), replica))
        return [next(rest) if number is None else known[number] for number in numbers]

    def _verdict(self, results: Sequence[OfReplica]) -> tf.Tensor | None:
        """Whether all probes allow the step, which see all replicas and so decide alike."""
        flat = self._group.everyones([tf.nest.flatten(result.measured) for result in results])
        measured = [tf.nest.pack_sequence_as(results[0].measured, tensors) for tensors in flat]
        with tf.device(self._group.hub):
            allowed = verdict(self._probes, measured)
            collect(self._probes, measured, allowed)
        return allowed

    def _kept(self, logs: Any, allowed: tf.Tensor) -> Any:
        """The logs, as they were before where the step was not allowed."""
        if not isinstance(logs, dict):
            return logs
        with graph_internals.single_device():
            # Metrics have their new values only where it was.
            present = self._model.get_metrics_result()

        def chosen(name: str, value: Any) -> Any:
            if name not in present:
                return value
            return keras.tree.map_structure(
                lambda new, old: tf.where(allowed, new, tf.cast(old, new.dtype)),
                value,
                present[name],
            )

        return {name: chosen(name, value) for name, value in logs.items()}


class Stopwatch:
    """When a replica began, when it had all that is summed, and when it had the sums.

    Args:
        started: When it began.
    """

    def __init__(self, started: tf.Tensor) -> None:
        self.started = started
        self._computed: list[tf.Tensor] = []
        self._reduced: list[tf.Tensor] = []

    def sum(self, sum_all: SumAll, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors, and take the times before and after it."""
        computed = now_that(tensors)
        summed = sum_all(held_until(computed, tensors))
        self._computed.append(computed)
        self._reduced.append(now_that(summed))
        return summed

    def times(self, gradients: Sequence[tf.Tensor]) -> Times:
        """The times of a step that yields these gradients; the last sums count."""
        if not self._computed:
            computed = now_that(gradients)
            with tf.control_dependencies([computed]):
                return Times(self.started, computed, tf.timestamp())
        computed, reduced = (tf.reduce_max(each) for each in (self._computed, self._reduced))
        return Times(self.started, computed, reduced)


def refuse_to_measure(probe: Probe) -> None:
    """Raise a `ValueError` where a probe wants to see a loss or gradients that nobody knows."""
    raise value_error(
        "A callback wants to measure inside a `train_step` of your own whose loss or gradients are "
        "not known.",
        "Expected one call of `self.compute_loss`, and gradients that `optimizer.apply` is given.",
        "Leave out the callback, or take the loss from `compute_loss`.",
        probe=type(probe).__name__,
    )
