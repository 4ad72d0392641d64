"""From per-example losses to one number: a sum over all examples, divided once.

Stock Keras takes each replica's mean and averages the means, so an example on a replica
with few examples weighs more than its neighbours. Here every replica contributes

    loss weight * (sum of its per-example losses) / (divisor of the global batch)

and the sum of the contributions is the loss, its gradient the gradient. The divisor
depends on the loss's `reduction`:

    sum_over_batch_size, mean    all loss values of the global batch
      the same with a mask       the unmasked ones
    mean_with_sample_weight      the sum of all sample weights
    sum                          1

A loss that cannot be written as such a sum (it returns a scalar, has no reduction, relates
examples to each other, assigns variables, or overrides `__call__`) raises `NeedsWholeBatch`;
the step then gathers the predictions and computes it once, as one device would.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.training.replica_pass.related_rows import relates_rows


class NeedsWholeBatch(Exception):
    """A loss that is not a sum over examples."""


class NeedsDivisors(Exception):
    """A loss whose divisor is known only from masks or sample weights."""


def refuse_ragged(tensors: Any, replicas: int) -> None:
    """Raise a `ValueError` where predictions are to be gathered that TensorFlow cannot gather."""
    if replicas > 1 and any(isinstance(t, tf.RaggedTensor) for t in keras.tree.flatten(tensors)):
        raise ValueError(
            problem(
                "Ragged predictions meet a loss that needs the whole batch at once.",
                "Expected dense predictions, or a loss with a value for each example: replicas "
                "cannot gather ragged tensors.",
                "Return a value for each example from the loss, or pad the predictions with "
                "`to_tensor()` in the model.",
                replicas=replicas,
            )
        )


class LossShares:
    """One replica's contributions to the compiled losses.

    Args:
        model: The compiled model.
        fraction: The replica's examples divided by the global batch size.
        divisors: The global divisors of losses with masks or sample weights, in the
            order in which the losses are called; None when they are not known.
        counting: Whether this pass is there to find the divisors.
        undivided: Whether the shares are to be divided once they and the divisors are summed;
            then each share has a divisor.
    """

    def __init__(
        self,
        model: keras.Model,
        fraction: tf.Tensor,
        divisors: Sequence[tf.Tensor] | None = None,
        counting: bool = False,
        undivided: bool = False,
    ) -> None:
        self._model = model
        self._fraction = fraction
        self._divisors = divisors
        self._counting = counting
        self._undivided = undivided
        self.local_divisors: list[tf.Tensor] = []
        self.shares: list[tf.Tensor] = []
        self.reductions: list[str] = []

    def total(self, data: tuple[Any, Any, Any], y_pred: Any) -> tf.Tensor:
        """The weighted sum of the shares; fills `shares` and `local_divisors`.

        Args:
            data: The rows' `(x, y, sample_weight)`.
            y_pred: The predictions for them.
        """
        _, y, sample_weight = data
        compiled = keras_internals.compile_loss(self._model)
        if not compiled.built:
            compiled(y, y_pred, sample_weight)
        with keras_internals.flat_losses(self._model, self._share_of):
            total = compiled(y, y_pred, sample_weight)
        return tf.zeros(()) if total is None else tf.cast(total, tf.float32)

    def _share_of(self, loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise NeedsWholeBatch(loss.name)

        def share(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            before = updates_so_far()
            values, divisor = weighted_values(loss, y_true, y_pred, sample_weight)
            if updates_so_far() != before:
                raise NeedsWholeBatch(loss.name)
            share = self._divided(loss.reduction, tf.cast(values, tf.float32), divisor)
            self.shares.append(share)
            self.reductions.append(loss.reduction)
            return share

        return share

    def _divided(self, reduction: str, values: tf.Tensor, divisor: Any) -> tf.Tensor:
        if self._undivided:
            # The fractions of all replicas make one.
            known = divisor is None or reduction == "sum"
            self.local_divisors.append(tf.cast(self._fraction if known else divisor, tf.float32))
        if reduction == "sum":
            return tf.reduce_sum(values)
        if divisor is None:
            # Every example has equally many loss values, so the replica's mean counts
            # as much as its part of the batch.
            return tf.reduce_mean(values) * self._fraction
        if self._undivided:
            return tf.reduce_sum(values)
        self.local_divisors.append(tf.cast(divisor, tf.float32))
        if self._divisors is None:
            if not self._counting:
                raise NeedsDivisors
            return tf.zeros(())
        known = self._divisors[len(self.local_divisors) - 1]
        return tf.math.divide_no_nan(tf.reduce_sum(values), known)


def updates_so_far() -> int:
    """How often a variable was assigned in this forward pass."""
    return getattr(keras_internals.stateless_scope(), "updates", 0)


def weighted_values(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, Any]:
    """The loss values times their weights, and what to divide their sum by.

    The divisor is None where it is the number of values, as follows from the batch size.
    """
    if relates_rows(loss, y_true, y_pred):
        raise NeedsWholeBatch(loss.name)
    mask = keras_internals.get_mask(y_pred)
    with keras.name_scope(loss.name):
        y_true, y_pred = keras.tree.map_structure(
            lambda value: keras.ops.convert_to_tensor(value, dtype=loss.dtype), (y_true, y_pred)
        )
        values = keras.ops.convert_to_tensor(loss.call(y_true, y_pred))
    own_mask = keras_internals.get_mask(values)
    if mask is not None and own_mask is not None:
        mask = mask & own_mask
    mask = own_mask if mask is None else mask
    if values.shape.rank == 0 or loss.reduction in (None, "none"):
        raise NeedsWholeBatch(loss.name)
    return with_weights(loss.reduction, tf.cast(values, loss.dtype), sample_weight, mask)


def with_weights(
    reduction: str, values: tf.Tensor, sample_weight: Any, mask: Any
) -> tuple[tf.Tensor, Any]:
    """Apply sample weights and mask to loss values; see `weighted_values`."""
    weights, divisor = None, None
    if sample_weight is not None:
        weights = tf.cast(sample_weight, values.dtype)
    if mask is not None:
        valid = tf.cast(mask, values.dtype)
        if reduction in ("mean", "sum_over_batch_size"):
            divisor = tf.reduce_sum(valid)
            # Where a mask entry covers several values, they share its weight.
            size, masked = (tf.cast(tf.size(v), values.dtype) for v in (values, valid))
            valid = valid * (masked / size)
        if weights is not None:
            valid, weights = keras_internals.same_rank(valid, weights)
        weights = valid if weights is None else weights * valid
    if weights is None:
        return values, divisor
    if reduction == "mean_with_sample_weight":
        divisor = tf.reduce_sum(weights)
    values, weights = keras_internals.same_rank(values, weights)
    return values * weights, divisor
