"""Runs a `train_step` or `test_step` that the user has written, on each replica.

The user's code sees one replica's rows and the replica's own variables. What it calls is
made aware of the other replicas: losses, means and gradients are those of the whole batch
(see `whole_values`), metrics add up, seeds differ, and moving statistics are averaged
after the step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import (
    compile_internals,
    graph_internals,
    optimizer_internals,
    step_hooks,
    variable_internals,
)
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.exchange.sparse_gradients import zero_unless
from keras_multigpu.training.logs import flattened
from keras_multigpu.training.replica_group import Replica, ReplicaGroup, copies_of
from keras_multigpu.training.replica_pass import output_rows
from keras_multigpu.training.replica_pass.loss_reduction import NeedsWholeBatch, divided
from keras_multigpu.training.replica_pass.pure_model import for_one_device, for_replica
from keras_multigpu.training.replica_pass.rows_flow import RowsFlow, tell
from keras_multigpu.training.replica_pass.sync_batch_norm import synchronized
from keras_multigpu.training.shares import Batch, Rows, rows_count, those_here, wide
from keras_multigpu.training.steps.present_step import (
    PresentStep,
    left_alone,
    present_step,
    running,
)
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.same_batch import require_same_batch
from keras_multigpu.training.steps.whole_values import (
    ADVICE,
    EXCHANGES,
    everyones_rows,
    parts_of_added,
    sum_of_all,
    summed_gradients,
)
from keras_multigpu.training.update import state_of, updated
from keras_multigpu.training.variables.catching_scope import refused_without_keras
from keras_multigpu.training.variables.model_state import variables_of
from keras_multigpu.training.variables.placement import MadeOutside, build_optimizer, own_optimizers

# What metrics gave as their results, by its id, with the metric. It is held, so that no later value
# gets the same id.
Given = dict[int, tuple[Any, keras.metrics.Metric]]


class CustomStep:
    """A step that runs the user's `train_step`, `test_step` or `predict_step` on each replica.

    Some BatchNorm layers are synchronised in it. Probes do something before it; what the user's
    code computes they cannot see.
    """

    def __init__(
        self,
        model: keras.Model,
        group: ReplicaGroup,
        function: Callable[[Any], Any],
        layers: Sequence[keras.layers.BatchNormalization] = (),
        probes: Sequence[Probe] = (),
    ) -> None:
        refuse_to_measure(probes)
        self._layers = list(layers)
        self._probes = list(probes)
        self._model = model
        self._group = group
        self._function = function
        states = variable_internals.seed_states(model)
        seeds = {id(state) for state in states}
        self._seeds = group.copies(states)
        # A replica without examples runs on a borrowed row, which must not be counted.
        placement = model.replication.placement
        self._metric_variables = [*model.metrics_variables, *placement.metric_states]
        self._metrics = group.copies(self._metric_variables)
        apart = seeds | {id(variable) for variable in self._metric_variables}
        others = [*model.non_trainable_variables, *placement.untracked]
        self._other_variables = [variable for variable in others if id(variable) not in apart]
        self._others = group.copies(self._other_variables)
        known = [*variables_of(model).values(), *self._metric_variables]
        self._known = {id(variable) for variable in known}
        self._followed = group.count == 1

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Run the step on each replica's rows of one batch; its logs."""
        for probe in self._probes:
            probe.before_step()
        given: Given = {}
        logs = self._run(shares, given)
        with graph_internals.single_device():
            return self._merged(logs, list(shares), given)

    def _run(self, shares: Sequence[Rows], given: Given) -> list[Any]:
        def on_replica(replica: Replica) -> Any:
            rows = shares[replica.id]
            self._group.count_moved("copied", rows.data)
            self._shift(replica, for_replica)
            self._hold_part(replica)
            before = self._group.read(self._metrics, replica)
            flow = self._flow(rows, replica)
            step = PresentStep(self._model, rows, self._group, replica, self._known, flow)
            try:
                with running(step), synchronized(self._layers, rows):
                    result = self._function(packed(rows))
            finally:
                self._shift(replica, for_one_device)
            if flow is not None and replica.id == 0:
                tell(self._model, flow, ADVICE)
            self._restore_unless(step, before)
            return result

        if self._group.is_spread and not those_here(shares):
            require_same_batch(self._group, shares)
        before = self._group.read(self._others, self._group.replicas[0])
        with (
            undone_where_unfinished(self._model),
            step_hooks.exchanged(EXCHANGES),
            summing_optimizers(self._model, self._group),
            noted_metrics(self._model.metrics, given),
        ):
            results = self._group.run(on_replica)
        self._followed = True
        self._agree(before, shares)
        self._add_parts()
        return results

    def _flow(self, rows: Rows, replica: Replica) -> RowsFlow | None:
        """What follows the rows, if they have not been followed yet."""
        # Without a graph nothing is decided by it, and one replica can warn for all.
        if self._followed or (tf.executing_eagerly() and replica.id):
            return None
        return RowsFlow(rows.data)

    def _hold_part(self, replica: Replica) -> None:
        """Let the first of all replicas have what metrics have added up, and the others nothing.

        In one process their variables are such parts; of several processes each has the sums.
        """
        if self._group.is_spread and replica.id != 0:
            values = self._group.read(self._metrics, replica)
            self._group.assign(self._metrics, [tf.zeros_like(v) for v in values], replica)

    def _add_parts(self) -> None:
        """Let each of several processes have the sums again."""
        if not self._group.is_spread or not self._metrics:
            return
        packing = Packing([parts[0] for parts in self._metrics])

        def on_replica(replica: Replica) -> None:
            parts = packing.pack(self._group.read(self._metrics, replica))
            sums = packing.unpack(self._group.sum(parts))
            self._group.assign(self._metrics, sums, replica)

        self._group.run(on_replica)

    def _restore_unless(self, step: PresentStep, before: list[tf.Tensor]) -> None:
        """Undo what a replica without examples did to metrics of examples."""
        kept = [
            after if id(variable) in step.of_batch else tf.where(step.present, after, start)
            for variable, after, start in zip(
                self._metric_variables,
                self._group.read(self._metrics, step.replica),
                before,
                strict=True,
            )
        ]
        self._group.assign(self._metrics, kept, step.replica)

    def _shift(self, replica: Replica, change: Callable[..., tf.Tensor]) -> None:
        states = self._group.read(self._seeds, replica)
        shifted = [change(state, tf.constant(replica.id)) for state in states]
        self._group.assign(self._seeds, shifted, replica)

    def _agree(self, before: list[tf.Tensor], rows: Sequence[Rows]) -> None:
        """Give all replicas the values that `moving_statistics` says."""
        group = self._group
        everyones = group.everyones([group.read(self._others, each) for each in group.replicas])
        for variable, parts, old, values in zip(
            self._other_variables, self._others, before, zip(*everyones, strict=True), strict=True
        ):
            first = common = values[0]
            for value, share in zip(values[1:], rows[1:], strict=True):
                more = beyond_first(variable, old, first, value, share.fraction)
                common = common if more is None else common + zero_unless(share.examples > 0, more)
            for part in parts:
                part.assign(common, read_value=False)

    def _merged(self, logs: list[dict[str, Any]], rows: list[Rows], given: Given) -> dict[str, Any]:
        """Metrics from their global state; other logs as means weighted by examples."""
        merged = self._model.get_metrics_result()
        structure, logs = logs[0], [flattened(log) for log in logs]
        values = [[tf.cast(value, wide()) for value in log.values()] for log in logs]
        whole = self._of_replicas(values, rows)
        for (name, value), mean in zip(logs[0].items(), whole, strict=True):
            if id(value) in given:
                # Under whatever name it is logged.
                merged[name] = given[id(value)][1].result()
            elif name == "loss" and name in merged:
                # A step may log a loss without having updated the running mean of that name.
                tracker = next(metric for metric in self._model.metrics if metric.name == name)
                updated = getattr(tracker, "count", tf.ones(())) > 0
                merged[name] = tf.where(updated, merged[name], mean)
            merged.setdefault(name, mean)
        return in_places_of(structure, merged)

    def _of_replicas(self, values: list[list[tf.Tensor]], rows: list[Rows]) -> list[tf.Tensor]:
        """A value for each row as one for all rows; others as means weighted by examples."""
        means = [i for i, value in enumerate(values[0]) if value.shape.is_fully_defined()]
        whole = output_rows.joined(
            values,
            [rows[replica.id].examples for replica in self._group.replicas],
            [0 if i in means else None for i in range(len(values[0]))],
            self._group,
        )
        everyones = self._group.everyones([[each[i] for i in means] for each in values])
        for i, of_replicas in zip(means, zip(*everyones, strict=True), strict=True):
            parts = [
                zero_unless(share.examples > 0, value) * tf.cast(share.fraction, value.dtype)
                for value, share in zip(of_replicas, rows, strict=True)
            ]
            whole[i] = tf.add_n(parts)
        return whole


