"""One step on N replicas, as a function of a global batch.

    global batch ──> shares ──> forward and backward ──> sum ──> update ──> new values
                     a replica  a pure function,         over    a pure     assigned on
                     each       traced once              them    function   each replica
                                        │
                                        └─> predictions, gathered ──> metrics, updated once

The two pure functions are traced once and called for every replica on its device. The
metrics see the global batch, so that any metric yields what it yields on one device.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.optimizer_update import loss_scale
from keras_multigpu.training.passes import EvaluationPass
from keras_multigpu.training.passes import Outcome
from keras_multigpu.training.passes import ReplicaPass
from keras_multigpu.training.passes import TrainingPass
from keras_multigpu.training.passes import Update
from keras_multigpu.training.passes import first_rows
from keras_multigpu.training.passes import one_after_another
from keras_multigpu.training.placement import copies
from keras_multigpu.training.pure_model import Rows
from keras_multigpu.training.pure_model import Values
from keras_multigpu.training.shares import HOST
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.shares import share_of
from keras_multigpu.training.shares import share_spec
from keras_multigpu.training.sparse_gradients import rows_of_all
from keras_multigpu.training.sparse_gradients import rows_spec
from keras_multigpu.training.tracing import called_directly
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import symbolic
from keras_multigpu.training.tracing import traced

Batch = tuple[Any, Any, Any]
"""A global batch: `(x, y, sample_weight)`."""

SCALAR = tf.TensorSpec((), tf.float32)
INTEGER = tf.TensorSpec((), tf.int32)


class Result(NamedTuple):
    """What one replica hands back to the step."""

    update: Update
    outcome: Outcome
    examples: tf.Tensor


class Step:
    """What training, evaluation and prediction steps have in common.

    Args:
        model: The model, built and placed under `strategy`.
        strategy: Its strategy.
        spec: The specs of a global batch.
        replica_pass: The pass that each replica runs over its rows.
        inline: Whether the pass communicates and so must be traced for each replica.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        spec: Batch,
        replica_pass: ReplicaPass,
        inline: bool = False,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        self._pass: Any = replica_pass
        self._inline = inline
        self._hub = strategy.extended.worker_devices[0]
        self._spec = spec
        self._rows_spec = share_spec(spec, self._replicas)
        pure = replica_pass.pure
        self._values_spec = Values(
            specs_of(pure.trainable),
            specs_of(pure.others),
            specs_of(pure.layer_metrics),
            specs_of(pure.global_seed),
        )
        self._trainable = self._copies_of(pure.trainable)
        self._others = self._copies_of(pure.others)

    def __call__(self, batch: Batch) -> Any:
        """Run the step on one global batch, in cross-replica context."""
        raise NotImplementedError

    def _on_replica(self, values: Values, rows: Rows, replica: int, batch: Batch) -> Result:
        raise NotImplementedError

    def _compiled(self, function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        if self._inline:
            return function
        if self._model.run_eagerly:
            return called_directly(function)
        return traced(function, specs, bool(self._model.jit_compile))

    def _copies_of(self, variables: Sequence[keras.Variable]) -> list[tuple[tf.Variable, ...]]:
        return [
            copies(keras_internals.variable_storage(variable), self._strategy)
            for variable in variables
        ]

    def _values(self, replica: int, global_seed: tf.Tensor) -> Values:
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in self._values_spec.layer_metrics]
        return Values(
            read(self._trainable, replica), read(self._others, replica), zeros, global_seed
        )

    def _run(self, batch: Batch) -> list[Result]:
        """Run all replicas; their results."""
        global_seed = tf.convert_to_tensor(self._pass.pure.global_seed)
        results: dict[int, Result] = {}

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            with tf.device(HOST):
                rows = share_of(batch, replica, self._replicas)
            values = self._values(replica, global_seed)
            results[replica] = self._on_replica(values, rows, replica, batch)

        # Results are collected here and not returned, because `run` would wrap each tensor.
        self._strategy.run(on_replica)
        return [results[replica] for replica in sorted(results)]

    def _assign(self, results: list[Result]) -> None:
        """Give the variables that every pass may change their new values."""
        changed = [self._others[index] for index in self._pass.changed_indices]
        seeds = [self._others[index] for index in self._pass.seed_indices]
        for replica, result in enumerate(results):
            assign(changed, result.update.others, replica)
            assign(seeds, result.outcome.seeds, replica)
        self._pass.pure.global_seed.assign(results[0].outcome.global_seed)
        totals = results[0].update.layer_metrics
        for variable, total in zip(self._pass.pure.layer_metrics, totals, strict=True):
            variable.assign_add(total)

    def _gathered(self, results: list[Result]) -> Any:
        """All replicas' predictions as one batch, in the order of the examples."""
        with tf.device(self._hub):
            y_pred, attached = one_after_another(
                [
                    first_rows((outcome.y_pred, outcome.attached), examples)
                    for _, outcome, examples in results
                ]
            )
        keras_internals.attach(keras.tree.flatten(y_pred), attached)
        return y_pred

    def _logs(self, batch: Batch, loss: tf.Tensor, y_pred: Any) -> dict[str, Any]:
        """Update all metrics with the global batch, once; the logs."""
        x, y, sample_weight = batch
        with keras_internals.single_device(), tf.device(self._hub):
            keras_internals.loss_tracker(self._model).update_state(
                loss, sample_weight=batch_size_of(batch)
            )
            return self._model.compute_metrics(x, y, y_pred, sample_weight)

    def _build_metrics(self, run_pass: Any) -> None:
        """Create the compiled metrics' variables before a graph needs them."""
        if self._model.run_eagerly:
            return
        x, y, sample_weight = (symbolic(specs) for specs in self._spec)
        with keras_internals.single_device():
            if self._inline:
                y_pred = keras_internals.symbolic_call(self._model, x)
            else:
                outputs = specs_of(run_pass.structured_outputs.y_pred)
                y_pred = symbolic(without_batch_size(outputs))
            keras_internals.build_metrics(self._model, x, y, y_pred, sample_weight)


