"""Runs a `train_step` or `test_step` that the user has written, on each replica.

The user's code sees one replica's rows and the replica's own variables. What it calls on
the model is made aware of the other replicas: `compute_loss` returns the global loss (with
the gradient of the replica's part), optimizers sum gradients before they update, metrics
add up, seeds differ, and moving statistics are averaged after the step.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.checks import problem
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training import randomness
from keras_multigpu.training.adjusted_schedule import state_of
from keras_multigpu.training.feeding import Batch
from keras_multigpu.training.logs import flattened
from keras_multigpu.training.loss_reduction import LossShares
from keras_multigpu.training.loss_reduction import NeedsWholeBatch
from keras_multigpu.training.optimizer_update import updated
from keras_multigpu.training.packing import Packing
from keras_multigpu.training.passes import zero_unless
from keras_multigpu.training.placement import NeedsOptimizer
from keras_multigpu.training.placement import copies
from keras_multigpu.training.placement import own_optimizers
from keras_multigpu.training.probes import Probe
from keras_multigpu.training.pure_model import Rows
from keras_multigpu.training.shares import HOST
from keras_multigpu.training.shares import share_of
from keras_multigpu.training.sparse_gradients import is_sparse
from keras_multigpu.training.sparse_gradients import of_table
from keras_multigpu.training.sparse_gradients import rows_of_all
from keras_multigpu.training.step import assign
from keras_multigpu.training.step import read
from keras_multigpu.training.step import sums
from keras_multigpu.training.sync_batch_norm import synchronized

_present = threading.local()


def present_rows() -> Rows | None:
    """The rows of the replica whose custom step runs now; None outside such a step."""
    return getattr(_present, "rows", None)


class CustomStep:
    """A step that runs the user's function on each replica.

    Args:
        model: The model, built and placed.
        strategy: Its strategy.
        function: The user's `train_step`, `test_step` or `predict_step`.
        layers: BatchNorm layers to synchronise.
        probes: What callbacks want to do before each step. What the user's code computes they
            cannot see.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        function: Callable[[Any], Any],
        layers: Sequence[keras.layers.BatchNormalization] = (),
        probes: Sequence[Probe] = (),
    ) -> None:
        refuse_to_measure(probes)
        self._layers = list(layers)
        self._probes = list(probes)
        self._model = model
        self._strategy = strategy
        self._function = function
        states = keras_internals.seed_states(model)
        seeds = {id(state) for state in states}
        self._seeds = self._copies_of(states)
        # A replica without examples runs on a borrowed row, which must not be counted.
        self._metric_variables = model.metrics_variables
        self._metrics = self._copies_of(self._metric_variables)
        self._others = self._copies_of(
            [v for v in model.non_trainable_variables if id(v) not in seeds]
        )

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Run the step on one global batch; its logs."""
        for probe in self._probes:
            probe.before_step()
        logs, rows = self._run(batch)
        self._average(rows)
        return self._merged(logs, rows)

    def _run(self, batch: Batch) -> tuple[list[Any], list[Rows]]:
        results: dict[int, tuple[Any, Rows]] = {}

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            with tf.device(HOST):
                rows = share_of(batch, replica, self._strategy.num_replicas_in_sync)
            self._shift(replica, randomness.for_replica)
            before = read(self._metrics, replica)
            _present.rows, _present.of_batch = rows, set()
            try:
                with synchronized(self._layers, rows):
                    results[replica] = self._function(packed(rows)), rows
            finally:
                _present.rows = None
                self._shift(replica, randomness.for_one_device)
            self._restore_unless(rows.examples > 0, before, replica)

        with (
            summing_optimizers(self._model, self._strategy),
            noted_updates(self._model.metrics),
        ):
            self._strategy.run(on_replica)
        outputs, rows = zip(*(results[replica] for replica in sorted(results)), strict=True)
        return list(outputs), list(rows)

    def _restore_unless(self, present: tf.Tensor, before: list[tf.Tensor], replica: int) -> None:
        """Undo what a replica without examples did to metrics of examples."""
        kept = [
            after if id(variable) in _present.of_batch else tf.where(present, after, start)
            for variable, after, start in zip(
                self._metric_variables, read(self._metrics, replica), before, strict=True
            )
        ]
        assign(self._metrics, kept, replica)

    def _copies_of(self, variables: Sequence[keras.Variable]) -> list[tuple[tf.Variable, ...]]:
        return [
            copies(keras_internals.variable_storage(variable), self._strategy)
            for variable in variables
        ]

    def _shift(self, replica: int, change: Callable[..., tf.Tensor]) -> None:
        states = read(self._seeds, replica)
        assign(self._seeds, [change(state, tf.constant(replica)) for state in states], replica)

    def _average(self, rows: list[Rows]) -> None:
        """Give all replicas the mean of their statistics, weighted by examples."""
        for parts in self._others:
            first = parts[0].read_value()
            common = first
            if first.dtype.is_floating:
                for part, share in zip(parts[1:], rows[1:], strict=False):
                    more = (part.read_value() - first) * tf.cast(share.fraction, first.dtype)
                    common += tf.where(share.examples > 0, more, tf.zeros_like(more))
            for part in parts:
                part.assign(common, read_value=False)

    def _merged(self, logs: list[dict[str, Any]], rows: list[Rows]) -> dict[str, Any]:
        """Metrics from their global state; other logs as means weighted by examples."""
        merged = self._model.get_metrics_result()
        logs = [flattened(log) for log in logs]
        for name in logs[0]:
            mean = tf.add_n(
                [
                    tf.where(share.examples > 0, tf.cast(log[name], tf.float32), 0.0)
                    * share.fraction
                    for log, share in zip(logs, rows, strict=True)
                ]
            )
            if name == "loss" and name in merged:
                # A step may log a loss without having updated the running mean of that name.
                updated = keras_internals.loss_tracker(self._model).count > 0
                merged[name] = tf.where(updated, merged[name], mean)
            merged.setdefault(name, mean)
        return {name: merged[name] for name in logs[0]}


def refuse_to_measure(probes: Sequence[Probe]) -> None:
    """Raise a `ValueError` where a probe wants to see what only Keras's own step shows."""
    for probe in probes:
        if type(probe).on_replica is not Probe.on_replica:
            raise ValueError(
                problem(
                    "A callback wants to measure inside a `train_step` of your own.",
                    "Expected Keras's own `train_step`, whose losses and gradients are known.",
                    "Leave out the callback, or write the model with `compute_loss` instead of "
                    "`train_step`.",
                    probe=type(probe).__name__,
                )
            )