def in_places_of(structure: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values by their names, nested as the step nested them: Keras's callbacks sort each level."""
    return {
        name: in_places_of(below, values) if isinstance(below, dict) else values[name]
        for name, below in structure.items()
    }


def beyond_first(
    variable: keras.Variable, old: tf.Tensor, first: tf.Tensor, new: tf.Tensor, fraction: tf.Tensor
) -> tf.Tensor | None:
    """What another replica adds to the first one's value; None where only that counts."""
    if variable.aggregation == "sum":
        return new - old
    if not new.dtype.is_floating or variable.aggregation == "only_first_replica":
        return None
    # Values that are equal stay as they are, to the last bit.
    return (new - first) * tf.cast(fraction, new.dtype)


@contextlib.contextmanager
def undone_where_unfinished(model: keras.Model) -> Iterator[None]:
    """Take back what a step without a graph has assigned before it is made anew."""
    # A graph that is not finished never runs.
    eager = tf.executing_eagerly()
    variables = variables_of(model).values() if eager else ()
    before = [(part, part.read_value()) for variable in variables for part in copies_of(variable)]
    try:
        yield
    except MadeOutside:
        for part, value in before:
            part.assign(value)
        raise


def refuse_to_measure(probes: Sequence[Probe]) -> None:
    """Raise a `ValueError` where a probe wants to see what only Keras's own step shows."""
    for probe in probes:
        if type(probe).on_replica is not Probe.on_replica:
            raise value_error(
                "A callback wants to measure inside a `train_step` of your own, or with layers "
                "that assign a trainable weight.",
                "Expected Keras's own `train_step` without such layers (as `SpectralNormalization` "
                "is one): its losses and gradients are known.",
                "Leave out the callback or the layers, or write the model with `compute_loss` "
                "instead of `train_step`.",
                probe=type(probe).__name__,
            )


class CustomPrediction(CustomStep):
    """A prediction step that runs the user's `predict_step` on each replica."""

    def __init__(
        self, model: keras.Model, group: ReplicaGroup, function: Callable[[Any], Any], spec: Batch
    ) -> None:
        super().__init__(model, group, lambda data: self._with_origins(function(data)))
        self._in_order = True
        self._spec = spec
        self._of_inputs = lambda x: function(keras.utils.pack_x_y_sample_weight(x))

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """The predictions for one global batch, in the order of its examples."""
        outputs, origins = zip(*self._run(shares, {}), strict=True)
        if self._group.count == 1:
            return outputs[0]
        parts = [tensors_in(output) for output in outputs]
        rows = [shares[replica.id] for replica in self._group.replicas]
        examples = [share.examples for share in rows]
        eager = tf.executing_eagerly()
        size = int(examples[0]) if eager else rows_count(rows[0])
        size = size if isinstance(size, int) else None
        counts: output_rows.Counts = [1] * len(parts[0])
        if not self._in_order or output_rows.may_be_odd(parts[0], size):
            counts = output_rows.counted(self._of_inputs, self._spec[0], parts[0], size)
        for count, leaf, of_rows in zip(counts, parts[0], origins[0], strict=True):
            if count == 0 and of_rows:
                output_rows.refuse_output(leaf.shape)
        joined = output_rows.joined(parts, examples, counts, self._group)
        return keras.tree.pack_sequence_as(outputs[0], joined)

    def _with_origins(self, outputs: Any) -> tuple[Any, list[bool]]:
        """What a step returns, and of which of it the replica's own rows are part."""
        step, leaves = present_step(), tensors_in(outputs)
        if step.flow is not None:
            self._in_order = all(map(step.flow.in_order, leaves))
        return outputs, [isinstance(t, tf.Tensor) and "rows" in step.origins(t) for t in leaves]


def tensors_in(structure: Any) -> list[Any]:
    """The leaves of a structure as tensors; None as it is."""
    return [
        leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
        for leaf in keras.tree.flatten(structure)
    ]


def packed(rows: Rows) -> Any:
    """Rows as the data that Keras hands to a `train_step`."""
    return keras.utils.pack_x_y_sample_weight(*rows.data)


@contextlib.contextmanager
def summing_optimizers(model: keras.Model, group: ReplicaGroup) -> Iterator[None]:
    """Let the model's optimizers sum gradients over replicas before they update."""
    optimizers = own_optimizers(model)
    for optimizer in optimizers:
        vars(optimizer)["apply"] = summing_apply(optimizer, group)
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)


