"""Probes: what callbacks measure, change or forbid inside a training step.

    before_step ──> pass ──> all-reduce ──> update ──> on_replica ──> allows ──> collect
    once            on each replica                    on each        once       once

A callback's own methods run between steps, on the host, where a replica's loss or gradient is
never seen and reading anything waits for the devices. A probe is traced into the step: its tensors
stay on the devices until somebody reads the variables that it keeps them in, and it works with
`steps_per_execution` and XLA.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.exchange.sparse_gradients import zero_unless
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_pass.output_rows import FIRST_TO_LAST
from keras_multigpu.training.replica_pass.passes import Layout, Outcome, Summands, Update
from keras_multigpu.training.shares import Rows, first_rows


class Times(NamedTuple):
    """When a replica began its pass, had its gradients, and had everyone's; in seconds."""

    started: tf.Tensor
    computed: tf.Tensor
    reduced: tf.Tensor


class Seen:
    """What one replica saw in a step, for a probe. Gradients are without loss scaling.

    Args:
        replica: Its index, an integer.
        replicas: The number of replicas.
        rows: Its share of the batch; a replica without examples has borrowed a row.
        variables: The model's trainable variables.
        outcome: What its pass returned.
        layout: What lies where in it.
        packs: The packs, summed over replicas.
        slices: The sparse gradients of all replicas.
        update: The new values, which are not assigned yet.
        scale: The factor of the loss whose gradient was taken.
        whole_loss: The loss of the global batch where no replica has one of its own.
        times: When things happened, if a probe is timed.
    """

    def __init__(
        self,
        *,
        replica: int,
        replicas: int,
        rows: Rows,
        variables: Sequence[keras.Variable],
        outcome: Outcome,
        layout: Layout,
        packs: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
        update: Update,
        scale: tf.Tensor,
        whole_loss: tf.Tensor | None,
        times: Times | None,
    ) -> None:
        self.replica = replica
        self.replicas = replicas
        self.update = update
        self.times = times
        self._rows = rows
        self._variables = variables
        self._outcome = outcome
        self._layout = layout
        self._packs = packs
        self._slices = slices
        self._scale = scale
        self._whole_loss = whole_loss

    @property
    def examples(self) -> tf.Tensor:
        """How many examples the replica had; a scalar integer, perhaps zero."""
        return self._rows.examples

    @property
    def global_batch_size(self) -> tf.Tensor:
        """How many examples all replicas had together."""
        return self._rows.global_batch_size

    @property
    def batch(self) -> tuple[Any, Any, Any]:
        """The replica's `(x, y, sample_weight)`, without a borrowed row."""
        return first_rows(self._rows.data, self.examples)

    @property
    def y_pred(self) -> Any:
        """The predictions for them, of which each may have several rows."""
        shown = tf.where(self.examples > 0, FIRST_TO_LAST, 0)
        y_pred, attached = first_rows((self._outcome.y_pred, self._outcome.attached), shown)
        model_internals.attach(keras.tree.flatten(y_pred), attached)
        return y_pred

    @property
    def loss(self) -> tf.Tensor:
        """The loss of the replica's examples as if they were all, zero without any.

        That is their mean, or what the loss's `reduction` asks for, without the masked values.
        Several losses of which some have masks or weights of their own count by examples.
        """
        if self._whole_loss is not None:
            return self._whole_loss
        loss = self._layout.first_loss(self._outcome.packs)
        return tf.math.divide_no_nan(loss, self._outcome.part)

    @property
    def total_loss(self) -> tf.Tensor:
        return self._whole_loss if self._whole_loss is not None else self.update.losses[0]

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables that have a gradient, in the order of the gradients."""
        kinds = self._layout.gradients
        return [self._variables[index] for index in kinds.dense + kinds.sparse]

    @property
    def gradients(self) -> list[Any]:
        """The gradients of the replica's examples as if the whole batch were like them.

        These are the gradients of the mean of its summands of the loss, each times the global batch
        size. Without masks and weights that is the mean loss of its examples. Zero without any.
        """
        known = [*self._local.gradients, *self._local_slices]
        return [scaled(gradient, self._to_mean / self._scale) for gradient in known]

    @property
    def total_gradients(self) -> list[Any]:
        """The gradients of the loss of the global batch: what the optimizer got."""
        known = [*self._total.gradients, *self._slices]
        return [scaled(gradient, 1.0 / self._scale) for gradient in known]

    @property
    def square_norm(self) -> tf.Tensor:
        """The sum of the squares of `gradients`, in few operations."""
        return self._layout.square_norm(self._outcome.packs, self._local_slices) * tf.square(
            self._to_mean / self._scale
        )

    @property
    def pieces(self) -> tf.Tensor:
        """For each micro-batch its number of examples and its square norm; a row for each.

        Where replicas take their shares whole, the share is the only piece.
        """
        if not self._outcome.pieces:
            return tf.stack([[tf.cast(self.examples, tf.float32), self.square_norm]])
        factors = tf.stack([tf.ones(()), 1.0 / tf.square(self._scale)])
        return tf.stack(self._outcome.pieces) * factors

    @property
    def has_own_loss(self) -> bool:
        """Whether a replica's examples have a loss of their own, not only the whole batch."""
        return self._whole_loss is None

    @property
    def total_square_norm(self) -> tf.Tensor:
        """The sum of the squares of `total_gradients`."""
        return self._layout.square_norm(self._packs, self._slices) / tf.square(self._scale)

    @property
    def statistics(self) -> list[tf.Tensor]:
        """What the replica adds to variables that layers change, such as moving means."""
        return self._local.others

    @property
    def everyones_sums(self) -> list[tf.Tensor]:
        """All that replicas have summed, in few tensors: gradients, losses and statistics.

        The gradients in them are those of the scaled loss.
        """
        return all_summed(self._packs, self._slices)

    @property
    def loss_scale(self) -> tf.Tensor:
        """The factor of the loss whose gradient was taken, which a large gradient may overflow."""
        return self._scale

    @property
    def _to_mean(self) -> tf.Tensor:
        """A replica's summands are shares of a global mean; this makes them a mean of its own."""
        return tf.math.divide_no_nan(1.0, tf.cast(self._rows.fraction, tf.float32))

    @property
    def _local_slices(self) -> list[tf.IndexedSlices]:
        present = self.examples > 0
        return [zero_unless(present, gradient) for gradient in self._outcome.slices]

    @property
    def _local(self) -> Summands:
        return self._layout.sums(self._outcome.packs)

    @property
    def _total(self) -> Summands:
        return self._layout.sums(self._packs)


