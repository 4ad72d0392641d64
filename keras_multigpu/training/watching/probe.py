"""Probes: what callbacks measure, change or forbid inside a training step.

    before_step ──> pass ──> all-reduce ──> update ──> on_replica ──> allows ──> collect
    once            on each replica                    on each        once       once

A callback's own methods run between steps, on the host. They never see a replica's loss or
gradient, and reading anything waits for the devices. A probe is traced into the step: it keeps its
tensors in variables on the devices, and works with `steps_per_execution` and XLA.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_multigpu.training.shares import Rows
from keras_multigpu.training.watching.recorded import Own, Recorded, Seen, square_norm_of_all
from keras_multigpu.training.watching.stopwatch import Times


class NewValues(NamedTuple):
    """New values of variables that are not assigned yet: `StepView.update`."""

    trainable: list[tf.Tensor]
    optimizer: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class StepView:
    """What a probe sees of a replica's step. Gradients are unscaled.

    Experimental: it may change in any release, as `Probe` may.

    Attributes:
        replica: Its index, an integer.
        replicas: The number of replicas.
        update: The new values, which are not assigned yet.
        loss_scale: The factor of the loss whose gradient was taken.
        times: When things happened, if a probe is timed.
    """

    replica: int
    replicas: int
    update: NewValues
    loss_scale: tf.Tensor
    times: Times | None
    _rows: Rows
    _recorded: Recorded
    _seen: Seen

    @property
    def examples(self) -> tf.Tensor:
        """The replica's number of examples; a scalar integer that may be zero."""
        return self._rows.examples

    @property
    def global_batch_size(self) -> tf.Tensor:
        """The number of examples of all replicas."""
        return self._rows.global_batch_size

    @property
    def batch(self) -> tuple[Any, Any, Any]:
        """The replica's `(x, y, sample_weight)`."""
        return self._rows.data

    @property
    def y_pred(self) -> Any:
        """The predictions for `batch`; an example may have several rows."""
        return self._recorded.with_attached(self._seen.predictions)

    @property
    def loss(self) -> tf.Tensor:
        """The replica's part of the loss, on the scale of the whole batch.

        Its examples' summands of the loss, times the global batch size over their number, and what
        belongs to no example, such as a penalty of weights. Without masks and weights it is the
        loss of its examples. The mean over all examples is the loss. `total_loss` if the loss has
        no summands; zero without examples.
        """
        own = self._seen.loss
        if own.examples is None:
            return own.whole
        return tf.where(self.examples > 0, self._whole_of(own), 0.0)

    @property
    def total_loss(self) -> tf.Tensor:
        return self._seen.total_loss

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables that have a gradient, in the order of the gradients."""
        return [variable for _, variable in self._recorded.gradients]

    @property
    def gradients(self) -> list[Any]:
        """The gradients of `loss`; zero without examples."""
        parts = [self._whole_of(own, self.loss_scale) for own in self._seen.gradients]
        return self._recorded.packed_gradients(parts)

    @property
    def total_gradients(self) -> list[Any]:
        """The gradients of the global batch's loss, which the optimizer gets."""
        scale, parts = self.loss_scale, self._seen.total_gradients
        return self._recorded.packed_gradients(
            [p if p.dtype.is_integer else p / tf.cast(scale, p.dtype) for p in parts]
        )

    @property
    def square_norm(self) -> tf.Tensor:
        """The sum of the squares of `gradients`."""
        return tf.where(self.examples > 0, square_norm_of_all(self.gradients), 0.0)

    @property
    def total_square_norm(self) -> tf.Tensor:
        """The sum of the squares of `total_gradients`."""
        return square_norm_of_all(self.total_gradients)

    @property
    def statistics(self) -> list[tf.Tensor]:
        """The new values of layers' state, such as moving means."""
        return self._seen.statistics

    @property
    def everyones_sums(self) -> list[tf.Tensor]:
        """All that replicas have summed: the gradients of the scaled loss, the loss, statistics."""
        return [*self._seen.total_gradients, self.total_loss, *self._seen.statistics]

    def _whole_of(self, own: Own, divisor: tf.Tensor | float = 1.0) -> tf.Tensor:
        """A sum over examples, as if those of all replicas were like the replica's own."""
        known = [part for part in own if part is not None]
        if known[0].dtype.is_integer:
            # The indices of a sparse gradient.
            return known[0]
        whole, here = (tf.cast(n, tf.float32) for n in (self.global_batch_size, self.examples))
        parts = []
        if own.examples is not None:
            factor = tf.math.divide_no_nan(whole, here) / divisor
            parts.append(own.examples * tf.cast(factor, own.examples.dtype))
        if own.whole is not None:
            found = own.whole / tf.cast(divisor, own.whole.dtype)
            # Not times zero: what a replica without examples has of a whole batch may be NaN.
            parts.append(tf.where(here > 0, found, tf.zeros_like(found)))
        return tf.add_n(parts)


class Probe:
    """Measures or changes every training step, or forbids it.

    Experimental: this class and `StepView` may change in any release.

    A callback adds it with `model.training_run.watch(probe)` in `on_train_begin`. All methods but
    `build` are traced into the step, so they may use TensorFlow only.

    Attributes:
        timed: Whether the probe reads `StepView.times`.
        required: Whether a step that cannot be inspected is an error. Otherwise it is skipped, and
            `sees` is False.
        sees: Whether the last traced step could be inspected.
        settings: Whatever decides, beside the class, what the probe computes. With the same ones a
            later `fit` takes the probe of an earlier one, whose step is traced already; so nothing
            may be read from it between them. None traces each probe anew.
        callback: The callback that owns the probe, for error messages.
    """

    callback = "A callback"
    required = True
    sees = True
    timed = False
    settings: Hashable = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create variables; called before the first step, outside any graph."""

    def before_step(self) -> None:
        """Act before any replica reads its variables: set the learning rate, for example."""

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        """Measure on a replica, on its device."""
        return []

    def allows(self, measured: list[list[tf.Tensor]]) -> tf.Tensor | None:
        """A scalar boolean: if False, the step changes nothing. None allows every step.

        Args:
            measured: What `on_replica` returned, for each replica.
        """
        return None

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Store what was measured in the probe's variables, on the first device.

        Args:
            measured: What `on_replica` returned, for each replica.
            allowed: Whether all probes allowed the step; None if none can forbid it.
        """


P = TypeVar("P", bound=Probe)


def equal_one(probe: P, known: Sequence[Probe]) -> P:
    """The one of several probes that computes the same; this one if there is none."""
    for each in known:
        same = each is probe or (probe.settings is not None and each.settings == probe.settings)
        if type(each) is type(probe) and same:
            return each
    return probe
