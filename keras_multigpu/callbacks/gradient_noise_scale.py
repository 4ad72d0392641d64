"""`GradientNoiseScale`: how noisy the gradient is, and the batch size that this suggests.

The examples of a step come in k groups: the replicas, or their micro-batches. Group j has b_j of
the B examples and the mean gradient g_j; the gradient of the step is G = sum of (b_j / B) g_j.
With the true gradient g and the covariance C of one example's gradient,

    E |g_j|^2 = |g|^2 + tr(C) / b_j            E |G|^2 = |g|^2 + tr(C) / B

so that, with S = sum of (b_j / B) |g_j|^2,

    tr(C)  is estimated without bias by  B (S - |G|^2) / (k - 1)
    |g|^2                            by  |G|^2 - (estimate of tr(C)) / B

For groups of one size these are the formulas of McCandlish et al. (2018), appendix A.1. A
step with fewer than two groups that have examples is ignored.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu import pictures
from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.checks import require_number, require_positive_integer, value_error
from keras_multigpu.training.steps.probes import Probe, StepView
from keras_multigpu.writing import writes_here

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


class Noise(NamedTuple):
    """The estimated noise of the gradient.

    Attributes:
        steps: How many steps were measured.
        weight: The total weight of the means; zero before the first estimate.
        trace: The mean estimate of tr(C), the variance of one example's gradient.
        square: The mean estimate of |g|^2, which noise can make negative.
    """

    steps: int
    weight: float
    trace: float
    square: float

    @property
    def scale(self) -> float | None:
        """The simple noise scale, tr(C) / |g|^2; None if the true gradient is lost in noise."""
        if not self.weight or self.square <= 0:
            return None
        # Rounding can make the trace negative if there is no noise.
        return max(self.trace, 0.0) / self.square


NO_NOISE = Noise(0, 0.0, 0.0, 0.0)


class GradientNoiseScale(RunCallback):
    """Measures the simple noise scale of the gradient while the model trains.

    That is the variance of one example's gradient divided by the squared norm of the true gradient
    (McCandlish et al. 2018). It is estimated from the gradients of the replicas or of their
    micro-batches, at least two; no gradient is computed twice.

    Each epoch logs `noise_scale`, in examples, and `suggested_batch_size`, the nearest multiple of
    the number of replicas. Both are left out, with a warning in the log, while noise hides the true
    gradient, or if no step had two groups of examples to compare.

    Args:
        smoothing: How much each step keeps of the running means of variance and squared norm, from
            0 (only the last step) to below 1. The noise scale is the ratio of these means.
        every_steps: The number of steps between two points of the `curve`.
        picture: A `.png` file for the curve, drawn when training ends. Needs matplotlib.

    Attributes:
        curve: The points measured in this `fit`: `step`, `noise_scale` and `batch_size`.
    """

    needs = "inside"
    writes = ("noise_scale", "suggested_batch_size")

    def __init__(
        self, smoothing: float = 0.99, *, every_steps: int = 100, picture: str | Path | None = None
    ) -> None:
        super().__init__(picture=picture)
        fix = "Pass 0.99 to average over roughly the last hundred steps."
        require_number("smoothing", smoothing, lambda n: 0 <= n < 1, "from 0 to below 1", fix)
        require_positive_integer("every_steps", every_steps)
        self.smoothing = float(smoothing)
        self.every_steps = every_steps
        self.curve: list[Point] = []
        self._probe = NoiseProbe(self.smoothing)
        self._strategy: Any = None
        self._warned = False

    @property
    def noise_scale(self) -> float | None:
        """The noise scale measured so far; None if unknown."""
        return self._probe.read().scale if self._strategy is not None else None

    @property
    def state(self) -> dict[str, Any]:
        noise = self._probe.read() if self._strategy is not None else NO_NOISE
        return {"noise": list(noise), "curve": [list(point) for point in self.curve]}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._probe.write(Noise(*state["noise"]))
        self.curve = [Point(*point) for point in state["curve"]]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        if run.replicas * run.micro_batches < 2:
            raise value_error(
                "`GradientNoiseScale` has a single gradient in each step, and nothing to compare "
                "it with.",
                "Expected two replicas, or one with micro-batches.",
                "Pass `micro_batches=2` to `compile`.",
                replicas=run.replicas,
                micro_batches=run.micro_batches,
            )
        strategy = self.model.distribute_strategy
        if self._strategy is not None and self._strategy is not strategy:
            self._probe = NoiseProbe(self.smoothing)
        self._strategy = strategy
        run.watch(self._probe)
        self._probe.write(NO_NOISE)
        self.curve, self._warned = [], False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.every(self.every_steps, batch):
            self._add_point()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        noise = self._add_point()
        if noise.scale is None:
            self._warn(noise)
        elif logs is not None:
            logs["noise_scale"] = noise.scale
            logs["suggested_batch_size"] = suggested_batch_size(noise.scale, self.run.replicas)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.draw(noise_figure, self.curve, self.smoothing)

    def _add_point(self) -> Noise:
        noise = self._probe.read()
        known = self.curve[-1].step if self.curve else 0
        if noise.scale is not None and noise.steps > known:
            self.curve.append(Point(noise.steps, noise.scale, self.run.global_batch_size))
        return noise

    def _warn(self, noise: Noise) -> None:
        if self._warned or not writes_here():
            return
        self._warned = True
        if noise.weight:
            logger.warning(
                "GradientNoiseScale: the gradient cannot be told apart from noise yet, so the "
                "noise scale is left out of the logs. It is far larger than the batch, or training "
                "has converged; a `smoothing` closer to 1 averages over more steps."
            )
        else:
            logger.warning(
                "GradientNoiseScale: no step had finite gradients of two replicas or "
                "micro-batches, so there is nothing to compare and nothing in the logs."
            )


class NoiseProbe(Probe):
    """Computes exponential means of both estimates."""

    callback = "GradientNoiseScale"
    by_piece = True

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._steps: Any = None
        # The weight, and both means times the weight.
        self._sums: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once, because compiled steps contain them."""
        if self._sums is None:
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False)

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        """The examples and square norm of each group, and the square norm of the sum."""
        if not view.has_own_loss:
            raise value_error(
                "`GradientNoiseScale` does not work with this model's loss, which is computed from "
                "the whole batch.",
                "Expected losses that are sums over examples: Keras losses, or functions that "
                "return one value for each example.",
                "Return per-example values from the loss, do not use `run_eagerly`, or leave out "
                "the callback.",
                callback="GradientNoiseScale",
            )
        return [view.pieces, view.total_square_norm]

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        # In double precision: the noise is a small difference of large numbers.
        groups = tf.cast(tf.concat([pieces for pieces, _ in measured], axis=0), tf.float64)
        trace, square, known = estimates(groups, tf.cast(measured[0][1], tf.float64))
        if allowed is not None:
            known &= allowed
        new = tf.stack([tf.ones((), tf.float64), trace, square])
        mean = self._smoothing * self._sums + (1 - self._smoothing) * new
        self._sums.assign(tf.where(known, mean, self._sums))
        self._steps.assign_add(1)

    def read(self) -> Noise:
        """The estimates so far. Waits for the devices."""
        weight, trace, square = map(float, self._sums.numpy())
        steps = int(self._steps.numpy())
        if not weight:
            return NO_NOISE._replace(steps=steps)
        return Noise(steps, weight, trace / weight, square / weight)

    def write(self, noise: Noise) -> None:
        steps, weight, trace, square = noise
        self._steps.assign(steps)
        self._sums.assign([weight, trace * weight, square * weight])