class Probe:
    """Measures, changes or forbids something in every training step.

    A callback registers one with `model.training_run.watch(probe)` in `on_train_begin`. All
    methods but `build` are traced, so they hold for every step and must be TensorFlow only.

    Attributes:
        timed: Whether `Seen.times` is wanted.
        by_piece: Whether `Seen.pieces` is wanted.
    """

    timed = False
    by_piece = False

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create variables; called before the first step, outside of any graph."""

    def before_step(self) -> None:
        """Do something before any replica reads its variables, such as set the rate."""

    def on_replica(self, seen: Seen) -> list[tf.Tensor]:
        """What to measure on a replica, on its device."""
        return []

    def allows(self, measured: list[list[tf.Tensor]]) -> tf.Tensor | None:
        """A scalar boolean: False, and the step changes nothing. None for always.

        Args:
            measured: What `on_replica` returned, for each replica.
        """
        return None

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Put what was measured into the probe's variables, on the first device.

        Args:
            measured: What `on_replica` returned, for each replica.
            allowed: Whether all probes allowed the step; None where none can forbid it.
        """


def verdict(probes: Sequence[Probe], measured: list[list[list[tf.Tensor]]]) -> tf.Tensor | None:
    """Whether all probes allow a step; None where none can forbid it."""
    answers = [
        probe.allows([of_replica[index] for of_replica in measured])
        for index, probe in enumerate(probes)
    ]
    known = [answer for answer in answers if answer is not None]
    return tf.reduce_all(known) if known else None


def collect(
    probes: Sequence[Probe], measured: list[list[list[tf.Tensor]]], allowed: tf.Tensor | None
) -> None:
    """Let each probe keep what it has measured."""
    for index, probe in enumerate(probes):
        probe.collect([of_replica[index] for of_replica in measured], allowed)


def all_summed(packs: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices]) -> list[tf.Tensor]:
    """All that is summed over replicas: there may be no packs, or no sparse gradients."""
    return [*packs, *(rows.values for rows in slices)]


def now_that(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The time, in seconds, once these tensors are there; at once if there are none."""
    if not tensors:
        return tf.timestamp()
    with tf.control_dependencies(tensors):
        number = tf.reshape(tensors[0], [-1])[:1]
    # A GPU has done what it was told before only when a number of it has arrived on the host.
    with tf.device(number.device if "CPU" in number.device else HOST):
        with tf.control_dependencies([tf.identity(number)]):
            return tf.timestamp()


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, dense or sparse, times a number."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
