"""Small variables that an optimizer updates as if they were one.

Keras updates variables one by one, a dozen operations each; for a MobileNet with Adam that is
2,000 operations on tensors of a few hundred numbers, all dispatch. Optimizers that treat every
element alike give the same numbers, to the bit, on all small variables joined end to end. Only
the lists in which an optimizer keeps its slots know which slot is whose, and they are private.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# Variables with fewer elements are joined; larger ones are worth operations of their own.
SMALL = 2**16

# Optimizers that treat every element of a variable alike. Others look at a variable as a whole:
# Lamb at its norm, Adafactor at its rows and columns, Muon at the matrix. A user's subclass may,
# and so is not among them.
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
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
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
        return self.value + other

    def __sub__(self, other: Any) -> tf.Tensor:
        return self.value - other

    def __mul__(self, other: Any) -> tf.Tensor:
        return self.value * other

    def __truediv__(self, other: Any) -> tf.Tensor:
        return self.value / other

    def __neg__(self) -> tf.Tensor:
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
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        joinable = optimizer.keras_class in ELEMENTWISE and not is_sparse
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
    positions = [optimizer._trainable_variables_indices[id(variable)] for variable in members]
    slots = {
        name: [value[position] for position in positions]
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) > max(positions)
    }
    whole = {
        name: JoinedVariable(parts)
        for name, parts in slots.items()
        # A list with such an entry for each variable is one of slots, and not that of the
        # variables.
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
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors], axis=0)
