"""What training steps have in common: sums over replicas, an update, and probes around them."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.exchange.sparse_gradients import rows_of_all
from keras_multigpu.training.replica_group import Replica
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.layout import Layout
from keras_multigpu.training.replica_pass.passes import Outcome
from keras_multigpu.training.replica_pass.passes import TrainingPass
from keras_multigpu.training.replica_pass.passes import Update
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.probes import Seen
from keras_multigpu.training.steps.probes import Times
from keras_multigpu.training.steps.probes import all_summed
from keras_multigpu.training.steps.probes import collect
from keras_multigpu.training.steps.probes import now_that
from keras_multigpu.training.steps.probes import verdict
from keras_multigpu.training.steps.step import Result
from keras_multigpu.training.steps.step import Step
from keras_multigpu.training.steps.step import after_all
from keras_multigpu.training.tracing import held_until
from keras_multigpu.training.tracing import tensors_of
from keras_multigpu.training.update.adjusted_schedule import state_of
from keras_multigpu.training.update.optimizer_update import loss_scale


class UpdatingStep(Step):
    """What the two training steps have in common: sums, an update, and probes around them.

    Args:
        probes: What callbacks want to know; see `probes`.
    """

    def __init__(
        self,
        model: keras.Model,
        group: ReplicaGroup,
        spec: Batch,
        replica_pass: TrainingPass,
        probes: Sequence[Probe],
    ) -> None:
        super().__init__(model, group, spec, replica_pass)
        self._probes = list(probes)
        self._timed = any(probe.timed for probe in probes)
        self._update: Callable[..., Update] = replica_pass.update
        self._optimizer_variables = state_of(model.optimizer)
        self._optimizer = group.copies(self._optimizer_variables)

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Train on one global batch; the logs so far in this epoch."""
        for probe in self._probes:
            probe.before_step()
        results = self._run(shares)
        whole = self._gathered_if_needed(shares, results)
        with after_all(results):
            measured = self._measured(results)
            with tf.device(self._group.hub):
                allowed = verdict(self._probes, measured)
                collect(self._probes, measured, allowed)
            if allowed is None:
                self._assign(results)
                return self._tracked(shares, results, whole)
            tf.cond(allowed, lambda: self._assigned(results), lambda: False)
            with keras_internals.single_device():
                if whole[1] is not None:
                    self._pass.metrics.build_for(*whole)
                before = [tf.convert_to_tensor(v) for v in self._model.metrics_variables]
            logs = self._tracked(shares, results, whole)
            return self._kept(logs, before, allowed)

    def _assign(self, results: list[Result]) -> None:
        for replica, result in zip(self._group.replicas, results, strict=True):
            self._group.assign(self._trainable, result.update.trainable, replica)
            self._group.assign(self._optimizer, result.update.optimizer, replica)
        super()._assign(results)

    def _measured(self, results: list[Result]) -> list[list[list[tf.Tensor]]]:
        """What probes have measured on all replicas, so that they decide alike everywhere."""
        flat = self._group.everyones([tf.nest.flatten(result.measured) for result in results])
        return [tf.nest.pack_sequence_as(results[0].measured, tensors) for tensors in flat]

    def _assigned(self, results: list[Result]) -> bool:
        self._assign(results)
        return True

    def _tracked(
        self, shares: Sequence[Rows], results: list[Result], whole: tuple[Any, Any]
    ) -> dict[str, Any]:
        """Update all metrics; the logs."""
        raise NotImplementedError

    def _kept(self, logs: dict[str, Any], before: list[Any], allowed: tf.Tensor) -> dict[str, Any]:
        """Metrics and logs as they were before, where the step was not allowed."""
        with keras_internals.single_device():
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

    def _completed(
        self,
        values: tuple[Values, list[tf.Tensor]],
        rows: Rows,
        replica: Replica,
        made: tuple[Outcome, Layout],
        started: tf.Tensor | None,
        part: tf.Tensor,
        whole_loss: tf.Tensor | None = None,
    ) -> Result:
        """Sum what the pass of a replica returned over all replicas, and compute the update."""
        outcome, layout = made
        computed, own = None, outcome.packs
        if self._timed:
            computed = now_that(all_summed(outcome.packs, outcome.slices))
            # Sums that are under way meanwhile are none that anybody waits for.
            own = [*own[:-1], *held_until(computed, own[-1:])]
        packs = layout.packing.summed(own, self._group.sum)
        slices = [
            rows_of_all(self._group, gradient, rows.examples > 0) for gradient in outcome.slices
        ]
        reduced = now_that(all_summed(packs, slices)) if self._timed else None
        update = self._update(layout, *values, packs, slices)
        if not self._probes:
            return Result(update, outcome, layout, rows.examples)
        seen = Seen(
            replica=replica.id,
            replicas=self._group.count,
            rows=rows,
            variables=self._pass.pure.trainable,
            outcome=outcome,
            layout=layout,
            packs=packs,
            slices=slices,
            update=update,
            scale=loss_scale(self._model.optimizer, values[1]),
            part=part,
            whole_loss=whole_loss,
            times=Times(started, computed, reduced) if self._timed else None,
        )
        measured = [probe.on_replica(seen) for probe in self._probes]
        return Result(update, outcome, layout, rows.examples, measured)

    def _start(self, rows: Rows) -> tuple[Rows, tf.Tensor | None]:
        """The rows, and when a replica has them, if a probe wants to know."""
        if not self._timed:
            return rows, None
        x, *others = rows.data
        started = now_that(tensors_of(x))
        # Otherwise the time is taken when a thread has nothing else to do. Only the inputs wait
        # for it: to let targets and variables wait as well makes the step slower.
        return rows._replace(data=(held_until(started, x), *others)), started
