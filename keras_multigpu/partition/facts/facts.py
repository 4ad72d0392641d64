"""`Facts`: what is known of a program before it runs: the lengths of axes, and values of shapes.

TensorFlow knows the length of an axis as a number, or not at all. Here the batch's axis has the
length `batch`, and lengths follow from it: `2 * batch`, `batch * time`. A length that follows from
nothing stays unknown, and then nothing is concluded from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.layouts import Block, Shard
from keras_multigpu.partition.program import Program, Tensor
from keras_multigpu.partition.sizes import AnySize

Dims = list[AnySize | None] | None
"""The lengths of axes, None for unknown ones; None if their number is unknown."""

NOTHING = "nothing"
"""The value of the elements of a list before the first is written."""


@dataclass(frozen=True)
class Elements:
    """What is known of all elements of a list of tensors.

    Args:
        dims: The lengths of their axes; None if these are not known.
        value: The shape and the entries of their value if all have the same; otherwise None.
        count: How many there are; None if that is not known.
        dtype: Their type.
    """

    dims: tuple[Any, ...] | None = None
    value: Any = NOTHING
    count: Any = None
    dtype: tf.DType | None = None

    def joined(self, other: "Elements") -> "Elements":
        """What is known of a list that is either of two."""
        count = self.count if self.count == other.count else None
        for one, two in ((self, other), (other, self)):
            if one.value == NOTHING:
                dims = one.dims if two.dims is None else two.dims
                return Elements(dims, two.value, count, one.dtype or two.dtype)
        pairs = zip(self.dims or (), other.dims or (), strict=False)
        alike = self.dims is not None and len(self.dims) == len(other.dims or ())
        dims = tuple(a if a == b else None for a, b in pairs) if alike else None
        value = self.value if self.value == other.value else None
        return Elements(dims, value, count, self.dtype or other.dtype)


class Facts:
    """What is known of the tensors of a program, and of the programs in it.

    Args:
        program: The program.
        batches: The size of each batch, by name: a number if the step was traced for it.

    Attributes:
        elements: The `Elements` of tensors that are lists.
    """

    def __init__(self, program: Program, batches: Mapping[str, AnySize]) -> None:
        self.program, self.batches = program, batches
        self._dims: dict[Tensor, Dims] = {}
        self._values: dict[Tensor, np.ndarray] = {}
        self.elements: dict[Tensor, Elements | None] = {}

    def dims(self, tensor: Tensor) -> Dims:
        """The length of each axis, None if it is unknown; None if their number is unknown."""
        return self._dims[tensor]

    def value(self, tensor: Tensor) -> np.ndarray | None:
        """The value of a small tensor of integers: an array of `AnySize`; None if it is not known.

        Single entries may be None.
        """
        return self._values.get(tensor)

    def size_of(self, batch: str | Shard) -> AnySize:
        """How many examples a batch has in all."""
        return batch.length if isinstance(batch, Shard) else self.batches[batch]

    def length(self, blocks: tuple[Block, ...]) -> AnySize:
        """The global length of an axis of such blocks."""
        total: AnySize = 0
        for batch, factor in blocks:
            total = total + self.size_of(batch) * factor
        return total

    def note(self, tensor: Tensor, dims: Dims, value: np.ndarray | None = None) -> None:
        """Note a tensor's value, and the lengths of its axes, besides those that TensorFlow knows.

        For the handle of a variable, these are the axes of its value.
        """
        if value is not None:
            self.note_value(tensor, value)
            return
        if tensor.dtype == tf.resource:
            held = graph_internals.held_shape(tensor.raw) if dims is None else dims
            self._dims[tensor] = None if held is None else list(held)
            return
        if tensor.shape.rank is None and dims is not None and tensor.dtype != tf.variant:
            # In the bodies of loops TensorFlow has often lost the rank, and rules need it.
            tensor.set_shape([None] * len(dims))
        rank = tensor.shape.rank
        if rank is None:
            self._dims[tensor] = None if dims is None else list(dims)
            return
        known = tensor.shape.as_list()
        if dims is not None and len(dims) == rank:
            known = [dim if own is None else own for own, dim in zip(known, dims, strict=True)]
        self._dims[tensor] = known

    def note_value(self, tensor: Tensor, value: np.ndarray) -> None:
        """Note a tensor's value."""
        array = np.asarray(value, object)
        self._values[tensor] = array
        self._dims[tensor] = list(array.shape)

    def forget_value(self, tensor: Tensor) -> None:
        """Forget a tensor's value: an earlier walk through the body of a loop may have known it."""
        self._values.pop(tensor, None)
