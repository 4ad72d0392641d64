"""Estimates the noise of the gradient inside the training step.

The examples of a step come in k groups: the replicas, or their micro-batches. Group j has b_j of
the B examples and the mean gradient g_j; the gradient of the step is G = sum of (b_j / B) g_j.
With the true gradient g and the covariance C of one example's gradient,

    E |g_j|^2 = |g|^2 + tr(C) / b_j            E |G|^2 = |g|^2 + tr(C) / B

so that, with S = sum of (b_j / B) |g_j|^2,

    tr(C)  is estimated without bias by  B (S - |G|^2) / (k - 1)
    |g|^2                            by  |G|^2 - (estimate of tr(C)) / B

For groups of one size these are the formulas of McCandlish et al. (2018), appendix A.1. Groups
without examples have no weight; a step with fewer than two groups says nothing.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.training.steps.probes import Probe, Seen


class Noise(NamedTuple):
    """What is known of the noise of the gradient.

    Attributes:
        steps: How many steps were seen.
        weight: How much the means weigh: zero before the first estimate.
        trace: The mean estimate of tr(C), the variance of one example's gradient.
        square: The mean estimate of |g|^2, which noise can make negative.
    """

    steps: int
    weight: float
    trace: float
    square: float

    @property
    def scale(self) -> float | None:
        """The simple noise scale, tr(C) / |g|^2; None where it cannot be told from infinity."""
        if not self.weight or self.square <= 0:
            return None
        # Without any noise, rounding can leave a trace below zero.
        return max(self.trace, 0.0) / self.square


class NoiseProbe(Probe):
    """Keeps exponential means of both estimates."""

    callback = "GradientNoiseScale"
    by_piece = True

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._steps: Any = None
        # The weight and both means, not divided by the weight yet.
        self._sums: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables; a second `fit` keeps them, because steps compiled hold them."""
        if self._sums is None:
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False)

    def on_replica(self, seen: Seen) -> list[tf.Tensor]:
        """The examples and the square norm of each group, and the square norm of the sum."""
        if not seen.has_own_loss:
            raise value_error(
                "`GradientNoiseScale` cannot be measured with this model's loss, which is "
                "computed from the whole batch.",
                "Expected losses that are sums over examples: Keras losses, or functions that "
                "return one value for each example.",
                "Return per-example values from the loss, leave out `run_eagerly`, or leave out "
                "the callback.",
                callback="GradientNoiseScale",
            )
        return [seen.pieces, seen.total_square_norm]

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
        """What is known by now; waits for the devices."""
        weight, trace, square = map(float, self._sums.numpy())
        steps = int(self._steps.numpy())
        if not weight:
            return Noise(steps, 0.0, 0.0, 0.0)
        return Noise(steps, weight, trace / weight, square / weight)

    def give(self, noise: Noise) -> None:
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
    # Gradients that have overflowed, as in float16, say nothing.
    return trace, square, (present > 1) & tf.math.is_finite(trace) & tf.math.is_finite(square)
