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

No loss says that it relates examples: `keras.losses.Circle` returns one value for each, but looks
for the nearest others in the batch; `Dice(axis=(0, 1, 2))` returns one value for each channel. So
a loss is tried on a few random rows: the values of some must not change with the others, nor with
their place among them.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import compile_internals, model_internals
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import wide

ROWS = 6
"""How many rows are tried."""
KEPT = 2
"""How many of them stay as they are, at the other end, while the others change."""

_known: "weakref.WeakKeyDictionary[keras.losses.Loss, dict[Any, bool]]" = (
    weakref.WeakKeyDictionary()
)


class NeedsWholeBatch(Exception):
    """A loss that is not a sum over examples."""


def refuse_ragged(tensors: Any, replicas: int) -> None:
    """Raise a `ValueError` where predictions are to be gathered that TensorFlow cannot gather."""
    if replicas > 1 and any(isinstance(t, tf.RaggedTensor) for t in keras.tree.flatten(tensors)):
        raise value_error(
            "Ragged predictions meet a loss that needs the whole batch at once.",
            "Expected dense predictions, or a loss with a value for each example: replicas "
            "cannot gather ragged tensors.",
            "Return a value for each example from the loss, or pad the predictions with "
            "`to_tensor()` in the model.",
            replicas=replicas,
        )


