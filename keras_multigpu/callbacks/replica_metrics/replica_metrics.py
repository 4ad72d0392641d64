"""`ReplicaMetrics`: what each replica does."""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_multigpu.callbacks.replica_metrics.scores import ScoreProbe, require_targets
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.timing import StepClock, Sums, Timing, of_replicas
from keras_multigpu.checks import value_error
from keras_multigpu.training.replica_group import ReplicaGroup

OF_REPLICA = re.compile(r"replica(_\d+|s)/")
"""What the names begin with."""


class ReplicaMetrics(RunCallback):
    """Reports loss, metrics, gradients and times of each replica.

    It measures inside the step, sums on the devices, and reads once per epoch. The logs of the
    epoch, but not the progress bar, get each value as `replica_0/loss` and so on, and the range
    over all replicas as `replicas/loss_min`, `_max` and `_spread`.

    Args:
        metrics: Names or `keras.metrics.Metric` objects, as in `compile`; for several outputs a
            dict of lists by output name. They need targets.
    """

    needs = "inside"
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
        run = self.run
        scores = {
            score.name: np.array([score.result(replica) for replica in range(run.replicas)])
            for score in self._probe.scores or ()
        }
        measured = measure(run.group, self._probe.read(), scores, self._clock.read())
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
