"""`ReplicaMetrics`: what each replica does."""

import logging
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_multigpu.callbacks.replica_metrics.scores import ScoreProbe, require_targets
from keras_multigpu.callbacks.replica_metrics.window import (
    SLOW_WINDOWS,
    Slowest,
    Window,
    behind,
    window_of,
)
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.timing import StepClock, Sums, Timing, no_sums, since
from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.keras_internals.compile_internals import compile_arguments
from keras_multigpu.writing import writes_here

logger = logging.getLogger("keras_multigpu")

# Of more measurements, `windows` has every second one.
MOST_WINDOWS = 2000


class Mark(NamedTuple):
    """The sums and times of an epoch until some step."""

    step: int
    sums: Sums
    timing: Timing


def epoch_start(replicas: int) -> Mark:
    return Mark(0, no_sums(replicas), Timing(0.0, 0.0, 0.0, 0, no_sums(replicas)))


class ReplicaMetrics(RunCallback):
    """Reports loss, metrics, gradients and times of each replica.

    It measures inside the step, sums on the devices, and reads once per epoch. The history, but not
    the progress bar, gets each value as `replica_0/loss` and so on, and the range over all replicas
    as `replicas/loss_min`, `_max` and `_spread`.

    Args:
        metrics: Names or `keras.metrics.Metric` objects, as in `compile`; for several outputs a
            dict of lists by output name. They need targets.
        every_steps: Also measure every `every_steps` steps, for `windows`.

    Attributes:
        windows: The measurements of the model that was trained last.
    """

    needs = "inside"
    single = True

    def __init__(
        self,
        metrics: Any = (),
        *,
        every_steps: int | None = None,
    ) -> None:
        super().__init__()
        if every_steps is not None:
            require_positive_integer("every_steps", every_steps)
        self.metrics = checked_metrics(metrics)
        self.every_steps = every_steps
        self.windows: list[Window] = []
        self._behind: Slowest | None = None
        self._named: set[int] = set()
        self._probe = ScoreProbe(self.metrics)
        self._measured: tuple[Any, Any] | None = None
        self._clock: StepClock
        self._begun = False
        self._last = epoch_start(1)
        self._restored: dict[str, Any] | None = None

    @property
    def slowest(self) -> Slowest | None:
        """The replica that stays behind: `replica`, `worker`, `device`, `factor`; or None."""
        found = self._behind
        return None if found is None or found.windows < SLOW_WINDOWS else found

    @property
    def state(self) -> dict[str, Any]:
        # A checkpoint may be taken before this callback has seen the step.
        self._step_done()
        return {
            "sums": list(self._probe.read()),
            "scores": self._probe.score_values,
            "last_step": self._last.step,
            "last_sums": list(self._last.sums),
            "behind": None if self._behind is None else list(self._behind),
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        found = state["behind"]
        self._behind = None if found is None else Slowest(*found)
        self._restored = state

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        if self.metrics and run.feed.source.spec is not None:
            require_targets(self.metrics, run.feed.source.spec[1])
        self._reset_for_another_model()
        self._named, self._begun = set(), False
        self._probe = run.watch(ScoreProbe(self.metrics))
        self._probe.output_names = list(getattr(self.model, "output_names", None) or ["output"])
        self._clock = StepClock(run, self._probe)
        run.after_each("on_train_batch_end", self._step_done)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # A resumed epoch continues the sums from before the interruption.
        restored, self._restored = self._restored, None
        self._probe.reset()
        self._clock.begin_epoch()
        self._begun = True
        replicas = self._probe.replicas
        self._last = epoch_start(replicas)
        if restored is not None and self.run.step and len(restored["sums"][0]) == replicas:
            self._probe.write(Sums(*restored["sums"]))
            self._probe.write_scores(restored["scores"])
            sums = Sums(*restored["last_sums"])
            self._last = Mark(restored["last_step"], sums, self._last.timing)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mark = self._mark()
        whole = self._window(mark.sums, mark.timing)
        for callback in self.run.callbacks:
            if isinstance(callback, keras.callbacks.History):
                add_to_history(callback.history, whole)
        if mark.step > self._last.step:
            self._report(mark)

    def _reset_for_another_model(self) -> None:
        """Start over if the model or what it was compiled with is another one."""
        now = self.model, compile_arguments(self.model)
        before, self._measured = self._measured, now
        if before is None or all(a is b for a, b in zip(before, now, strict=True)):
            return
        self.windows, self._behind = [], None

    def _step_done(self) -> None:
        # A resumed run has a number of steps before its first epoch begins.
        if not self._begun or self._clock.step == self.run.step:
            return
        self._clock.step_done()
        if self.every_steps and self.every(self.every_steps, self.run.step - 1):
            self._report(self._mark())

    def _mark(self) -> Mark:
        return Mark(self.run.step, self._probe.read(), self._clock.read())

    def _window(self, sums: Sums, timing: Timing) -> Window:
        run = self.run
        scores = {
            score.name: np.array([score.result(replica) for replica in range(run.replicas)])
            for score in self._probe.scores or ()
        }
        return window_of(run.epoch, run.step, run.group, sums, scores, timing)

    def _report(self, mark: Mark) -> None:
        """Store what was measured since the last report."""
        last, self._last = self._last, mark
        window = self._window(since(last.sums, mark.sums), since(last.timing, mark.timing))
        if len(self.windows) >= MOST_WINDOWS:
            # Every second one, including the newest.
            self.windows = self.windows[1::2]
        self.windows.append(window)
        self._judge(window)

    def _judge(self, window: Window) -> None:
        """Warn once if a replica stays behind."""
        self._behind = behind(window, self._behind)
        slowest = self.slowest
        if slowest is not None and slowest.replica not in self._named and writes_here():
            self._named.add(slowest.replica)
            logger.warning(
                "Replica %d (%s, worker %d) lags behind: its passes took %.2f times as long as "
                "those of the others, in %d measurements in a row. All replicas wait for it.",
                slowest.replica,
                slowest.device,
                slowest.worker,
                slowest.factor,
                slowest.windows,
            )


def checked_metrics(metrics: Any) -> Any:
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


def add_to_history(history: dict[str, list[Any]], window: Window) -> None:
    """Add the values of an epoch to Keras's history, but not to the progress bar."""
    for name, values in window.values.items():
        found = {f"replica_{index}/{name}": value for index, value in enumerate(values)}
        known = values[~np.isnan(values)]
        low, high = (known.min(), known.max()) if len(known) else (np.nan, np.nan)
        # Infinity minus infinity would be NaN.
        spread = 0.0 if low == high else high - low
        for kind, value in (("min", low), ("max", high), ("spread", spread)):
            found[f"replicas/{name}_{kind}"] = value
        for key, value in found.items():
            history.setdefault(key, []).append(float(value))
