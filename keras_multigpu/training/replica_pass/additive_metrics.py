"""Metrics that are sums over examples: each replica updates them from its own rows.

The state of `keras.metrics.Mean` is a sum and a count, that of `AUC` and `MeanIoU` are counts. What
some rows add to such a state can be computed where the rows are, and a few numbers then travel
together with the gradients. Only metrics for which that does not hold see the predictions of all
replicas, gathered:

    of Keras, or made of a function     additive where it proves so on a few random rows: one
                                        that returns one number for the batch does not, say
    with an `update_state` of its own   gathered, unless the class says `additive = True`
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import compile_internals, graph_internals, model_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_pass.loss_reduction import KEPT, random_rows, tried
from keras_multigpu.training.replica_pass.pure_model import summable
from keras_multigpu.training.shares import (
    Rows,
    batch_size_of,
    is_one_row,
    present,
    specs_of,
    symbolic,
    without_batch_size,
)
from keras_multigpu.training.variables.catching_scope import CatchingScope


def defined_in(cls: type) -> type:
    """The class from which a metric class has its `update_state`."""
    return next(owner for owner in cls.__mro__ if "update_state" in vars(owner))


ADD_UP = {
    defined_in(cls)
    for cls in (
        keras.metrics.AUC,
        keras.metrics.BinaryIoU,
        keras.metrics.FBetaScore,
        keras.metrics.IoU,
        keras.metrics.Mean,
        keras.metrics.MeanMetricWrapper,
        keras.metrics.Precision,
        keras.metrics.R2Score,
        keras.metrics.Recall,
        keras.metrics.RootMeanSquaredError,
        keras.metrics.SensitivityAtSpecificity,
        keras.metrics.Sum,
        keras.metrics.TruePositives,
    )
}
"""Where Keras defines an `update_state` that adds what it computes from rows to the state."""

_known: "weakref.WeakKeyDictionary[keras.metrics.Metric, dict[str, bool]]" = (
    weakref.WeakKeyDictionary()
)

# From this length on an axis is shortened when a metric is tried: whether it adds up can be seen
# without a score for each of 50,000 words.
LONG = 32


def is_additive(metric: keras.metrics.Metric, data: Sequence[Any]) -> bool:
    """Whether the state of a metric, which is built, is a sum of what each example adds to it.

    It is tried once for each metric and form of the tensors that `update_state` is called with, of
    which only the shapes and dtypes are used.
    """
    declared = getattr(metric, "additive", None)
    if declared is not None:
        return bool(declared)
    if "update_state" in vars(metric) or defined_in(type(metric)) not in ADD_UP:
        return False
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    if not all(map(tried, leaves)):
        return False
    known = _known.setdefault(metric, {})
    key = str([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
    if key not in known:
        known[key] = adds_up(metric, data, leaves)
    return known[key]


def adds_up(metric: keras.metrics.Metric, data: Sequence[Any], leaves: list[Any]) -> bool:
    """Whether some random rows add to the state what their parts add to it."""
    lengths = sorted({n for leaf in leaves for n in leaf.shape[1:] if n and n > LONG})
    # Lengths that differ go on differing, or rows would fit that do not.
    short = {n: LONG + 1 + i for i, n in enumerate(lengths)}
    # In their own lengths, if a metric such as `MeanIoU(num_classes=...)` knows these.
    for names in (short, {}) if short else ({},):
        specs = [
            (tuple(names.get(n, n) for n in leaf.shape[1:]), tf.as_dtype(leaf.dtype))
            for leaf in leaves
        ]
        rows = random_rows(specs, 0 if data[0] is None else 1, seed=0)
        try:
            whole, first, others = (
                state_after(metric, data, [leaf[part] for leaf in rows])
                for part in (slice(None), slice(KEPT), slice(KEPT, None))
            )
        except Exception:  # Lengths that code knows by heart, random numbers that it cannot read.
            continue
        return all(
            np.allclose(w, a + b, rtol=1e-4, atol=1e-6, equal_nan=True)
            for w, a, b in zip(whole, first, others, strict=True)
        )
    return False


def state_after(metric: keras.metrics.Metric, data: Any, rows: list[np.ndarray]) -> list[Any]:
    """The values of a metric's variables after one update from zero."""
    with tf.init_scope(), tf.device(HOST), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The step gives them.
        given = map(tf.convert_to_tensor, rows)
        arguments = tf.nest.map_structure(lambda leaf: leaf if leaf is None else next(given), data)
        zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
        return [np.asarray(v) for v in metric.stateless_update_state(zeros, *arguments)]


class Additive(NamedTuple):
    """Which metrics replicas update from their own rows.

    Attributes:
        at_once: Whether they update none, because all see the whole batch.
        answers: Whether each is additive, in the order in which Keras updates them.
        variables: Those to which rows add.
    """

    at_once: bool
    answers: list[bool]
    variables: list[keras.Variable]

    @property
    def gathered(self) -> bool:
        """Whether some metrics need the predictions of all replicas."""
        return self.at_once or not all(self.answers)