class TrainStep(Step):
    """A training step whose losses are sums over examples.

    Args:
        count_divisors: Whether a loss has a mask or a sum of sample weights to divide by,
            which the replicas then count first.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        spec: Batch,
        replica_pass: TrainingPass,
        inline: bool = False,
        count_divisors: bool = False,
    ) -> None:
        super().__init__(model, strategy, spec, replica_pass, inline)
        optimizer_variables = [] if model.optimizer is None else model.optimizer.variables
        self._optimizer = self._copies_of(optimizer_variables)
        specs = (self._values_spec, self._rows_spec, INTEGER)
        self._count, divisors = None, None
        if count_divisors:
            self._count = self._compiled(replica_pass.count, *specs)
            divisors = specs_of(getattr(self._count, "structured_outputs", None))
        self._run_pass = self._compiled(replica_pass.run, *specs, divisors, SCALAR)
        outcome = getattr(self._run_pass, "structured_outputs", None)
        self._update = self._compiled(
            replica_pass.update,
            self._values_spec,
            specs_of(optimizer_variables),
            specs_of(outcome.packs if outcome else None),
            [rows_spec(gradient) for gradient in outcome.slices] if outcome else None,
        )
        self._build_metrics(self._run_pass)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Train on one global batch; the logs so far in this epoch."""
        results = self._run(batch)
        y_pred = self._gathered(results)
        with after_all(results):
            for replica, result in enumerate(results):
                assign(self._trainable, result.update.trainable, replica)
                assign(self._optimizer, result.update.optimizer, replica)
            self._assign(results)
            loss, *shares = results[0].update.losses
            self._track(shares, batch_size_of(batch))
            return self._logs(batch, loss, y_pred)

    def _on_replica(self, values: Values, rows: Rows, replica: int, batch: Batch) -> Result:
        context = tf.distribute.get_replica_context()
        index = tf.constant(replica)
        optimizer_values = read(self._optimizer, replica)
        divisors = None
        if self._count is not None:
            divisors = sums(context, self._count(values, rows, index))
        scale = loss_scale(self._model.optimizer, optimizer_values)
        outcome = self._run_pass(values, rows, index, divisors, scale)
        packs, slices = sums(context, outcome.packs), everyones(context, outcome.slices, rows)
        update = self._update(values, optimizer_values, packs, slices)
        return Result(update, outcome, rows.examples)

    def _track(self, shares: list[tf.Tensor], batch_size: Any) -> None:
        """Update the running means of the single losses, as Keras weighs them."""
        compiled = keras_internals.compile_loss(self._model)
        weight = batch_size if isinstance(batch_size, int) else None
        with keras_internals.single_device():
            for metric, share in zip(compiled.metrics if compiled else (), shares, strict=False):
                metric.update_state(share, sample_weight=weight)


