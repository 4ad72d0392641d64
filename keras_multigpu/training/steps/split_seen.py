"""What a replica saw of a step that was split, for probes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.exchange.sparse_gradients import square_norm_of_all
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.steps.probes import Seen, Times, scaled
from keras_multigpu.training.steps.taps import Tapped, Taps, gradient_of


class NewValues(NamedTuple):
    """New values of variables, which are not assigned yet: those of `Seen.update`."""

    trainable: list[tf.Tensor]
    optimizer: list[tf.Tensor]


class SplitSeen(Seen):
    """What one replica saw in a step; see `Seen`.

    Args:
        replica: Its index, an integer.
        replicas: The number of replicas.
        rows: Its share of the batch.
        taps: What was noted of the step.
        tapped: What the replica has of it.
        update: The new values.
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
        self.replica, self.replicas = replica, replicas
        self.update, self.times = update, times  # type: ignore[assignment]
        self._rows, self._taps, self._tapped, self._scale = rows, taps, tapped, scale

    @property
    def y_pred(self) -> Any:
        leaves = keras.tree.flatten(self._taps.noted.y_pred)
        found = self._tapped.predictions
        model_internals.attach(found[: len(leaves)], found[len(leaves) :])
        return keras.tree.pack_sequence_as(self._taps.noted.y_pred, found[: len(leaves)])

    @property
    def loss(self) -> tf.Tensor:
        return self._tapped.loss[0] if self._tapped.loss else self._tapped.total_loss

    @property
    def total_loss(self) -> tf.Tensor:
        return self._tapped.total_loss

    @property
    def variables(self) -> list[keras.Variable]:
        return [variable for _, variable in self._taps.noted.gradients]

    @property
    def gradients(self) -> list[Any]:
        factors = [self._to_mean if is_sum else tf.ones(()) for is_sum in self._taps.is_sum]
        return [
            scaled(gradient, factor / tf.cast(self._scale, factor.dtype))
            for gradient, factor in zip(self._gradients(self._tapped.own), factors, strict=True)
        ]

    @property
    def total_gradients(self) -> list[Any]:
        return [scaled(g, 1.0 / self._scale) for g in self._gradients(self._tapped.totals)]

    @property
    def square_norm(self) -> tf.Tensor:
        return tf.where(self.examples > 0, square_norm_of_all(self.gradients), 0.0)

    @property
    def pieces(self) -> tf.Tensor:
        (pieces,) = self._tapped.piece
        return pieces * tf.stack([tf.ones(()), 1.0 / tf.square(self._scale)])

    @property
    def has_own_loss(self) -> bool:
        return bool(self._tapped.loss)

    @property
    def total_square_norm(self) -> tf.Tensor:
        return square_norm_of_all(self._gradients(self._tapped.totals)) / tf.square(self._scale)

    @property
    def statistics(self) -> list[tf.Tensor]:
        return self._tapped.statistics

    @property
    def everyones_sums(self) -> list[tf.Tensor]:
        totals = [parts[0] for parts in self._tapped.totals]
        return [*totals, self.total_loss, *self._tapped.statistics]

    def _gradients(self, tensors: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
        pairs = zip(tensors, self.variables, strict=True)
        return [gradient_of(parts, variable) for parts, variable in pairs]
