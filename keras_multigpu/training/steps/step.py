"""One step on N replicas, as a function of their shares of a batch.

                     shares ──> forward and backward ──> sum ──> update ──> new values
                     a replica  a pure function,         over    a pure     assigned on
                     each       traced once              them    function   each replica

The two pure functions are traced once and called for every replica on its device. What the rows
add to metrics is in the sum; metrics that are not sums over examples are updated with the global
batch and its predictions, gathered. Probes, see `probes`, look on and may forbid the new values.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import compile_internals, graph_internals, model_internals
from keras_multigpu.training.exchange.sparse_gradients import (
    rows_noted,
    rows_of_all,
    rows_spec,
)
from keras_multigpu.training.exchange.stages import TracedPass, called_directly, traced
from keras_multigpu.training.replica_group import Copies, Replica, ReplicaGroup
from keras_multigpu.training.replica_pass.output_rows import joined, refuse_computed
from keras_multigpu.training.replica_pass.passes import (
    Layout,
    Outcome,
    ReplicaPass,
    TrainingPass,
    Update,
)
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    batch_size_of,
    filled,
    first_rows,
    gathered,
    held_until,
    present,
    share_spec,
    specs_of,
    tensors_of,
    those_here,
)
from keras_multigpu.training.steps.probes import (
    Probe,
    Seen,
    Times,
    all_summed,
    collect,
    now_that,
    verdict,
)
from keras_multigpu.training.steps.same_batch import require_same_batch
from keras_multigpu.training.update import loss_scale

SCALAR = tf.TensorSpec((), tf.float32)
INTEGER = tf.TensorSpec((), tf.int32)


Known = tuple[Values, list[tf.Tensor]]
"""The values of a model's variables on a replica, and of its optimizer's."""


class Result(NamedTuple):
    """What one replica hands back to the step."""

    update: Update
    outcome: Outcome
    layout: Layout
    examples: tf.Tensor
    measured: list[list[tf.Tensor]] = []
    trackers: list[tf.Tensor] = []


class Step:
    """What training, evaluation and prediction steps have in common."""

    def __init__(
        self, replica_pass: ReplicaPass, optimizer_variables: Sequence[keras.Variable] = ()
    ) -> None:
        self._pass: Any = replica_pass
        self._model = replica_pass.model
        self._group = replica_pass.group
        self._spec = replica_pass.spec
        self._variables = known = replica_pass.variables
        self._optimizer_variables = optimizer_variables
        parts = known.trainable, known.others, optimizer_variables
        self._local_copies = in_parts(
            self._group.copies([each for part in parts for each in part]), parts
        )
        self._updated: list[Copies] = []

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on each replica's rows of one batch, in cross-replica context."""
        raise NotImplementedError

    def _on_replica(
        self, known: Known, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        raise NotImplementedError

    @property
    def _shares_of_batch(self) -> int:
        return self._group.count

    @property
    def _specs_of_pass(self) -> tuple[Any, ...]:
        """The specs of values, rows and a replica's index."""
        known = self._variables
        values = specs_of(Values(known.trainable, known.others, known.global_seed))
        return values, share_spec(self._spec, self._shares_of_batch), INTEGER

    def _compile(self, pass_also: Sequence[Any] = (), update_also: Sequence[Any] = ()) -> None:
        """Trace the pass, and the update for the layout that it has; the specs say what both take.

        A pass takes values, rows and a replica's index, an update values and what was summed.
        """
        if self._model.run_eagerly:
            self._run_pass = called_directly(self._pass.run)
            self._update = called_directly(self._pass.update)
            return
        jit = bool(self._model.jit_compile)
        specs = self._specs_of_pass
        self._run_pass = run = TracedPass(self._pass.run, (*specs, *pass_also), jit)
        if jit:
            refuse_elsewhere(run.graph, self._group)
        outcome = run.graph.structured_outputs
        summed = specs_of(outcome.packs), [rows_spec(gradient) for gradient in outcome.slices]
        update = functools.partial(self._pass.update, run.layout)
        compiled = traced(update, (specs[0], *summed, *update_also), jit)
        self._update = lambda layout, *tensors: compiled(*tensors)

    def _size(self, shares: Sequence[Rows]) -> Any:
        """The global batch size, an integer where Keras's step would know it."""
        total = shares[0].global_batch_size
        return batch_size_of(self._spec) or (int(total) if self._model.run_eagerly else total)

    def _run(self, shares: Sequence[Rows]) -> list[Result]:
        """Run the replicas of this process; their results."""
        if self._group.is_spread and not those_here(shares):
            require_same_batch(self._group, shares)
        own = [shares[replica.id] for replica in self._group.replicas]
        self._group.count_moved("copied", [rows.data for rows in own])
        global_seed = tf.convert_to_tensor(self._variables.global_seed)
        copies = [each for part in self._local_copies for each in part]

        def on_replica(replica: Replica) -> Result:
            rows = own[replica.place]
            values = self._group.read(copies, replica)
            trainable, others, of_optimizer = in_parts(values, self._local_copies)
            with rows_noted(rows):
                known = Values(trainable, others, global_seed), of_optimizer
                return self._on_replica(known, rows, replica, shares)

        return self._group.run(on_replica)

    def _assign(self, results: list[Result]) -> None:
        others = [*results[0].layout.changed, *self._variables.seeds]
        places = [*self._updated, *(self._local_copies[1][index] for index in others)]
        for replica, (update, outcome, *_) in zip(self._group.replicas, results, strict=True):
            new = [*update.trainable, *update.optimizer, *update.others, *outcome.seeds]
            self._group.assign(places, new, replica)
        self._variables.global_seed.assign(results[0].outcome.global_seed)

    def _predictions(self, results: list[Result]) -> Any:
        """All replicas' predictions as one batch, in the order of the examples."""
        outcomes = [result.outcome for result in results]
        leaves, attached = keras.tree.flatten(outcomes[0].y_pred), outcomes[0].attached
        if self._group.count > 1:
            self._refuse_computed(results)
            counts = results[0].layout.counts
            everything = joined(
                [[*keras.tree.flatten(each.y_pred), *each.attached] for each in outcomes],
                [result.examples for result in results],
                [*counts, *(count for count in counts for _ in range(2))],
                self._group,
            )
            leaves, attached = everything[: len(counts)], everything[len(counts) :]
        model_internals.attach(leaves, attached)
        return keras.tree.pack_sequence_as(outcomes[0].y_pred, leaves)

    def _refuse_computed(self, results: list[Result]) -> None:
        """Raise a `ValueError` for outputs that relate rows, which without a graph differ."""
        if tf.executing_eagerly() and self._group.count > 1:
            parts = [keras.tree.flatten(result.outcome.y_pred) for result in results]
            refuse_computed(results[0].layout.counts, parts)

    def _whole(self, shares: Sequence[Rows], results: list[Result]) -> tuple[Batch, Any]:
        batch, y_pred = self._global_batch(shares), self._predictions(results)
        if not self._model.run_eagerly:
            self._pass.metrics.build_for(batch, y_pred)
        return batch, y_pred

    def _global_batch(self, shares: Sequence[Rows]) -> Batch:
        """The global batch, of which processes that have read their own rows get the others'."""
        if not those_here(shares):
            return gathered(shares, self._spec)
        own = [self._exchanged(shares[replica.id]) for replica in self._group.replicas]
        batch: Batch = filled(own[0], self._group.joined([present(each) for each in own]))
        return batch

    def _exchanged(self, rows: Rows) -> Batch:
        """What others need of a replica's rows: inputs only where the model's own code asks."""
        x, y, sample_weight = first_rows(rows.data, rows.examples)
        own = model_internals.overridden(self._model, "compute_loss", "compute_metrics")
        return x if own else None, y, sample_weight

    def _whole_if_needed(self, shares: Sequence[Rows], results: list[Result]) -> tuple[Batch, Any]:
        """The same where metrics need it; what is odd is refused."""
        if results[0].layout.metrics.gathered:
            return self._whole(shares, results)
        self._refuse_computed(results)
        return (None, None, None), None

    def _logs(
        self,
        shares: Sequence[Rows],
        results: list[Result],
        losses: Sequence[tf.Tensor],
        whole: tuple[Batch, Any],
    ) -> dict[str, Any]:
        """Update all metrics, once; the logs.

        The losses are the loss, and the single ones of which it is made, if these are known. The
        whole batch and its predictions are there where metrics need them.
        """
        loss, *parts = losses
        size = self._size(shares)
        weight = size if isinstance(size, int) else None
        compiled = compile_internals.compile_loss(self._model)
        with graph_internals.single_device(), tf.device(self._group.hub):
            # As Keras's `CompileLoss` weighs them: by the batch size where it is static.
            for metric, part in zip(compiled.metrics if compiled else (), parts, strict=False):
                metric.update_state(part, sample_weight=weight)
            compile_internals.loss_tracker(self._model).update_state(loss, sample_weight=size)
            layout, totals = results[0].layout, results[0].update.metrics
            return self._pass.metrics.logs(layout.metrics, totals, *whole)


class UpdatingStep(Step):
    """What the two training steps have in common: sums, an update, and probes around them."""

    def __init__(self, replica_pass: TrainingPass, probes: Sequence[Probe] = ()) -> None:
        super().__init__(replica_pass, replica_pass.optimizer_variables)
        self._probes = list(probes)
        self._timed = any(probe.timed for probe in probes)
        self._update = replica_pass.update
        self._updated = [*self._local_copies[0], *self._local_copies[2]]

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Train on one global batch; the logs so far in this epoch."""
        for probe in self._probes:
            probe.before_step()
        results = self._run(shares)
        whole = self._whole_if_needed(shares, results)
        # Nothing happens before every replica has computed its new values, so that a step that
        # fails, because memory runs out for example, leaves nothing half done. A control
        # dependency on the call itself would not wait for a pure function's results.
        with tf.control_dependencies([tf.identity(result.update.done) for result in results]):
            allowed = self._verdict(results) if self._probes else None
            if allowed is None:
                self._assign(results)
                return self._tracked(shares, results, whole)
            tf.cond(allowed, lambda: self._assigned(results), lambda: False)
            with graph_internals.single_device():
                if whole[1] is not None:
                    self._pass.metrics.build_for(*whole)
                before = [tf.convert_to_tensor(v) for v in self._model.metrics_variables]
            logs = self._tracked(shares, results, whole)
            return self._kept(logs, before, allowed)

    def _assigned(self, results: list[Result]) -> bool:
        self._assign(results)
        return True

    def _verdict(self, results: list[Result]) -> tf.Tensor | None:
        """Whether all probes allow the step, which see all replicas and so decide alike."""
        flat = self._group.everyones([tf.nest.flatten(result.measured) for result in results])
        measured = [tf.nest.pack_sequence_as(results[0].measured, tensors) for tensors in flat]
        with tf.device(self._group.hub):
            allowed = verdict(self._probes, measured)
            collect(self._probes, measured, allowed)
        return allowed

    def _tracked(
        self, shares: Sequence[Rows], results: list[Result], whole: tuple[Batch, Any]
    ) -> dict[str, Any]:
        """Update all metrics; the logs."""
        return self._logs(shares, results, results[0].update.losses, whole)

    def _kept(self, logs: dict[str, Any], before: list[Any], allowed: tf.Tensor) -> dict[str, Any]:
        """Metrics and logs as they were before, where the step was not allowed."""
        with graph_internals.single_device():
            for variable, value in zip(self._model.metrics_variables, before, strict=True):
                variable.assign(tf.where(allowed, tf.convert_to_tensor(variable), value))
            earlier = self._model.get_metrics_result()

        def chosen(name: str, value: Any) -> Any:
            if name not in earlier:
                return value
            return keras.tree.map_structure(
                lambda new, old: tf.where(allowed, new, tf.cast(old, new.dtype)),
                value,
                earlier[name],
            )

        return {name: chosen(name, value) for name, value in logs.items()}

    def _started(self, rows: Rows) -> tuple[Rows, tf.Tensor | None]:
        """The rows, and when a replica has them, if a probe wants to know."""
        if not self._timed:
            return rows, None
        x, *others = rows.data
        started = now_that(tensors_of(x))
        # Otherwise the time is taken when a thread has nothing else to do. Only the inputs wait
        # for it: to let targets and variables wait as well makes the step slower.
        return rows._replace(data=(held_until(started, x), *others)), started

    def _completed(
        self,
        values: Known,
        rows: Rows,
        replica: Replica,
        made: tuple[Outcome, Layout],
        started: tf.Tensor | None,
        whole_loss: tf.Tensor | None = None,
    ) -> Result:
        """Sum what the pass of a replica returned over all replicas, and compute the update."""
        outcome, layout = made
        computed, own = None, outcome.packs
        if self._timed:
            computed = now_that(all_summed(outcome.packs, outcome.slices))
            # Sums that go on beside the pass hold nobody up; only what is summed after it counts.
            own = [*own[:-1], *held_until(computed, own[-1:])]
        packs = layout.packing.summed(own, self._group.sum)
        slices = [
            rows_of_all(self._group, gradient, rows.examples > 0) for gradient in outcome.slices
        ]
        reduced = now_that(all_summed(packs, slices)) if self._timed else None
        update = self._update(layout, values[0], packs, slices, values[1])
        if not self._probes:
            return Result(update, outcome, layout, rows.examples)
        seen = Seen(
            replica=replica.id,
            replicas=self._group.count,
            rows=rows,
            variables=self._variables.trainable,
            outcome=outcome,
            layout=layout,
            packs=packs,
            slices=slices,
            update=update,
            scale=loss_scale(self._model.optimizer, self._optimizer_variables, values[1]),
            whole_loss=whole_loss,
            times=Times(started, computed, reduced) if self._timed else None,
        )
        measured = [probe.on_replica(seen) for probe in self._probes]
        return Result(update, outcome, layout, rows.examples, measured)


class TrainStep(UpdatingStep):
    """A training step whose losses are sums over examples."""

    def __init__(self, replica_pass: TrainingPass, probes: Sequence[Probe] = ()) -> None:
        super().__init__(replica_pass, probes)
        self._compile((SCALAR,), (specs_of(self._optimizer_variables),))

    def _on_replica(
        self, known: Known, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        values, of_optimizer = known
        rows, started = self._started(rows)
        scale = loss_scale(self._model.optimizer, self._optimizer_variables, of_optimizer)
        made = self._run_pass(values, rows, tf.constant(replica.id), scale)
        return self._completed(known, rows, replica, made, started)


def in_parts(flat: Sequence[Any], parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A list in parts as long as these."""
    rest = iter(flat)
    return [list(itertools.islice(rest, len(part))) for part in parts]


def computed_loss(model: keras.Model, batch: Batch, y_pred: Any, training: bool) -> tf.Tensor:
    """`model.compute_loss` of a global batch; a Python number too becomes a float tensor."""
    x, y, sample_weight = batch
    loss = compile_internals.compute_loss(model, x, y, y_pred, sample_weight, training)
    loss = tf.convert_to_tensor(loss)
    return loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())


def refuse_elsewhere(graph: Any, group: ReplicaGroup) -> None:
    """Raise a `ValueError` where XLA would have to read a variable on another device."""
    devices = {tf.DeviceSpec.from_string(replica.device) for replica in group.replicas}
    captured = {id(outside) for outside, _ in graph.captures}
    for variable in graph.variables:
        is_here = {tf.DeviceSpec.from_string(variable.device)} == devices
        if id(variable.handle) in captured and not is_here:
            raise value_error(
                "A `tf.Variable` is read inside a `tf.function` in a step that XLA compiles.",
                "Expected a `keras.Variable`, which each replica has on its own device.",
                "Make it with `self.add_weight(..., trainable=False)`, or compile the model with "
                "`jit_compile=False`.",
                variable=variable.name,
            )
