"""`ReplicaMetrics`: what each replica does."""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.timing import (
    StepClock,
    StepProbe,
    Sums,
    Timing,
    no_sums,
    of_replicas,
)
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.keras_internals.compile_internals import compiled_metrics
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.watching.probe import StepView

OF_REPLICA = re.compile(r"replica(_\d+|s)/")
"""What the names begin with."""

OF_STEP_PROBE = 2
"""How many tensors of a replica are `StepProbe`'s."""


class ReplicaMetrics(RunCallback):
    """Reports loss, metrics, gradients and times of each replica.

    It measures inside the step, sums on the devices, and reads once per epoch. The logs of the
    epoch, but not the progress bar, get each value as `replica_0/loss` and so on, and the range
    over all replicas as `replicas/loss_min`, `_max` and `_spread`.

    Args:
        metrics: Names or `keras.metrics.Metric` objects, as in `compile`; for several outputs a
            dict of lists by output name. They need targets.
    """

    writes = ("replica_0/loss", "replicas/loss_spread")  # And others like these.
    single = True

    def __init__(self, metrics: Any = ()) -> None:
        super().__init__()
        self.metrics = check_metrics(metrics)
        self._probe = ScoreProbe(self.metrics)
        self._clock: StepClock
        self._restored: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any]:
        return {
            "sums": list(self._probe.read()),
            "scores": self._probe.score_values,
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._restored = state

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        if self.metrics and run.feed.source.spec is not None:
            require_targets(self.metrics, run.feed.source.spec[1])
        self._probe = run.watch(ScoreProbe(self.metrics))
        self._probe.output_names = list(getattr(self.model, "output_names", None) or ["output"])
        self._clock = StepClock(run, self._probe)
        run.after_each("on_train_batch_end", self._clock.step_done)
        for callback in run.callbacks:
            if isinstance(callback, keras.callbacks.ProgbarLogger):
                vars(callback)["on_epoch_end"] = without_replicas(callback.on_epoch_end)
                run.after_end(functools.partial(vars(callback).pop, "on_epoch_end"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # A resumed epoch continues the sums from before the interruption.
        restored, self._restored = self._restored, None
        self._probe.reset()
        self._clock.begin_epoch()
        replicas = self._probe.replicas
        if restored is not None and self.run.step and len(restored["sums"][0]) == replicas:
            self._probe.write(Sums(*restored["sums"]))
            self._probe.write_scores(restored["scores"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        sums, scores = self._probe.read(), self._probe.results()
        measured = measure(self.run.group, sums, scores, self._clock.read())
        if logs is not None:
            logs |= in_logs(measured)


def without_replicas(show: Callable[..., Any]) -> Callable[..., None]:
    """The hook of a progress bar, without logs of which there are dozens."""

    def call(epoch: int, logs: Any = None) -> None:
        few = {name: value for name, value in (logs or {}).items() if not OF_REPLICA.match(name)}
        show(epoch, few)

    return call


def check_metrics(metrics: Any) -> Any:
    several = isinstance(metrics, (list, tuple, dict))
    flat = keras.tree.flatten(metrics) if several else []
    if not several or not all(isinstance(one, str) or callable(one) for one in flat):
        raise value_error(
            "`metrics` holds something that is not a metric.",
            "Expected a list of names and `keras.metrics.Metric` objects, or a dict of lists.",
            metrics=metrics,
        )
    for metric in flat:
        # Only the targets show which accuracy is meant.
        if isinstance(metric, str) and metric.lower() not in ("accuracy", "acc"):
            keras.metrics.get(metric)
    return metrics if isinstance(metrics, dict) else list(metrics)


def measure(
    group: ReplicaGroup, sums: Sums, scores: dict[str, np.ndarray], timing: Timing
) -> dict[str, np.ndarray]:
    """By name a value for each replica; NaN if there is none. Every process has to call it."""
    timings = of_replicas(timing, group)
    steps = np.full(len(timings), float(timing.steps))
    # An epoch whose steps were all compiled has wall time, but no steps.
    wall = np.array([each.wall if timing.steps else 0.0 for each in timings])
    return {
        "loss": ratio(sums.loss, sums.examples),
        **{name: np.where(sums.examples > 0, value, np.nan) for name, value in scores.items()},
        "examples": sums.examples,
        "examples_per_second": ratio(timing.sums.examples, wall),
        "gradient_norm": ratio(sums.gradient_norm, sums.present),
        "compute_time": ratio(timing.sums.compute, steps),
        "sync_time": ratio(timing.sums.sync, steps),
        "step_time": ratio(wall, steps),
        "data_wait": ratio(np.array([each.data_wait for each in timings]), steps),
    }


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def in_logs(measured: dict[str, np.ndarray]) -> dict[str, float]:
    """The values of an epoch under their names in the logs."""
    logs: dict[str, float] = {}
    for name, values in measured.items():
        found = {f"replica_{index}/{name}": value for index, value in enumerate(values)}
        known = values[~np.isnan(values)]
        low, high = (known.min(), known.max()) if len(known) else (np.nan, np.nan)
        # Infinity minus infinity would be NaN.
        spread = 0.0 if low == high else high - low
        for kind, value in (("min", low), ("max", high), ("spread", spread)):
            found[f"replicas/{name}_{kind}"] = value
        logs |= {key: float(value) for key, value in found.items()}
    return logs


class ScoreProbe(StepProbe):
    """Sums times, losses and norms, and updates the metrics of each replica.

    Attributes:
        output_names: The names of the model's outputs, as `metrics` may use them.
    """

    callback = "ReplicaMetrics"

    def __init__(self, metrics: Any) -> None:
        super().__init__(losses=True)
        self._metrics = metrics
        self.settings = tuple(keras.tree.flatten_with_path(metrics))
        self._devices: tuple[str, ...] = ()
        self.output_names: list[str] = []
        self._forget_scores()

    def _forget_scores(self) -> None:
        self._scores: Any = None
        # The metrics' variables at the start, and those of each replica.
        self._start: list[np.ndarray] = []
        self._states: list[list[tf.Variable]] = []
        self._pending: list[Any] = []

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables; those of metrics follow when predictions have a shape."""
        super().build(strategy)
        group = ReplicaGroup(strategy)
        here = {replica.id: replica.device for replica in group.replicas}
        devices = tuple(here.get(number, HOST) for number in range(group.count))
        if devices != self._devices:
            self._devices = devices
            self._forget_scores()

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        measured = super().on_replica(view)
        if not self._metrics:
            return measured
        y, y_pred = view.batch[1], view.y_pred
        require_targets(self._metrics, y)
        if self._scores is None:
            with tf.init_scope(), graph_internals.single_device():
                self._make_scores(y, y_pred)
        before = [state.read_value() for state in self._states[view.replica]]
        after = self._scores.stateless_update_state(before, y, y_pred)
        # Some metrics turn into NaN without examples.
        return measured + [
            tf.where(view.examples > 0, tf.cast(new, old.dtype), old)
            for new, old in zip(after, before, strict=True)
        ]

    def _make_scores(self, y: Any, y_pred: Any) -> None:
        scores = compiled_metrics(self._metrics, self.output_names)
        # Some metrics create their variables when they first see predictions.
        scores.update_state(*keras.tree.map_structure(zeros_like, (y, y_pred)))
        scores.reset_state()
        self._start = [np.asarray(variable.numpy()) for variable in scores.variables]
        for device in self._devices:
            with tf.device(device):
                states = [tf.Variable(value, trainable=False) for value in self._start]
                self._states.append(states)
        self._scores = scores
        self.write_scores(self._pending)

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        super().collect([one[:OF_STEP_PROBE] for one in measured], allowed)
        for states, one in zip(self._states, measured, strict=False):
            for state, value in zip(states, one[OF_STEP_PROBE:], strict=True):
                with tf.device(state.device):
                    kept = value if allowed is None else tf.where(allowed, value, state)
                    state.assign(kept)

    def results(self) -> dict[str, np.ndarray]:
        """By name the value of each replica; some metrics have one for each class."""
        found = []
        # On the first device, whatever scope is open.
        with graph_internals.single_device():
            for states in self._states:
                results = self._scores.stateless_result([s.read_value() for s in states])
                found.append({name: mean_of(result) for name, result in results.items()})
        return {name: np.array([one[name] for one in found]) for name in (found or [{}])[0]}

    def reset(self) -> None:
        self.write(no_sums(self.replicas))
        self._pending = []
        self.write_scores(self._start * len(self._states))

    @property
    def score_values(self) -> list[np.ndarray]:
        """The values of the metrics' variables, by replica."""
        return [state.numpy() for states in self._states for state in states]

    def write_scores(self, values: list[Any]) -> None:
        """Restore the values of the metrics, now or when they are created."""
        self._pending = values
        all_states = [state for states in self._states for state in states]
        if len(all_states) == len(values):
            for state, value in zip(all_states, values, strict=True):
                state.assign(value)


def require_targets(metrics: Any, y: Any) -> None:
    if y is None:
        raise value_error(
            "`metrics` needs targets, and the data have none.",
            "Expected targets `y` to compare the predictions with.",
            "Leave out `metrics`: loss, gradients and times are shown without them.",
            metrics=metrics,
            y=y,
        )


def mean_of(result: Any) -> float:
    values = [tf.convert_to_tensor(one).numpy() for one in keras.tree.flatten(result)]
    return float(np.mean([np.mean(value) for value in values]))


def zeros_like(tensor: Any) -> tf.Tensor:
    return tf.zeros([1, *(1 if size is None else size for size in tensor.shape[1:])], tensor.dtype)