@contextlib.contextmanager
def noted_metrics(metrics: Sequence[keras.metrics.Metric], given: Given) -> Iterator[None]:
    """Note the results, and which metrics are updated with one number for the whole batch."""
    for metric in metrics:
        vars(metric)["update_state"] = noting_update(metric, metric.update_state)
        vars(metric)["result"] = noting_result(metric, metric.result, given)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("update_state", None)
            vars(metric).pop("result", None)


def noting_result(
    metric: keras.metrics.Metric, result: Callable[..., Any], given: Given
) -> Callable[..., Any]:
    def noted() -> Any:
        value = result()
        given[id(value)] = value, metric
        return value

    return noted


def noting_update(metric: keras.metrics.Metric, update: Callable[..., Any]) -> Callable[..., Any]:
    """An `update_state` of a replica's rows that notes a single number without a weight."""

    def update_state(*args: Any, **kwargs: Any) -> Any:
        given, step = [*args, *kwargs.values()], present_step()
        # Replicas without examples have that number, too. Were it not counted there, a last batch
        # that leaves replicas empty would weigh less than the others.
        if len(given) == 1 and keras.ops.ndim(given[0]) == 0:
            step.of_batch.update(id(variable) for variable in metric.variables)
        with left_alone(), refused_without_keras():
            return update(*args, **kwargs)

    return update_state


