"""One step on N replicas, as a function of their shares of a batch.

                     shares ──> forward and backward ──> sum ──> update ──> new values
                     a replica  a pure function,         over    a pure     assigned on
                     each       traced once              them    function   each replica

The two pure functions are traced once and called for every replica on its device. What the rows
add to metrics is in the sum; metrics that are not sums over examples are updated with the global
batch and its predictions, gathered.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.exchange.sparse_gradients import distinct_rows_noted
from keras_multigpu.training.replica_group import Replica
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.layout import Layout
from keras_multigpu.training.replica_pass.output_rows import Counts
from keras_multigpu.training.replica_pass.output_rows import joined
from keras_multigpu.training.replica_pass.output_rows import refuse_computed
from keras_multigpu.training.replica_pass.output_rows import refuse_several_rows
from keras_multigpu.training.replica_pass.output_rows import rows_per_example
from keras_multigpu.training.replica_pass.passes import Outcome
from keras_multigpu.training.replica_pass.passes import ReplicaPass
from keras_multigpu.training.replica_pass.passes import Update
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.shares import gathered
from keras_multigpu.training.shares import share_spec
from keras_multigpu.training.steps.same_batch import require_same_batch
from keras_multigpu.training.tracing import TracedPass
from keras_multigpu.training.tracing import called_directly
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import symbolic
from keras_multigpu.training.tracing import traced

SCALAR = tf.TensorSpec((), tf.float32)
INTEGER = tf.TensorSpec((), tf.int32)


class Result(NamedTuple):
    """What one replica hands back to the step."""

    update: Update
    outcome: Outcome
    layout: Layout
    examples: tf.Tensor
    measured: list[list[tf.Tensor]] = []
    trackers: list[tf.Tensor] = []


class Step:
    """What training, evaluation and prediction steps have in common.

    Args:
        model: The model, built and placed.
        group: Its replicas.
        spec: The specs of a global batch.
        replica_pass: The pass that each replica runs over its rows.
    """

    def __init__(
        self,
        model: keras.Model,
        group: ReplicaGroup,
        spec: Batch,
        replica_pass: ReplicaPass,
    ) -> None:
        self._model = model
        self._group = group
        self._pass: Any = replica_pass
        self._run_pass: Any = None
        self._spec = spec
        self._rows_spec = share_spec(spec, group.count)
        pure = replica_pass.pure
        self._values_spec = Values(
            specs_of(pure.trainable),
            specs_of(pure.others),
            specs_of(pure.global_seed),
        )
        self._trainable = group.copies(pure.trainable)
        self._others = group.copies(pure.others)

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on each replica's rows of one batch, in cross-replica context."""
        raise NotImplementedError

    def _on_replica(
        self, values: Values, rows: Rows, replica: Replica, shares: Sequence[Rows]
    ) -> Result:
        raise NotImplementedError

    def _compiled(self, function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return called_directly(function)
        return traced(function, specs, bool(self._model.jit_compile))

    def _compiled_pass(self, function: Callable[..., Any], *specs: Any) -> Any:
        if self._model.run_eagerly:
            return called_directly(function)
        return TracedPass(function, specs, bool(self._model.jit_compile))

    def _compiled_update(self, function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        """The update, compiled for the layout of a compiled pass; see `_compiled_pass`."""
        if self._model.run_eagerly:
            return called_directly(function)
        compiled = self._compiled(functools.partial(function, self._run_pass.layout), *specs)
        return lambda layout, *tensors: compiled(*tensors)

    def _values(self, replica: Replica, global_seed: tf.Tensor) -> Values:
        read = self._group.read
        return Values(read(self._trainable, replica), read(self._others, replica), global_seed)

    def _batch_of(self, shares: Sequence[Rows]) -> Batch:
        """The global batch, for what cannot be computed from the replicas' rows alone."""
        return gathered(shares, self._spec)

    def _size_of(self, shares: Sequence[Rows]) -> Any:
        """The global batch size, an integer where it is known."""
        size = batch_size_of(self._spec)
        total = shares[0].global_batch_size
        return size or (int(total) if tf.executing_eagerly() else total)

    def _run(self, shares: Sequence[Rows]) -> list[Result]:
        """Run the replicas of this process; their results."""
        require_same_batch(self._group, shares)
        global_seed = tf.convert_to_tensor(self._pass.pure.global_seed)

        def on_replica(replica: Replica) -> Result:
            rows = shares[replica.id]
            self._group.count_moved("copied", rows.data)
            with distinct_rows_noted():
                return self._on_replica(self._values(replica, global_seed), rows, replica, shares)

        return self._group.run(on_replica)

    def _assign(self, results: list[Result]) -> None:
        """Give the variables that every pass may change their new values."""
        changed = [self._others[index] for index in results[0].layout.changed]
        seeds = [self._others[index] for index in self._pass.seed_indices]
        for replica, result in zip(self._group.replicas, results, strict=True):
            self._group.assign(changed, result.update.others, replica)
            self._group.assign(seeds, result.outcome.seeds, replica)
        self._pass.pure.global_seed.assign(results[0].outcome.global_seed)

    def _gathered(self, results: list[Result]) -> Any:
        """All replicas' predictions as one batch, in the order of the examples."""
        outcomes = [result.outcome for result in results]
        parts = [keras.tree.flatten(outcome.y_pred) for outcome in outcomes]
        leaves, attached = parts[0], outcomes[0].attached
        if self._group.count > 1:
            examples = [result.examples for result in results]
            counts = self._rows_per_example(parts, examples[0])
            everything = joined(
                [[*part, *outcome.attached] for part, outcome in zip(parts, outcomes, strict=True)],
                examples,
                [*counts, *(count for count in counts for _ in range(2))],
                self._group,
            )
            leaves, attached = everything[: len(counts)], everything[len(counts) :]
        keras_internals.attach(leaves, attached)
        return keras.tree.pack_sequence_as(outcomes[0].y_pred, leaves)

    def _rows_per_example(self, parts: list[list[Any]], examples: tf.Tensor) -> Counts:
        """How many rows each output has for an example; see `output_rows`."""
        size = int(examples) if tf.executing_eagerly() else batch_size_of(self._rows_spec.data)
        counts = self._pass.counts_of(self._spec[0], parts[0], size)
        if not isinstance(self._run_pass, TracedPass):
            refuse_computed(counts, parts)
        else:
            graph = self._run_pass.graph.graph
            values, rows = (
                len(tf.nest.flatten(spec, expand_composites=True))
                for spec in (self._values_spec, self._rows_spec)
            )
            outputs = keras.tree.flatten(graph.structured_outputs.y_pred)
            refuse_computed(counts, parts, outputs, graph.inputs[values : values + rows])
        return counts

    def _gathered_if_needed(
        self, shares: Sequence[Rows], results: list[Result]
    ) -> tuple[Batch, Any]:
        """The batch and its predictions where metrics need them; what is odd is refused."""
        if results[0].layout.metrics.gathered:
            batch, y_pred = self._batch_of(shares), self._gathered(results)
            if not self._model.run_eagerly:
                self._pass.metrics.build_for(batch, y_pred)
            return batch, y_pred
        parts = [keras.tree.flatten(result.outcome.y_pred) for result in results]
        if self._group.count > 1 and results[0].outcome.y_pred is not None:
            self._rows_per_example(parts, results[0].examples)
        return (None, None, None), None

    def _logs(
        self,
        shares: Sequence[Rows],
        results: list[Result],
        losses: Sequence[tf.Tensor],
        whole: tuple[Batch, Any],
    ) -> dict[str, Any]:
        """Update all metrics, once; the logs.

        Args:
            shares: Each replica's rows.
            results: Those of all replicas, of which each has the sums.
            losses: The loss, and the single losses of which it is made, if they are known.
            whole: The global batch and the predictions for it, where metrics need them.
        """
        loss, *parts = losses
        size = self._size_of(shares)
        compiled = keras_internals.compile_loss(self._model)
        weight = size if isinstance(size, int) else None
        with keras_internals.single_device(), tf.device(self._group.hub):
            # As Keras weighs them.
            for metric, part in zip(compiled.metrics if compiled else (), parts, strict=False):
                metric.update_state(part, sample_weight=weight)
            keras_internals.loss_tracker(self._model).update_state(loss, sample_weight=size)
            layout, totals = results[0].layout, results[0].update.metrics
            return self._pass.metrics.logs(layout.metrics, totals, *whole)

    def _build_metrics(self) -> None:
        """Create the metrics' variables before the replicas are traced."""
        if not self._model.run_eagerly:
            with keras_internals.single_device():
                y_pred = keras_internals.symbolic_call(self._model, symbolic(self._spec[0]))
                self._refuse_odd(y_pred)
            self._pass.metrics.build(y_pred)

    def _refuse_odd(self, y_pred: Any) -> None:
        """Raise a `ValueError` for outputs that a loss of the whole batch cannot be told."""
        counts = rows_per_example(self._model, self._spec[0]) if self._group.count > 1 else []
        refuse_several_rows(keras.tree.flatten(y_pred), counts)


def after_all(results: list[Result]) -> contextlib.AbstractContextManager[None]:
    """Where nothing happens before every replica has computed its new values.

    A step that fails, because memory runs out for example, so leaves nothing half done.
    """
    # A control dependency on the call itself would not wait for a pure function's results.
    return tf.control_dependencies([tf.identity(result.update.done) for result in results])


def computed_loss(model: keras.Model, batch: Batch, y_pred: Any, training: bool) -> tf.Tensor:
    """`model.compute_loss` of a global batch; a Python number too becomes a float tensor."""
    x, y, sample_weight = batch
    loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight, training)
    loss = tf.convert_to_tensor(loss)
    return loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())
