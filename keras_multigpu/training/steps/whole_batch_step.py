"""Training steps for losses that are not sums over examples.

A contrastive loss, a Dice loss, a `compute_loss` of the user's own: their value depends on
the batch as a whole, so no arithmetic on replicas' losses yields it. Here the predictions
of all replicas are gathered, every replica computes the loss of the global batch as one
device would, and each takes back the gradient of its own rows.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.keras_internals import graph_internals, model_internals
from keras_multigpu.training.replica_group import Replica
from keras_multigpu.training.replica_pass.loss_reduction import refuse_ragged
from keras_multigpu.training.replica_pass.output_rows import (
    refuse_several_rows,
    rows_for_each,
    rows_per_example,
)
from keras_multigpu.training.replica_pass.passes import (
    Made,
    Summands,
    TrainingPass,
    connected,
    with_attached,
)
from keras_multigpu.training.replica_pass.pure_model import (
    Forward,
    PureModel,
    Values,
    loss_trackers,
)
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    filled,
    first_rows,
    gathered,
    present,
    rows_count,
    symbolic,
    those_here,
)
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.step import Known, Result, UpdatingStep, computed_loss
from keras_multigpu.training.update import loss_scale


class WholeBatchTrainStep(UpdatingStep):
    """A training step that computes the loss from all predictions."""

    def __init__(self, replica_pass: TrainingPass, probes: Sequence[Probe] = ()) -> None:
        super().__init__(replica_pass, probes)
        model, spec = replica_pass.model, replica_pass.spec
        if not model.run_eagerly:
            with graph_internals.single_device():
                y_pred = model_internals.symbolic_call(model, symbolic(spec[0]))
                counts = rows_per_example(model, spec[0]) if self._group.count > 1 else []
                refuse_several_rows(keras.tree.flatten(y_pred), counts)
            # Their variables, before the replicas are traced.
            self._pass.metrics.build(y_pred)

    def _tracked(
        self, shares: Sequence[Rows], results: list[Result], whole: tuple[Batch, Any]
    ) -> dict[str, Any]:
        with graph_internals.single_device():
            trackers = results[0].trackers
            for variable, value in zip(loss_trackers(self._model), trackers, strict=True):
                variable.assign(value)
        return super()._tracked(shares, results, whole)

    def _on_replica(
        self, known: Known, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        # Traced for each replica, because the replicas meet in the middle of it.
        group, index = self._group, tf.constant(replica.id)
        values, of_optimizer = known
        rows, started = self._started(rows)
        start = self._variables.seeded(values, index)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(start.trainable)
            forward = self._forward(start, rows)
            predictions = with_attached(forward.y_pred)
            own = present(first_rows(predictions, rows.examples))
            added = [tf.where(rows.examples > 0, loss, 0.0) for loss in forward.added_losses]
        everyones = filled(predictions, group.gather(own))
        common = self._variables.agreed(start, forward.end, rows, index, group.sum)
        batch = self._batch_on_replica(rows, shares)
        whole = WholeLoss(self._pass.pure, batch, common, everyones, group.sum(added))
        whole.compute(loss_scale(self._model.optimizer, self._optimizer_variables, of_optimizer))

        first, last = share_bounds(self._size(shares), replica.id, group.count)
        arriving = [g if g is None else g[first:last] for g in whole.of_predictions]
        arriving += whole.of_added
        targets = [t for t, g in zip(own + added, arriving, strict=True) if g is not None]
        arriving = [gradient for gradient in arriving if gradient is not None]
        # What recomputes a layer's outputs (`keras.remat`) calls it again in here.
        with self._pass.context(rows):
            back = tape.gradient(targets, start.trainable, arriving)
        gradients = [
            total(gradient, direct, rows.fraction)
            for gradient, direct in zip(back, whole.of_trainable, strict=True)
        ]
        seen = self._pass.seen(rows, forward)
        gradients, kinds = connected(gradients, self._variables.trainable, back)
        summands = Summands([], [], seen.summands, gradients)
        made = self._pass.outcome(
            Made(summands, forward.end, seen, kinds, rows.fraction), start, rows, index
        )
        result = self._completed(known, rows, replica, made, started, whole.loss)
        return self._with_whole(result, values, whole)

    def _batch_on_replica(self, rows: Rows, shares: Sequence[Rows]) -> Batch:
        """The global batch, as `_global_batch`, where all replicas meet."""
        if not those_here(shares):
            return gathered(shares, self._spec)
        own = self._exchanged(rows)
        batch: Batch = filled(own, self._group.gather(present(own)))
        return batch

    def _forward(self, start: Values, rows: Rows) -> Forward:
        """The forward pass of a replica, whose predictions all others can be given."""
        with self._pass.context(rows), self._pass.pure.forward(start, rows, True) as forward:
            refuse_ragged(forward.y_pred, self._group.count)
        if self._group.count > 1 and tf.executing_eagerly():
            leaves, size = keras.tree.flatten(forward.y_pred), rows_count(rows)
            refuse_several_rows(leaves, [rows_for_each(leaf, size) for leaf in leaves])
        return forward

    def _with_whole(self, result: Result, values: Values, whole: "WholeLoss") -> Result:
        """A result with the loss of the whole batch, and the values of variables after it."""
        changed = self._variables.changed(values, whole.end)
        others = [whole.end.others[index] for index in changed]
        with tf.control_dependencies([result.update.done, *others]):
            update = result.update._replace(others=others, losses=[whole.loss], done=tf.zeros(()))
        seeds, global_seed = self._variables.seeds_in(whole.end)
        return result._replace(
            update=update,
            outcome=result.outcome._replace(seeds=seeds, global_seed=global_seed),
            layout=result.layout._replace(changed=changed),
            trackers=whole.trackers,
        )


class WholeLoss:
    """The loss of a global batch and its gradients, computed by each replica alike.

    The values are those of the model's variables, with the seeds of one device. The losses that
    layers have added are summed over replicas.
    """

    def __init__(
        self,
        pure: PureModel,
        batch: Batch,
        values: Values,
        predictions: tuple[Any, list[Any]],
        added_losses: list[tf.Tensor],
    ) -> None:
        self._pure = pure
        self._batch = batch
        self._values = values
        self._y_pred, attached = predictions
        model_internals.attach(keras.tree.flatten(self._y_pred), attached)
        self._outputs = present(predictions)
        self._added = [tf.identity(loss) for loss in added_losses]

    def compute(self, scale: tf.Tensor) -> None:
        """Compute the loss, the trackers of single losses, new values, and all gradients."""
        predictions, trainable = self._outputs, list(self._values.trainable)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*predictions, *self._added, *trainable])
            with graph_internals.single_device():
                self._compute()
            scaled = self.loss * tf.cast(scale, self.loss.dtype)
        self.of_predictions, self.of_added, self.of_trainable = tape.gradient(
            scaled, [predictions, self._added, trainable]
        )
        self.of_predictions = dense(self.of_predictions)
        self.of_added = dense(self.of_added)

    def _compute(self) -> None:
        model = self._pure.model
        with self._pure.whole_scope(self._values) as scope:
            model_internals.tracked_losses(model, self._added)
            self.loss = computed_loss(model, self._batch, self._y_pred, training=True)
            self.end = self._pure.new_values(scope, self._values)
        self.trackers = [
            tf.convert_to_tensor(variable) if value is None else value
            for variable in loss_trackers(model)
            for value in [scope.get_current_value(variable)]
        ]


def dense(gradients: list[Any]) -> list[Any]:
    """Gradients as dense tensors, or ragged as what they are of; None where there is none."""
    as_they_are = type(None), tf.RaggedTensor
    return [g if isinstance(g, as_they_are) else tf.convert_to_tensor(g) for g in gradients]


def total(through_model: Any, direct: Any, fraction: tf.Tensor) -> Any:
    """A variable's gradient: by way of predictions, and directly as in a regulariser."""
    # The direct part is the same on all replicas, so each adds its fraction of it.
    if direct is None:
        return through_model
    direct = tf.convert_to_tensor(direct) * tf.cast(fraction, direct.dtype)
    return direct if through_model is None else tf.convert_to_tensor(through_model) + direct