class CustomPrediction(CustomStep):
    """A prediction step that runs the user's `predict_step` on each replica."""

    def __call__(self, batch: Batch) -> Any:
        """The predictions for one global batch, in the order of its examples."""
        outputs, rows = self._run(batch)
        return keras.tree.map_structure(
            lambda *parts: tf.concat(
                [part[: share.examples] for part, share in zip(parts, rows, strict=True)], axis=0
            ),
            *outputs,
        )


def packed(rows: Rows) -> Any:
    """Rows as the data that Keras hands to a `train_step`."""
    return keras.utils.pack_x_y_sample_weight(*rows.data)


@contextlib.contextmanager
def summing_optimizers(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let the model's optimizers sum gradients over replicas before they update."""
    optimizers = own_optimizers(model)
    for optimizer in optimizers:
        vars(optimizer)["apply"] = summing_apply(optimizer, strategy)
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)


@contextlib.contextmanager
def noted_updates(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Note which metrics are updated with one number for the whole batch, such as its loss.

    Every replica has that number, also one without examples. Were it not counted there, a
    last batch that leaves replicas empty would weigh less than the others.
    """
    for metric in metrics:
        vars(metric)["update_state"] = noting_update(metric, metric.update_state)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("update_state", None)


def noting_update(metric: keras.metrics.Metric, update: Callable[..., Any]) -> Callable[..., Any]:
    """An `update_state` that notes a single number without a weight."""

    def update_state(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) == 1 and keras.ops.ndim(given[0]) == 0:
            _present.of_batch.update(id(variable) for variable in metric.variables)
        return update(*args, **kwargs)

    return update_state


def summing_apply(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> Callable[..., None]:
    """An `apply` that sums the gradients over replicas, then updates this replica."""

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        trainable = list(trainable_variables or optimizer_internals.optimized_variables(optimizer))
        if not optimizer.built:
            raise NeedsOptimizer(optimizer, trainable, strategy)
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        total = summed_gradients(context, trainable, list(grads))
        variables = [*trainable, *state_of(optimizer)]
        storages = [
            copies(keras_internals.variable_storage(variable), strategy) for variable in variables
        ]
        vars(optimizer).pop("apply")
        new = updated(optimizer, trainable, read(storages, replica), total)
        vars(optimizer)["apply"] = apply
        assign(storages, new, replica)

    return apply


def summed_gradients(context: Any, trainable: list[Any], gradients: list[Any]) -> list[Any]:
    """The sums of gradients over replicas; one without examples adds nothing."""
    present = _present.rows.examples > 0
    dense = [i for i, g in enumerate(gradients) if g is not None and not is_sparse(g)]
    tensors = [
        zero_unless(present, tf.reshape(tf.convert_to_tensor(gradients[i]), trainable[i].shape))
        for i in dense
    ]
    packing = Packing(tensors)
    for i, total in zip(dense, packing.unpack(sums(context, packing.pack(tensors))), strict=True):
        gradients[i] = total
    for i, gradient in enumerate(gradients):
        if is_sparse(gradient):
            gradients[i] = rows_of_all(context, of_table(gradient, trainable[i]), present)
    return gradients


def share_of_loss(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """The loss of the global batch, with the gradient of this replica's part of it.

    Args:
        model: The compiled model.
        y: The targets of the replica's rows.
        y_pred: Their predictions.
        sample_weight: Their sample weights.
    """
    context, rows = tf.distribute.get_replica_context(), _present.rows
    terms = [tf.reduce_sum(tf.cast(loss, tf.float32)) * rows.fraction for loss in model.losses]
    if keras_internals.compile_loss(model) is not None:
        # The running means of single losses are updated below, with global values.
        with keras.StatelessScope():
            total, shares = compiled_part(model, context, rows, (y, y_pred, sample_weight))
        terms.append(total)
        for metric, share in zip(
            keras_internals.compile_loss(model).metrics, sums(context, shares), strict=False
        ):
            metric.update_state(share)
    if not terms:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    part = tf.where(rows.examples > 0, tf.add_n(terms), 0.0)
    return part + tf.stop_gradient(sums(context, [tf.stop_gradient(part)])[0] - part)


def compiled_part(
    model: keras.Model, context: Any, rows: Rows, data: tuple[Any, Any, Any]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """This replica's part of the compiled losses, in total and one by one."""
    y, y_pred, sample_weight = data
    try:
        count = LossShares(model, rows.fraction, counting=True)
        count.total((None, y, sample_weight), y_pred)
    except NeedsWholeBatch:
        # Every replica computes the same loss and contributes one of N equal parts.
        everyones = everyones_rows(context, rows, data)
        with keras_internals.single_device():
            whole = keras_internals.compile_loss(model)(*everyones)
        return tf.reduce_sum(whole) / context.num_replicas_in_sync, []
    present = tf.cast(rows.examples > 0, tf.float32)
    divisors = sums(context, [divisor * present for divisor in count.local_divisors])
    shares = LossShares(model, rows.fraction, divisors)
    return shares.total((None, y, sample_weight), y_pred), shares.shares


def everyones_rows(context: Any, rows: Rows, data: Any) -> Any:
    """The rows of all replicas, of which this replica's own can be differentiated."""
    replicas = context.num_replicas_in_sync
    replica = int(tf.get_static_value(context.replica_id_in_sync_group))
    first, last = share_bounds(rows.global_batch_size, replica, replicas)

    def joined(leaf: Any) -> Any:
        if leaf is None:
            return None
        own = leaf[: rows.examples]
        everyones = context.all_gather(tf.stop_gradient(own), axis=0)
        if own.dtype.is_floating:
            # Makes up for the division by the number of replicas; adds nothing.
            own += (replicas - 1) * (own - tf.stop_gradient(own))
        return tf.concat([everyones[:first], own, everyones[last:]], axis=0)

    return keras.tree.map_structure(joined, data)
