"""One optimizer step as a pure function: values and gradients in, new values out.

The gradients that come in are already summed over replicas, so whatever the optimizer
does with them (clip, accumulate, decay, scale, average) is what one device would do, and
every replica does the same.

Keras updates variables one by one, a dozen operations each; for a MobileNet with Adam that is
2,000 operations on tensors of a few hundred numbers, all dispatch. Optimizers that treat every
element alike give the same numbers, to the bit, on all small variables joined end to end.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.exchange.sparse_gradients import is_sparse
from keras_multigpu.training.update.adjusted_schedule import state_of


def loss_scale(
    optimizer: keras.optimizers.Optimizer | None, optimizer_values: Sequence[tf.Tensor]
) -> tf.Tensor:
    """The factor that the optimizer wants the loss to have before its gradient is taken."""
    if optimizer is None:
        return tf.ones(())
    mapping = list(zip(state_of(optimizer), optimizer_values, strict=True))
    with keras.StatelessScope(mapping):
        return optimizer.scale_loss(tf.ones(()))


def updated(
    optimizer: keras.optimizers.Optimizer,
    trainable: list[keras.Variable],
    values: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
) -> list[tf.Tensor]:
    """New values of `[*trainable, *state_of(optimizer)]`, from the present ones.

    A gradient is None where the loss does not depend on its variable.
    """
    variables = [*trainable, *state_of(optimizer)]
    update = loss_scaled_update if is_loss_scaled(optimizer) else plain_update
    return update(optimizer, variables, list(values), trainable, gradients)


def is_loss_scaled(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer skips steps with gradients that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def plain_update(optimizer, variables, values, trainable, gradients):  # type: ignore[no-untyped-def]
    """New values of all variables after `optimizer.apply`."""
    with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
        optimizer_internals.apply_functionally(optimizer, gradients, trainable, update_jointly)
    return [scope.get_current_value(variable) for variable in variables]


def loss_scaled_update(optimizer, variables, values, trainable, gradients):  # type: ignore[no-untyped-def]
    """The same for a `LossScaleOptimizer`: all replicas take or skip the step together."""
    known = {id(v): value for v, value in zip(variables, values, strict=True)}
    scale, counter = known[id(optimizer.dynamic_scale)], known[id(optimizer.step_counter)]
    given = [gradient for gradient in gradients if gradient is not None]
    flags = [keras.ops.all(keras.ops.isfinite(gradient)) for gradient in given]
    finite = tf.reduce_all(flags)

    def take() -> list[tf.Tensor]:
        unscaled = [None if g is None else keras.ops.divide(g, scale) for g in gradients]
        return plain_update(optimizer.inner_optimizer, variables, values, trainable, unscaled)

    new = tf.cond(finite, take, lambda: [tf.identity(value) for value in values])
    grow = tf.equal(counter, optimizer.dynamic_growth_steps - 1)
    scale_if_finite = tf.where(grow, scale * 2.0, scale)
    changed = {
        id(optimizer.dynamic_scale): tf.where(finite, scale_if_finite, scale * 0.5),
        id(optimizer.step_counter): tf.where(
            tf.logical_and(finite, tf.logical_not(grow)), counter + 1, tf.zeros_like(counter)
        ),
    }
    return [changed.get(id(v), value) for v, value in zip(variables, new, strict=True)]


SMALL = 2**16
"""Variables with fewer elements are joined; larger ones are worth operations of their own."""

ELEMENTWISE = frozenset(
    {
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Adamax,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
    }
)
"""Optimizers that treat every element of a variable alike."""


class JoinedVariable:
    """Several variables of one dtype as one flat variable, inside a stateless scope."""

    index_in_slots = 0
    """Where the optimizer finds the slots that belong to this variable."""

    def __init__(self, parts: Sequence[keras.Variable]) -> None:
        self.parts = parts
        self.dtype = parts[0].dtype
        self.value = self.before = joined([part.value for part in parts])
        self.shape = self.value.shape

    def assign(self, value: Any) -> None:
        """Take a new value."""
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        """Add to the value."""
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtract from the value."""
        self.assign(self.value - tf.cast(value, self.dtype))

    def give_back(self) -> None:
        """Assign the new values to the parts."""
        if self.value is not self.before:
            sizes = [math.prod(part.shape) for part in self.parts]
            for part, piece in zip(self.parts, tf.split(self.value, sizes), strict=True):
                part.assign(tf.reshape(piece, part.shape))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """What TensorFlow takes this for."""
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __add__(self, other: Any) -> tf.Tensor:
        """As a tensor's."""
        return self.value + other

    def __sub__(self, other: Any) -> tf.Tensor:
        """As a tensor's."""
        return self.value - other

    def __mul__(self, other: Any) -> tf.Tensor:
        """As a tensor's."""
        return self.value * other

    def __truediv__(self, other: Any) -> tf.Tensor:
        """As a tensor's."""
        return self.value / other

    def __neg__(self) -> tf.Tensor:
        """As a tensor's."""
        return -self.value

    __radd__, __rmul__ = __add__, __mul__


def update_jointly(
    optimizer: Any,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Update the variables, the small ones of each dtype together."""
    groups: dict[str, list[tuple[tf.Tensor, keras.Variable]]] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        joinable = optimizer.keras_class in ELEMENTWISE and not is_sparse(gradient)
        if joinable and math.prod(variable.shape) < SMALL:
            groups.setdefault(variable.dtype, []).append((gradient, variable))
        else:
            optimizer.update_step(gradient, variable, learning_rate)
    for pairs in groups.values():
        members = [variable for _, variable in pairs]
        whole = JoinedVariable(members)
        with joined_slots(optimizer, members):
            gradient = joined([gradient for gradient, _ in pairs])
            optimizer.update_step(gradient, whole, learning_rate)
        whole.give_back()


@contextlib.contextmanager
def joined_slots(optimizer: Any, members: list[keras.Variable]) -> Iterator[None]:
    """Let each of the optimizer's lists of slots hold one joined slot for the members."""
    positions = [optimizer.position_of(variable) for variable in members]
    slots = {
        name: [value[position] for position in positions]
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) > max(positions)
    }
    whole = {
        name: JoinedVariable(parts)
        for name, parts in slots.items()
        if all(
            isinstance(part, keras.Variable)
            and part is not member
            and part.shape == member.shape
            and part.dtype == members[0].dtype
            for part, member in zip(parts, members, strict=True)
        )
    }
    saved = {name: vars(optimizer)[name] for name in whole}
    vars(optimizer).update({name: [slot] for name, slot in whole.items()})
    try:
        yield
    finally:
        vars(optimizer).update(saved)
    for slot in whole.values():
        slot.give_back()


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors end to end."""
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors], axis=0)
