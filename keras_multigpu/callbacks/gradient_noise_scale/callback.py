"""`GradientNoiseScale`: how noisy the gradient is, and the batch size that this suggests."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_multigpu import pictures
from keras_multigpu.callbacks.fit_run import require_before_readers, run_of
from keras_multigpu.callbacks.gradient_noise_scale.probe import Noise, NoiseProbe
from keras_multigpu.checks import require_number, require_positive_integer, value_error
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.writing import writes_here

LOGGED = ("noise_scale", "suggested_batch_size")

logger = logging.getLogger("keras_multigpu")


class Point(NamedTuple):
    """One point of the curve.

    Attributes:
        step: The number of training steps until then.
        noise_scale: The noise scale, in examples.
        batch_size: The global batch size that was trained with; None if it was not known.
    """

    step: int
    noise_scale: float
    batch_size: int | None


class GradientNoiseScale(keras.callbacks.Callback):
    """Measures the simple noise scale of the gradient while the model trains.

    It is the variance of one example's gradient divided by the square of the true gradient's norm
    (McCandlish et al. 2018). Batches far below it waste steps, batches far above it waste examples.
    It is estimated from the replicas' gradients, or their micro-batches', against the gradient of
    the whole batch; no gradient is computed twice. After each epoch the logs have

    - `noise_scale`, in examples,
    - `suggested_batch_size`, the multiple of the number of replicas nearest to it.

    Both are left out, and a line of the logger `keras_multigpu` says why, while the estimate of
    the true gradient is not above zero or no step had two groups of examples to compare.

    Put it before callbacks that read these logs. Needs a model from `keras_multigpu.distribute`
    whose `train_step` calls `compute_loss` once, as Keras's does, and two replicas or
    micro-batches.

    Args:
        smoothing: How much of the running means of variance and square norm each step keeps,
            from 0 (the last step alone) to below 1. They are divided only after that.
        every_steps: The number of steps between two points of the `curve`. Each point waits for the
            devices once.
        picture: Where to draw the curve as a PNG when training ends. Needs matplotlib.

    Attributes:
        curve: The points measured in this `fit`.
    """

    def __init__(
        self, smoothing: float = 0.99, *, every_steps: int = 100, picture: str | Path | None = None
    ) -> None:
        super().__init__()
        fix = "Pass 0.99 to average over the last hundred steps or so."
        require_number("smoothing", smoothing, lambda n: 0 <= n < 1, "from 0 to below 1", fix)
        require_positive_integer("every_steps", every_steps)
        self.picture = pictures.picture_file(picture)
        self.smoothing = float(smoothing)
        self.every_steps = every_steps
        self.curve: list[Point] = []
        self._probe = NoiseProbe(self.smoothing)
        self._strategy: Any = None
        self._read_at = 0
        self._told = False

    @property
    def noise_scale(self) -> float | None:
        """The noise scale measured by now; None where it is not known."""
        return self._probe.read().scale if self._strategy is not None else None

    @property
    def state(self) -> dict[str, Any]:
        """The running means and the curve, to go on with."""
        noise = self._probe.read() if self._strategy is not None else Noise(0, 0.0, 0.0, 0.0)
        return {"noise": list(noise), "curve": [list(point) for point in self.curve]}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # Comes after `on_train_begin`, which makes the variables.
        self._probe.give(Noise(*state["noise"]))
        self.curve = [Point(*point) for point in state["curve"]]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = measurable_run(self)
        require_before_readers(self, run.callbacks, LOGGED)
        strategy = self.model.distribute_strategy
        if self._strategy is not None and self._strategy is not strategy:
            self._probe = NoiseProbe(self.smoothing)
        self._strategy = strategy
        run.watch(self._probe)
        self._probe.give(Noise(0, 0.0, 0.0, 0.0))
        self.curve, self._told = [], False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._read_at = self.model.training_run.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        step = self.model.training_run.step
        if step // self.every_steps > self._read_at // self.every_steps:
            self._note()
            self._read_at = step

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        noise = self._note()
        if noise.scale is None:
            self._tell(noise)
        elif logs is not None:
            replicas = self.model.training_run.replicas
            logs["noise_scale"] = noise.scale
            logs["suggested_batch_size"] = suggested_batch_size(noise.scale, replicas)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.picture is not None:
            draw(self.curve, self.smoothing, self.picture)

    def _note(self) -> Noise:
        noise = self._probe.read()
        known = self.curve[-1].step if self.curve else 0
        if noise.scale is not None and noise.steps > known:
            size = self.model.training_run.global_batch_size
            self.curve.append(Point(noise.steps, noise.scale, size))
        return noise

    def _tell(self, noise: Noise) -> None:
        if self._told or not writes_here():
            return
        self._told = True
        if noise.weight:
            logger.warning(
                "GradientNoiseScale: the gradients cannot be told from noise yet, so the noise "
                "scale is left out of the logs. It is far larger than the batch, or training has "
                "come to its end; a `smoothing` closer to 1 averages over more steps."
            )
        else:
            logger.warning(
                "GradientNoiseScale: no step had finite gradients of two replicas or "
                "micro-batches, so there is nothing to compare and nothing in the logs."
            )


def suggested_batch_size(noise_scale: float, replicas: int) -> int:
    """The number of examples nearest to the noise scale that replicas can share equally."""
    return max(1, round(noise_scale / replicas)) * replicas


def measurable_run(callback: keras.callbacks.Callback) -> TrainingRun:
    run = run_of(callback)
    if run.replicas * run.micro_batches < 2:
        raise value_error(
            "`GradientNoiseScale` has a single gradient in each step, and nothing to compare "
            "it with.",
            "Expected two replicas, or one with micro-batches.",
            "Pass `micro_batches=2` to `compile`.",
            replicas=run.replicas,
            micro_batches=run.micro_batches,
        )
    return run


def draw(points: Sequence[tuple[int, float, int | None]], smoothing: float, path: Path) -> None:
    """Draw the curve of points, each of step, noise scale and batch size."""
    figure, axes = pictures.one_panel(3.9)
    axes.set_yscale("log", base=2)
    # On a logarithmic scale there is no place for a noise scale of zero.
    curve = [(step, scale) for step, scale, _ in points if scale > 0]
    used = [(step, size) for step, _, size in points if size is not None]
    if curve:
        label = f"noise scale, {curve[-1][1]:,.0f} examples at the end"
        axes.plot(*zip(*curve, strict=True), "-o", color=pictures.BLUE, markersize=3, label=label)
    if used:
        label = f"batch size used, {used[-1][1]:,} examples at the end"
        axes.step(*zip(*used, strict=True), color=pictures.ORANGE, where="pre", label=label)
    if drawn := [*curve, *used]:
        heights = [height for _, height in drawn]
        axes.set_xlim(0, max(step for step, _ in drawn))
        axes.set_ylim(min(heights) / 2**0.5, max(heights) * 2**0.5)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel("training step", color=pictures.GREY)
    axes.set_ylabel("examples", color=pictures.GREY)
    line = f"running means with smoothing {smoothing:g}" if drawn else "nothing was measured"
    pictures.title(figure, "Gradient noise scale", line)
    pictures.write_png(figure, path)