def summing_apply(
    optimizer: keras.optimizers.Optimizer, group: ReplicaGroup
) -> Callable[..., None]:
    """An `apply` that updates this replica, with gradients of all replicas."""

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        trainable = list(trainable_variables or optimizer_internals.optimized_variables(optimizer))
        step = present_step()
        with left_alone():
            # By the replica that comes first, outside of all graphs: the step is not made anew.
            with tf.init_scope():
                build_optimizer(optimizer, trainable, group.strategy)
            variables = [*trainable, *state_of(optimizer)]
            copies = group.copies(variables)
            gradients = of_all_replicas(step, trainable, list(grads))
            values = group.read(copies, step.replica)
            # Only here, where no replica waits for another one.
            vars(optimizer).pop("apply")
            new = updated(optimizer, variables, values, gradients)
            vars(optimizer)["apply"] = apply
            group.assign(copies, new, step.replica)

    return apply


def of_all_replicas(step: PresentStep, trainable: list[Any], gradients: list[Any]) -> list[Any]:
    """Gradients that a tape has summed as they are; the sums of those made in another way."""
    own = [i for i, v in enumerate(trainable) if id(v) not in step.with_gradient]
    if own:
        step.require_outermost("An optimizer is given gradients that no `tf.GradientTape` made")
    summed = summed_gradients(step, [trainable[i] for i in own], [gradients[i] for i in own])
    for i, value in zip(own, summed, strict=True):
        gradients[i] = value
    return gradients


def share_of_loss(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """The loss of the global batch, from a replica's rows."""
    step = present_step()
    step.require_outermost("`compute_loss` is called")
    with left_alone():
        terms = [tf.reduce_sum(loss) for loss in parts_of_added(step, model.losses)]
        whole: list[tf.Tensor] = []
        if compile_internals.compile_loss(model) is not None:
            # The running means of single losses are updated below, with global values.
            with keras.StatelessScope():
                parts, whole, shares = compiled_part(model, step, (y, y_pred, sample_weight))
            terms += parts
            means = compile_internals.compile_loss(model).metrics
            for metric, share in zip(means, sum_of_all(step, shares), strict=False):
                metric.update_state(share)
        if not terms and not whole:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        summed = sum_of_all(step, [tf.add_n(terms)]) if terms else []
        return step.shared(tf.add_n(summed + whole))


def compiled_part(
    model: keras.Model, step: PresentStep, data: tuple[Any, Any, Any]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """The compiled losses: this replica's part of them, or all of them, and one by one."""
    y, y_pred, sample_weight = data
    fraction = step.rows.fraction
    try:
        total, shares = divided(
            model, fraction, (None, y, sample_weight), y_pred, lambda own: sum_of_all(step, own)
        )
        return [total], [], shares.shares
    except NeedsWholeBatch:
        everyones = everyones_rows(step, data)
        with graph_internals.single_device():
            whole = compile_internals.compile_loss(model)(*everyones)
        return [], [tf.reduce_sum(whole)], []