NO_METRICS = Additive(False, [], [])


class AdditiveMetrics:
    """The metrics of `compile`, as far as replicas update them from their own rows.

    They see the whole batch at once where the model has a `compute_metrics` of its own.
    """

    def __init__(self, model: keras.Model, spec: tuple[Any, Any, Any]) -> None:
        self._model = model
        self._spec = spec
        self._has_metrics = compile_internals.has_metrics(model)
        self._at_once = bool(model_internals.overridden(model, "compute_metrics")) or (
            self._has_metrics and shared_by_all(spec)
        )

    def build(self, y_pred: Any) -> None:
        """Create the metrics' variables, for symbolic predictions."""
        x, y, sample_weight = symbolic(self._spec)
        with tf.init_scope(), graph_internals.single_device():
            compile_internals.build_metrics(self._model, x, y, y_pred, sample_weight)

    def build_for(self, data: Any, y_pred: Any) -> None:
        """Create the metrics' variables, for some rows and their predictions."""
        if not self._model.run_eagerly:
            self.build(symbolic(without_batch_size(specs_of(y_pred))))
            return
        # Metrics that only run eagerly read the numbers.
        x, y, sample_weight = data
        real_call = model_internals.real_call
        compile_internals.build_metrics(self._model, x, y, y_pred, sample_weight, real_call)

    def of_rows(self, rows: Rows, y_pred: Any, in_common: bool) -> tuple[list[tf.Tensor], Additive]:
        """What some rows add to the variables of additive metrics, and which these are.

        Some predictions may be the same for all rows, which then have them in common.
        """
        if self._at_once or (in_common and self._has_metrics):
            return [], Additive(True, [], [])
        if not self._has_metrics:
            return [], NO_METRICS
        self.build_for(rows.data, y_pred)
        answers = self._tried(rows, y_pred)
        metrics = compile_internals.compiled_metrics(self._model)
        variables = list({id(v): v for metric in metrics for v in metric.variables}.values())
        zeros = [tf.zeros(v.shape, v.dtype) for v in variables]
        with CatchingScope(variables, zeros) as scope:
            self._update(rows.data, y_pred, answers, True)
        refuse_others(scope, variables)
        assigned = [v for v in variables if id(v) in scope.assigned]
        added = [tf.convert_to_tensor(scope.get_current_value(v)) for v in assigned]
        summands = [tf.cast(value, summable(value.dtype)) for value in added]
        return summands, Additive(False, answers, assigned)

    def logs(
        self, additive: Additive, totals: Sequence[tf.Tensor], batch: Any, y_pred: Any
    ) -> dict[str, Any]:
        """Update all metrics, once, with what all replicas' rows have added; the logs.

        The global batch and its predictions are there where metrics are `gathered`.
        """
        x, y, sample_weight = batch
        if additive.at_once:
            return self._model.compute_metrics(x, y, y_pred, sample_weight)
        for variable, total in zip(additive.variables, totals, strict=True):
            variable.assign_add(tf.cast(total, variable.dtype))
        if additive.gathered:
            self._update(batch, y_pred, additive.answers, False)
        return self._model.get_metrics_result()

    def _tried(self, rows: Rows, y_pred: Any) -> list[bool]:
        """Whether each metric is additive, in the order in which Keras updates them."""
        found: list[bool] = []

        def note(metric: keras.metrics.Metric, *data: Any) -> None:
            found.append(is_additive(metric, data))

        compile_internals.update_metrics(self._model, note, rows.data[1], y_pred, rows.data[2])
        return found

    def _update(self, batch: Any, y_pred: Any, answers: Sequence[bool], wanted: bool) -> None:
        """Update the metrics that are additive, or those that are not."""
        each = iter(answers)

        def update(metric: keras.metrics.Metric, *data: Any) -> None:
            if next(each) == wanted:
                metric.update_state(*data)

        compile_internals.update_metrics(self._model, update, batch[1], y_pred, batch[2])


def shared_by_all(spec: tuple[Any, Any, Any]) -> bool:
    """Whether targets or weights have parts that all examples share, so that none adds its own."""
    return batch_size_of(spec) != 1 and any(
        not leaf.shape.rank or is_one_row(leaf) for leaf in present(spec[1:])
    )


def refuse_others(scope: CatchingScope, variables: Sequence[keras.Variable]) -> None:
    """Raise a `ValueError` where a metric changes what is not part of its state."""
    own = {id(variable) for variable in variables}
    for key, variable in scope.assigned.items():
        if key not in own:
            raise value_error(
                "A metric with `additive = True` changes a variable that is not its own.",
                "Expected one whose state is in the variables that its `add_variable` made.",
                "Make the variable with `add_variable`, or leave out `additive`: then the "
                "metric is updated once, with all predictions.",
                variable=variable.path,
            )