class EvaluationStep(Step):
    """A step of `evaluate` or `predict`: the loss is computed once, from all predictions.

    Args:
        only_predicts: Whether there are no targets.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        spec: Batch,
        only_predicts: bool = False,
    ) -> None:
        super().__init__(model, strategy, spec, EvaluationPass(model))
        self._run_pass = self._compiled(self._pass.run, self._values_spec, self._rows_spec, INTEGER)
        packs = getattr(self._run_pass, "structured_outputs", None)
        self._update = self._compiled(
            self._pass.update, self._values_spec, specs_of(packs.packs if packs else None)
        )
        if not only_predicts:
            self._build_metrics(self._run_pass)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Evaluate one global batch; the logs so far."""
        results = self._run(batch)
        self._assign(results)
        y_pred = self._gathered(results)
        with tf.device(self._hub):
            loss = whole_loss(self._model, batch, y_pred, results[0].update.losses, False)
        return self._logs(batch, loss, y_pred)

    def predict(self, batch: Batch) -> Any:
        """The predictions for one global batch."""
        results = self._run(batch)
        self._assign(results)
        return self._gathered(results)

    def _on_replica(self, values: Values, rows: Rows, replica: int, batch: Batch) -> Result:
        context = tf.distribute.get_replica_context()
        outcome = self._run_pass(values, rows, tf.constant(replica))
        update = self._update(values, sums(context, outcome.packs))
        return Result(update, outcome, rows.examples)


def whole_loss(
    model: keras.Model, batch: Batch, y_pred: Any, added_losses: list[tf.Tensor], training: bool
) -> tf.Tensor:
    """`model.compute_loss` of a global batch, as one device computes it."""
    x, y, sample_weight = batch
    with keras_internals.single_device():
        values = [(v, tf.convert_to_tensor(v)) for v in model.trainable_variables]
        with keras.StatelessScope(values, collect_losses=True) as scope:
            keras_internals.tracked_losses(model, added_losses)
            loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight, training)
        compiled = keras_internals.compile_loss(model)
        for variable in compiled.variables if compiled else ():
            variable.assign(scope.get_current_value(variable))
    return loss


def after_all(results: list[Result]) -> contextlib.AbstractContextManager[None]:
    """Where nothing happens before every replica has computed its new values.

    A step that fails, because memory runs out for example, so leaves nothing half done.
    """
    # A control dependency on the call itself would not wait for a pure function's results.
    return tf.control_dependencies([tf.identity(result.update.done) for result in results])


def read(storages: Sequence[tuple[tf.Variable, ...]], replica: int) -> list[tf.Tensor]:
    """The values of variables on one replica."""
    return [parts[min(replica, len(parts) - 1)].read_value() for parts in storages]


def assign(
    storages: Sequence[tuple[tf.Variable, ...]], values: Sequence[tf.Tensor], replica: int
) -> None:
    """Give variables new values on one replica, unless they share one copy."""
    for parts, value in zip(storages, values, strict=True):
        if replica < len(parts):
            with tf.device(parts[replica].device):
                parts[replica].assign(value, read_value=False)


def sums(context: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors over all replicas."""
    if not tensors or context.num_replicas_in_sync == 1:
        return list(tensors)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))


def everyones(context: Any, slices: list[Any], rows: Rows) -> list[tf.IndexedSlices]:
    """Sparse gradients with the rows of all replicas."""
    return [rows_of_all(context, gradient, rows.examples > 0) for gradient in slices]


def without_batch_size(specs: Any) -> Any:
    """Specs whose first axis is open: those of a global batch, from those of a share."""
    return keras.tree.map_structure(
        lambda spec: (
            tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec
        ),
        specs,
    )
