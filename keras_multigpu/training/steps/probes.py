"""Probes: what callbacks measure, change or forbid inside a training step.

    before_step ──> pass ──> all-reduce ──> update ──> on_replica ──> allows ──> collect
    once            on each replica                    on each        once       once

A callback's own methods run between steps, on the host. They never see a replica's loss or
gradient, and reading anything waits for the devices. A probe is traced into the step: it keeps its
tensors in variables on the devices, and works with `steps_per_execution` and XLA.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.steps.taps import (
    Own,
    Tapped,
    Taps,
    first_of,
    gradient_of,
    square_norm_of_all,
)


class Times(NamedTuple):
    """When a replica began its pass, had its gradients, and had the summed ones; in seconds.

    `hidden` is for how long it exchanged sums while it still computed.
    """

    started: tf.Tensor
    computed: tf.Tensor
    reduced: tf.Tensor
    hidden: Any = 0.0

    @property
    def moments(self) -> list[tf.Tensor]:
        """The points in time, without `hidden`."""
        return [self.started, self.computed, self.reduced]


class NewValues(NamedTuple):
    """New values of variables that are not assigned yet: `StepView.update`."""

    trainable: list[tf.Tensor]
    optimizer: list[tf.Tensor]


class StepView:
    """What a probe sees of a replica's step. Gradients are unscaled.

    Experimental: it may change in any release, as `Probe` may.

    Args:
        replica: Its index, an integer.
        replicas: The number of replicas.
        rows: Its share of the batch, which may be empty.
        taps: What was recorded of the step.
        tapped: What the replica has of it.
        update: The new values, which are not assigned yet.
        scale: The factor of the loss whose gradient was taken.
        times: When things happened, if a probe is timed.
    """

    def __init__(
        self,
        *,
        replica: int,
        replicas: int,
        rows: Rows,
        taps: Taps,
        tapped: Tapped,
        update: NewValues,
        scale: tf.Tensor,
        times: Times | None,
    ) -> None:
        self.replica = replica
        self.replicas = replicas
        self.update = update
        self.times = times
        self._rows, self._taps, self._tapped, self._scale = rows, taps, tapped, scale

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
        leaves = keras.tree.flatten(self._taps.record.y_pred)
        found = self._tapped.predictions
        model_internals.attach(found[: len(leaves)], found[len(leaves) :])
        return keras.tree.pack_sequence_as(self._taps.record.y_pred, found[: len(leaves)])

    @property
    def loss(self) -> tf.Tensor:
        """The replica's part of the loss, on the scale of the whole batch.

        Its examples' summands of the loss, times the global batch size over their number, and what
        belongs to no example, such as a penalty of weights. Without masks and weights it is the
        loss of its examples. Their mean over all examples is the loss. `total_loss` if the loss
        has no summands; zero without examples.
        """
        own, whole = self._tapped.loss
        if own is None:
            return whole
        return tf.where(self.examples > 0, self._of(self._tapped.loss), tf.zeros_like(own))

    @property
    def total_loss(self) -> tf.Tensor:
        return self._tapped.total_loss

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables that have a gradient, in the order of the gradients."""
        return [variable for _, variable in self._taps.record.gradients]

    @property
    def gradients(self) -> list[Any]:
        """The gradients of `loss`."""
        own = [
            # Of a sparse gradient the indices stay as they are.
            [self._of(values, self._scale), *(first_of(each) for each in indices)]
            for values, *indices in self._tapped.own
        ]
        return self._gradients(own)

    @property
    def total_gradients(self) -> list[Any]:
        """The gradients of the global batch's loss, which the optimizer gets."""
        return [scaled(g, 1.0 / self._scale) for g in self._gradients(self._tapped.totals)]

    @property
    def square_norm(self) -> tf.Tensor:
        """The sum of the squares of `gradients`."""
        return tf.where(self.examples > 0, square_norm_of_all(self.gradients), 0.0)

    @property
    def total_square_norm(self) -> tf.Tensor:
        """The sum of the squares of `total_gradients`."""
        return square_norm_of_all(self._gradients(self._tapped.totals)) / tf.square(self._scale)

    @property
    def statistics(self) -> list[tf.Tensor]:
        """The new values of layers' state, such as moving means."""
        return self._tapped.statistics

    @property
    def everyones_sums(self) -> list[tf.Tensor]:
        """All that replicas have summed: the gradients of the scaled loss, the loss, statistics."""
        totals = [parts[0] for parts in self._tapped.totals]
        return [*totals, self.total_loss, *self._tapped.statistics]

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale."""
        return self._scale

    def _of(self, part: Own, divisor: tf.Tensor | float = 1.0) -> tf.Tensor:
        """A replica's part of a sum over examples, as if all were like its own."""
        if part.examples is None:
            return part.whole / tf.cast(divisor, part.whole.dtype)
        whole, own = (tf.cast(n, tf.float32) for n in (self.global_batch_size, self.examples))
        factor = tf.math.divide_no_nan(whole, own) / divisor
        found = part.examples * tf.cast(factor, part.examples.dtype)
        return found if part.whole is None else found + self._of(Own(None, part.whole), divisor)

    def _gradients(self, tensors: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
        pairs = zip(tensors, self.variables, strict=True)
        return [gradient_of(parts, variable) for parts, variable in pairs]


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
        callback: The callback that owns the probe, for error messages.
    """

    callback = "A callback"
    required = True
    sees = True
    timed = False

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


def now_that(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The time, in seconds, once these tensors are computed; without tensors, the time now."""
    if not tensors:
        return tf.timestamp()
    with tf.control_dependencies(tensors):
        number = tf.reshape(tensors[0], [-1])[:1]
    # A GPU has finished its work only once a number of it has arrived on the host.
    with tf.device(number.device if "CPU" in number.device else HOST):
        with tf.control_dependencies([tf.identity(number)]):
            return tf.timestamp()


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, dense or sparse, times a number."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