class LossShares:
    """One replica's contributions to the compiled losses.

    Args:
        model: The compiled model.
        fraction: The replica's examples divided by the global batch size.
        known: The divisors of all replicas, of those losses that have some; by default its own.

    Attributes:
        shares: The contributions to the single losses, before their weights.
        divisors: The replica's own divisors: the number of its values that are not masked, or the
            sum of its sample weights.
    """

    def __init__(
        self, model: keras.Model, fraction: tf.Tensor, known: Sequence[tf.Tensor] | None = None
    ) -> None:
        self._model = model
        self._fraction = fraction
        self._known = known
        self._parts: list[tf.Tensor | None] = []
        self.shares: list[tf.Tensor] = []
        self.divisors: list[tf.Tensor] = []

    def total(self, data: tuple[Any, Any, Any], y_pred: Any) -> tf.Tensor | None:
        """The weighted sum of the shares, of rows `(x, y, sample_weight)` and their predictions.

        None without a loss.
        """
        _, y, sample_weight = data
        compiled = compile_internals.compile_loss(self._model)
        if compiled is None:
            return None
        if not compiled.built:
            compiled(y, y_pred, sample_weight)
        wrapped = [self._share_of(loss) for loss in compile_internals.losses_of(self._model)]
        with compile_internals.losses_exchanged(self._model, wrapped):
            total = compiled(y, y_pred, sample_weight)
        return tf.cast(0.0 if total is None else total, wide())

    @property
    def part(self) -> tf.Tensor | None:
        """How much of what the total is divided by is the replica's own; None where nothing is."""
        if self._parts and all(part is None for part in self._parts):
            return None
        # Several losses count by examples, whatever some of them are divided by.
        return self._parts[0] if len(self._parts) == 1 else self._fraction

    def _share_of(self, loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise NeedsWholeBatch(loss.name)

        def share(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            before = updates_so_far()
            values, divisor = weighted_values(loss, y_true, y_pred, sample_weight)
            if updates_so_far() != before:
                raise NeedsWholeBatch(loss.name)
            share, part = self._divided(loss.reduction, tf.cast(values, wide()), divisor)
            self.shares.append(share)
            self._parts.append(part)
            return share

        return share

    def _divided(
        self, reduction: str, values: tf.Tensor, divisor: Any
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        if reduction == "sum":
            return tf.reduce_sum(values), None
        if divisor is None:
            # Every example has equally many loss values, so the replica's mean counts
            # as much as its part of the batch.
            return tf.reduce_mean(values) * self._fraction, self._fraction
        own = tf.cast(divisor, wide())
        self.divisors.append(own)
        whole = own if self._known is None else self._known[len(self.divisors) - 1]
        return (
            tf.math.divide_no_nan(tf.reduce_sum(values), whole),
            tf.math.divide_no_nan(own, whole),
        )


def divided(
    model: keras.Model,
    fraction: tf.Tensor,
    data: tuple[Any, Any, Any],
    y_pred: Any,
    of_all: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> tuple[tf.Tensor | None, LossShares]:
    """A replica's contribution to the loss, None without one, and to the single losses."""
    # Divisors are made those `of_all` replicas while no loss is exchanged: in the middle of a sum
    # another replica may have its turn, with the same model.
    shares = LossShares(model, fraction)
    total = shares.total(data, y_pred)
    if shares.divisors:
        shares = LossShares(model, fraction, of_all(shares.divisors))
        total = shares.total(data, y_pred)
    return total, shares


def updates_so_far() -> int:
    """How often a variable was assigned in this forward pass."""
    return getattr(model_internals.stateless_scope(), "updates", 0)


def weighted_values(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, Any]:
    """The loss values times their weights, and what to divide their sum by.

    The divisor is None where it is the number of values, as follows from the batch size.
    """
    if relates_rows(loss, y_true, y_pred):
        raise NeedsWholeBatch(loss.name)
    mask = model_internals.get_mask(y_pred)
    with keras.name_scope(loss.name):
        y_true, y_pred = keras.tree.map_structure(
            lambda value: keras.ops.convert_to_tensor(value, dtype=loss.dtype), (y_true, y_pred)
        )
        values = keras.ops.convert_to_tensor(loss.call(y_true, y_pred))
    own_mask = model_internals.get_mask(values)
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
        refuse_other_axes(values, weights)
    if mask is not None:
        valid = tf.cast(mask, values.dtype)
        if reduction in ("mean", "sum_over_batch_size"):
            divisor = tf.reduce_sum(valid)
            # Where a mask entry covers several values, they share its weight.
            size, masked = (tf.cast(tf.size(v), values.dtype) for v in (values, valid))
            valid = valid * (masked / size)
        if weights is not None:
            valid, weights = compile_internals.same_rank(valid, weights)
        weights = valid if weights is None else weights * valid
    if weights is None:
        return values, divisor
    if reduction == "mean_with_sample_weight":
        divisor = tf.reduce_sum(weights)
    values, weights = compile_internals.same_rank(values, weights)
    return values * weights, divisor


def refuse_other_axes(values: tf.Tensor, weights: tf.Tensor) -> None:
    """Raise a `ValueError` where weights of examples would be weights of another axis."""
    # They are multiplied along the last axis. Keras's batch is seldom as long as that axis, so its
    # step fails; a replica's share may be as long by chance.
    ranks = [each.shape.rank for each in compile_internals.same_rank(values, weights)]
    if None not in ranks and 0 < ranks[1] < ranks[0]:
        raise value_error(
            "`sample_weight` has fewer axes than the values of the loss.",
            "Expected a weight for each value, or axes of length 1 where values share a weight.",
            "Give it the missing axes: `sample_weight[:, None]` where each example has a weight.",
            sample_weight=weights.shape,
            values=values.shape,
        )


def relates_rows(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss's value for an example depends on the others in the batch."""
    # It is tried once for each loss and form of targets and predictions. A loss that cannot be
    # tried on random numbers, or draws some of its own, counts as one that does not.
    specs = [
        (tuple(leaf.shape[1:]), tf.as_dtype(leaf.dtype)) if tried(leaf) else None
        for leaf in tf.nest.flatten((y_true, y_pred))
    ]
    known = _known.setdefault(loss, {})
    key = str(specs)
    if key not in known:
        known[key] = None not in specs and differs(loss, (y_true, y_pred), specs)
    return known[key]


def tried(leaf: Any) -> bool:
    """Whether random rows can stand in for a tensor."""
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.dtype != tf.string


def differs(loss: keras.losses.Loss, data: Any, specs: list[Any]) -> bool:
    """Whether the value of a row changes with the rows beside it, or with its place."""
    targets = len(tf.nest.flatten(data[0]))
    first, other = (random_rows(specs, targets, seed) for seed in (0, 1))
    mixed = [np.concatenate([b[KEPT:], a[:KEPT]]) for a, b in zip(first, other, strict=True)]
    try:
        # Nothing is left of what the loss assigns; its second draw is not its first.
        with tf.init_scope(), tf.device(HOST), keras.StatelessScope():
            values, again, beside = (
                values_of(loss, tf.nest.pack_sequence_as(data, rows))
                for rows in (first, first, mixed)
            )
    except Exception:  # Random numbers may be nonsense to a loss, as its own code decides.
        return False
    if values.ndim == 0 or not np.array_equal(values, again, equal_nan=True):
        return False
    return len(values) != ROWS or not np.allclose(
        values[:KEPT], beside[-KEPT:], rtol=1e-4, atol=1e-6, equal_nan=True
    )


def random_rows(specs: list[Any], targets: int, seed: int) -> list[np.ndarray]:
    """Rows that most losses can read: targets of 0 and 1, predictions between them."""
    random = np.random.default_rng(seed)
    rows = []
    for i, (shape, dtype) in enumerate(specs):
        full = (ROWS, *(3 if length is None else length for length in shape))
        numbers = random.integers(0, 2, full) if i < targets else random.uniform(0.1, 0.9, full)
        rows.append(numbers.astype(dtype.as_numpy_dtype))
    return rows


def values_of(loss: keras.losses.Loss, data: Any) -> np.ndarray:
    y_true, y_pred = tf.nest.map_structure(
        lambda rows: keras.ops.convert_to_tensor(rows, dtype=loss.dtype), data
    )
    return np.asarray(keras.ops.convert_to_numpy(loss.call(y_true, y_pred)))
