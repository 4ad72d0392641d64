"""The usual step: losses that are sums over examples, and evaluation."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.exchange.sparse_gradients import rows_spec
from keras_multigpu.training.replica_group import Replica
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.passes import EvaluationPass
from keras_multigpu.training.replica_pass.passes import TrainingPass
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.replica_pass.pure_model import require_no_weights
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.step import INTEGER
from keras_multigpu.training.steps.step import SCALAR
from keras_multigpu.training.steps.step import Result
from keras_multigpu.training.steps.step import Step
from keras_multigpu.training.steps.step import computed_loss
from keras_multigpu.training.steps.updating_step import UpdatingStep
from keras_multigpu.training.tracing import TracedPass
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.update.optimizer_update import loss_scale
from keras_multigpu.training.variables.caught_assignments import CatchingScope


class TrainStep(UpdatingStep):
    """A training step whose losses are sums over examples.

    Args:
        count_divisors: Whether a loss has a mask or a sum of sample weights to divide by,
            which the replicas then count first.
    """

    def __init__(
        self,
        model: keras.Model,
        group: ReplicaGroup,
        spec: Batch,
        replica_pass: TrainingPass,
        count_divisors: bool = False,
        probes: Sequence[Probe] = (),
    ) -> None:
        super().__init__(model, group, spec, replica_pass, probes)
        specs = (self._values_spec, self._rows_spec, INTEGER)
        self._count, divisors = None, None
        if count_divisors:
            self._count = self._compiled(replica_pass.count, *specs)
            divisors = specs_of(getattr(self._count, "structured_outputs", None))
        self._run_pass = self._compiled_pass(replica_pass.run, *specs, divisors, SCALAR)
        outcome = outcome_specs(self._run_pass)
        self._update = self._compiled_update(
            replica_pass.update,
            self._values_spec,
            specs_of(self._optimizer_variables),
            specs_of(outcome.packs if outcome else None),
            [rows_spec(gradient) for gradient in outcome.slices] if outcome else None,
        )

    def _tracked(
        self, shares: Sequence[Rows], results: list[Result], whole: tuple[Any, Any]
    ) -> dict[str, Any]:
        return self._logs(shares, results, results[0].update.losses, whole)

    def _on_replica(
        self, values: Values, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        index = tf.constant(replica.id)
        optimizer_values = self._group.read(self._optimizer, replica)
        rows, started = self._start(rows)
        own, divisors = None, None
        if self._count is not None:
            own = self._count(values, rows, index)
            divisors = self._group.sum(own)
        scale = loss_scale(self._model.optimizer, optimizer_values)
        made = self._run_pass(values, rows, index, divisors, scale)
        part = self._part(rows, made[1].reductions, own, divisors)
        return self._completed((values, optimizer_values), rows, replica, made, started, part)

    def _part(self, rows: Rows, reductions: list[str], own: Any, divisors: Any) -> tf.Tensor:
        """How much of what the loss is divided by is the replica's own."""
        if reductions and set(reductions) == {"sum"}:
            return tf.cast(rows.examples > 0, tf.float32)
        if divisors and len(reductions) == 1:
            return tf.math.divide_no_nan(own[0], divisors[0])
        return rows.fraction


class EvaluationStep(Step):
    """A step of `evaluate` or `predict`.

    Args:
        whole: Whether the loss is computed once, from all predictions, and not in the pass.
    """

    def __init__(
        self,
        model: keras.Model,
        group: ReplicaGroup,
        spec: Batch,
        replica_pass: EvaluationPass,
        whole: bool = False,
    ) -> None:
        super().__init__(model, group, spec, replica_pass)
        self._whole = whole
        self._run_pass = self._compiled_pass(
            replica_pass.run, self._values_spec, self._rows_spec, INTEGER
        )
        outcome = outcome_specs(self._run_pass)
        self._update = self._compiled_update(
            replica_pass.update, self._values_spec, specs_of(outcome.packs if outcome else None)
        )

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Evaluate one global batch; the logs so far."""
        results = self._run(shares)
        self._assign(results)
        losses = results[0].update.losses
        if not self._whole:
            whole = self._gathered_if_needed(shares, results)
            return self._logs(shares, results, losses, whole)
        batch, y_pred = self._batch_of(shares), self._gathered(results)
        if not self._model.run_eagerly:
            self._pass.metrics.build_for(batch, y_pred)
        with tf.device(self._group.hub):
            loss = whole_loss(self._model, batch, y_pred, losses, self._group)
        return self._logs(shares, results, [loss], (batch, y_pred))

    def predict(self, shares: Sequence[Rows]) -> Any:
        """The predictions for one global batch."""
        results = self._run(shares)
        self._assign(results)
        return self._gathered(results)

    def _on_replica(
        self, values: Values, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        outcome, layout = self._run_pass(values, rows, tf.constant(replica.id))
        packs = layout.packing.summed(outcome.packs, self._group.sum)
        update = self._update(layout, values, packs)
        return Result(update, outcome, layout, rows.examples)


def outcome_specs(run_pass: Any) -> Any:
    """What a compiled pass returns; None without a graph."""
    return run_pass.graph.structured_outputs if isinstance(run_pass, TracedPass) else None


def whole_loss(
    model: keras.Model,
    batch: Batch,
    y_pred: Any,
    added_losses: list[tf.Tensor],
    group: ReplicaGroup,
) -> tf.Tensor:
    """`model.compute_loss` of a global batch in inference, as one device computes it.

    What it assigns is assigned on all replicas.
    """
    with keras_internals.single_device():
        # Keras takes the penalties of weights from the scope.
        weights = model.trainable_variables
        with CatchingScope(weights, [tf.convert_to_tensor(v) for v in weights]) as scope:
            keras_internals.tracked_losses(model, added_losses)
            loss = computed_loss(model, batch, y_pred, training=False)
        require_no_weights(model, scope)
        assigned = list(scope.assigned.values())
        values = [scope.get_current_value(variable) for variable in assigned]
        for replica in group.replicas:
            group.assign(group.copies(assigned), values, replica)
    return loss
