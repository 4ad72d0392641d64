"""The pass and the step of `evaluate` and `predict`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, model_internals
from keras_multigpu.training.replica_group import Replica, ReplicaGroup
from keras_multigpu.training.replica_pass.additive_metrics import AdditiveMetrics
from keras_multigpu.training.replica_pass.passes import (
    Layout,
    Made,
    Outcome,
    ReplicaPass,
    Summands,
    Update,
    complete,
)
from keras_multigpu.training.replica_pass.pure_model import Values, refuse_assigned_optimizer
from keras_multigpu.training.shares import Batch, Rows
from keras_multigpu.training.steps.step import Known, Result, Step, computed_loss
from keras_multigpu.training.variables.catching_scope import CatchingScope

if TYPE_CHECKING:
    from keras_multigpu.training.replication import Replication


class EvaluationPass(ReplicaPass):
    """Forward pass over a replica's rows in inference mode, with the loss or without."""

    def __init__(
        self,
        model: keras.Model,
        replication: "Replication",
        spec: Batch,
        predicts: bool = False,
        has_loss: bool = False,
    ) -> None:
        metrics = None if predicts else AdditiveMetrics(model, spec)
        # Parameter servers and TPUs only train.
        shares = replication.group.count
        super().__init__(model, replication, spec, metrics, not has_loss, shares)
        self._has_loss = has_loss

    def run(self, values: Values, share: Rows, replica: Any) -> tuple[Outcome, Layout]:
        """The pass itself; see `TrainingPass.run`."""
        start = self.variables.seeded(values, replica)
        with self.pure.forward(start, share, False) as forward:
            losses = forward.added_losses
            if self._has_loss:
                losses, _ = self.losses(forward, share, self.of_replicas(share))
        seen = self.seen(share, forward)
        made = Made(Summands(losses, [], seen.summands), forward.end, seen)
        return self.outcome(made, start, share, replica)

    def update(
        self,
        layout: Layout,
        values: Values,
        packs: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
    ) -> Update:
        """The new values of variables that inference changes, and the sums."""
        return complete([], [], layout, values, layout.sums(packs))


class EvaluationStep(Step):
    """A step of `evaluate` or `predict`; its loss may be one of all predictions at once."""

    def __init__(self, replica_pass: EvaluationPass, whole: bool = False) -> None:
        super().__init__(replica_pass)
        self._is_whole = whole
        self._compile()

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Evaluate one global batch; the logs so far."""
        results = self._run(shares)
        self._assign(results)
        losses = results[0].update.losses
        if not self._is_whole:
            return self._logs(shares, results, losses, self._whole_if_needed(shares, results))
        whole = self._whole(shares, results)
        with tf.device(self._group.hub):
            loss = whole_loss(self._model, *whole, losses, self._group)
        return self._logs(shares, results, [loss], whole)

    def predict(self, shares: Sequence[Rows]) -> Any:
        results = self._run(shares)
        self._assign(results)
        return self._predictions(results)

    def _on_replica(
        self, known: Known, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        values, _ = known
        outcome, layout = self._run_pass(values, rows, tf.constant(replica.id))
        packs = layout.packing.summed(outcome.packs, self._group.sum)
        update = self._update(layout, values, packs, outcome.slices)
        return Result(update, outcome, layout, rows.examples)


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
    with graph_internals.single_device():
        # Keras takes the penalties of weights from the scope.
        weights = model.trainable_variables
        values = [tf.convert_to_tensor(weight) for weight in weights]
        with CatchingScope(weights, values, updated=weights) as scope:
            model_internals.tracked_losses(model, added_losses)
            loss = computed_loss(model, batch, y_pred, training=False)
        refuse_assigned_optimizer(model, scope)
        assigned = list(scope.assigned.values())
        values = [scope.get_current_value(variable) for variable in assigned]
        for replica in group.replicas:
            group.assign(group.copies(assigned), values, replica)
    return loss
