"""Keras metrics of each replica's own examples, updated inside the training step."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.timing import StepProbe, no_sums
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.keras_internals.compile_internals import compiled_metric
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.watching.probe import StepView

OF_STEP_PROBE = 2
"""How many tensors of a replica are `StepProbe`'s."""


class Score(NamedTuple):
    """A metric whose variables exist once per replica, and their initial values."""

    name: str
    metric: keras.metrics.Metric
    start: list[np.ndarray]
    states: list[list[tf.Variable]]

    def result(self, replica: int) -> float:
        values = [tf.convert_to_tensor(state) for state in self.states[replica]]
        # On the first device, whatever scope is open.
        with graph_internals.single_device():
            results = keras.tree.flatten(self.metric.stateless_result(values))
        # Some metrics have a value for each class.
        return float(np.mean([np.mean(tf.convert_to_tensor(one).numpy()) for one in results]))


class ScoreProbe(StepProbe):
    """Sums times, losses and norms, and updates the metrics of each replica."""

    callback = "ReplicaMetrics"

    def __init__(self, metrics: Any) -> None:
        super().__init__(losses=True)
        self._metrics = metrics
        self.settings = tuple(keras.tree.flatten_with_path(metrics))
        self._devices: tuple[str, ...] = ()
        self.output_names: list[str] = []
        self.scores: list[Score] | None = None
        self._pending: list[Any] = []

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables; those of metrics follow when predictions have a shape."""
        super().build(strategy)
        group = ReplicaGroup(strategy)
        here = {replica.id: replica.device for replica in group.replicas}
        devices = tuple(here.get(number, HOST) for number in range(group.count))
        if devices != self._devices:
            self._devices, self.scores = devices, None

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        measured = super().on_replica(view)
        if not self._metrics:
            return measured
        pairs = pair_metrics(self._metrics, view.batch[1], view.y_pred, self.output_names)
        if self.scores is None:
            with tf.init_scope(), graph_internals.single_device():
                self.scores = [self._score(*pair) for pair in pairs]
                self.write_scores(self._pending)
        for score, (_, _, y, y_pred) in zip(self.scores, pairs, strict=True):
            before = [state.read_value() for state in score.states[view.replica]]
            after = score.metric.stateless_update_state(before, y, y_pred)
            # Some metrics turn into NaN without examples.
            measured += [
                tf.where(view.examples > 0, tf.cast(new, old.dtype), old)
                for new, old in zip(after, before, strict=True)
            ]
        return measured

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        super().collect([one[:OF_STEP_PROBE] for one in measured], allowed)
        for replica, one in enumerate(measured):
            states = [state for score in self.scores or () for state in score.states[replica]]
            for state, value in zip(states, one[OF_STEP_PROBE:], strict=True):
                with tf.device(state.device):
                    kept = value if allowed is None else tf.where(allowed, value, state)
                    state.assign(kept)

    def reset(self) -> None:
        self.write(no_sums(self.replicas))
        self._pending = []
        for score in self.scores or ():
            for states in score.states:
                for state, value in zip(states, score.start, strict=True):
                    state.assign(value)

    @property
    def score_values(self) -> list[np.ndarray]:
        """The values of the metrics' variables, by metric and replica."""
        return [state.numpy() for state in self._all_states()]

    def write_scores(self, values: list[Any]) -> None:
        """Restore the values of the metrics, now or when they are created."""
        self._pending = values
        states = self._all_states()
        if len(states) == len(values):
            for state, value in zip(states, values, strict=True):
                state.assign(value)

    def _all_states(self) -> list[tf.Variable]:
        scores = self.scores or []
        return [state for score in scores for states in score.states for state in states]

    def _score(self, name: str, metric: Any, y: Any, y_pred: Any) -> Score:
        metric = compiled_metric(metric, y, y_pred)
        # Some metrics create their variables when they first see predictions.
        metric.update_state(zeros_like(y), zeros_like(y_pred))
        metric.reset_state()
        start = [np.asarray(v.numpy()) for v in metric.variables]
        states = []
        for device in self._devices:
            with tf.device(device):
                states.append([tf.Variable(value, trainable=False) for value in start])
        return Score(f"{name}{metric.name}", metric, start, states)


def pair_metrics(
    metrics: Any, y: Any, y_pred: Any, output_names: list[str]
) -> list[tuple[str, Any, Any, Any]]:
    """The prefix of the name, the metric, its targets and its predictions, for each metric."""
    require_targets(metrics, y)
    if not isinstance(metrics, dict):
        if keras.tree.is_nested(y_pred) and len(keras.tree.flatten(y_pred)) > 1:
            raise value_error(
                "`metrics` is a list, and the model has several outputs.",
                "Expected a dict: for each output's name a list of metrics.",
                f"Pass for example metrics={{{output_names[0]!r}: ['mae']}}.",
                metrics=metrics,
                outputs=output_names,
            )
        y, y_pred = (keras.tree.flatten(part)[0] for part in (y, y_pred))
        return [("", metric, y, y_pred) for metric in metrics]
    found = []
    for output, several in metrics.items():
        several = several if isinstance(several, (list, tuple)) else [several]
        of_output = [output_of(part, output, output_names) for part in (y, y_pred)]
        found += [(f"{output}_", metric, *of_output) for metric in several]
    return found


def require_targets(metrics: Any, y: Any) -> None:
    if y is None:
        raise value_error(
            "`metrics` needs targets, and the data have none.",
            "Expected targets `y` to compare the predictions with.",
            "Leave out `metrics`: loss, gradients and times are shown without them.",
            metrics=metrics,
            y=y,
        )


def output_of(parts: Any, output: str, output_names: list[str]) -> Any:
    """The part of one output, in a dict or in the order of the outputs."""
    if isinstance(parts, dict) and output in parts:
        return parts[output]
    if not isinstance(parts, dict) and output in output_names:
        return keras.tree.flatten(parts)[output_names.index(output)]
    output_names = list(parts) if isinstance(parts, dict) else output_names
    raise value_error(
        "`metrics` names an output that the model does not have.",
        f"Expected some of {', '.join(map(repr, output_names))}.",
        output=output,
    )


def zeros_like(tensor: Any) -> tf.Tensor:
    return tf.zeros([1, *(1 if size is None else size for size in tensor.shape[1:])], tensor.dtype)