def estimates(groups: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The estimates of tr(C) and |g|^2 of one step, and whether there are any.

    A group has its number of examples and |g_j|^2; `total` is |G|^2.
    """
    examples, squares = groups[:, 0], groups[:, 1]
    batch_size = tf.reduce_sum(examples)
    present = tf.cast(tf.math.count_nonzero(examples), groups.dtype)
    between = tf.math.divide_no_nan(tf.reduce_sum(examples * squares), batch_size) - total
    trace = tf.math.divide_no_nan(batch_size * between, present - 1)
    square = total - tf.math.divide_no_nan(trace, batch_size)
    # Gradients that overflowed, as in float16, carry no information.
    return trace, square, (present > 1) & tf.math.is_finite(trace) & tf.math.is_finite(square)


def suggested_batch_size(noise_scale: float, replicas: int) -> int:
    """The number of examples nearest to the noise scale that replicas can share equally."""
    return max(1, round(noise_scale / replicas)) * replicas


def noise_figure(points: list[Point], smoothing: float) -> Any:
    """A figure of the curve, with the batch sizes that were used."""
    figure, axes = pictures.one_panel()
    axes.set_yscale("log", base=2)
    # A logarithmic scale has no place for a noise scale of zero.
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
        figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel("training step", color=pictures.GREY)
    axes.set_ylabel("examples", color=pictures.GREY)
    line = f"running means with smoothing {smoothing:g}" if drawn else "nothing was measured"
    pictures.title(figure, "Gradient noise scale", line)
    return figure
