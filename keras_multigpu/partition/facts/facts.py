"""What is known of a step's graph before it runs: the lengths of axes, and the values of shapes.

TensorFlow knows the length of an axis as a number, or not at all. Here the batch's axis has the
length `batch`, and lengths follow from it: `2 * batch`, `batch * time`. A length that follows from
nothing stays unknown, and then nothing is concluded from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.facts.lengths import LENGTHS
from keras_multigpu.partition.facts.list_elements import note_elements
from keras_multigpu.partition.facts.values import VALUES
from keras_multigpu.partition.layouts import Block, Shard
from keras_multigpu.partition.program import COMPILED, LOOP, Operation, Program, Tensor
from keras_multigpu.partition.sizes import AnySize, terms_of

# Larger values are not tracked. The gradient of `concat` packs hundreds of shapes into one value.
MOST_ENTRIES = 2048
INTEGERS = (tf.int32, tf.int64, tf.bool)

Dims = list[AnySize | None] | None


class Facts:
    """What is known of the tensors of a program, and of the programs in it.

    Args:
        program: The program.
        dims: The lengths of the axes of each input; None to take TensorFlow's.
        batches: The size of each batch, by name: a number if the step was traced for it.
        values: The known values of inputs, by place.

    Attributes:
        elements: The `Elements` of tensors that are lists.
    """

    def __init__(
        self,
        program: Program,
        dims: Sequence[Dims],
        batches: Mapping[str, AnySize],
        values: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self.program, self.batches = program, batches
        self._dims: dict[Tensor, Dims] = {}
        self._values: dict[Tensor, np.ndarray] = {}
        self.elements: dict[Tensor, Any] = {}
        for place, (tensor, own) in enumerate(zip(program.inputs, dims, strict=True)):
            self.note(tensor, own, (values or {}).get(place))
        self._walk(program)

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

    def _walk(self, program: Program) -> None:
        for op in program.operations:
            # An earlier walk through the body of a loop may have known more.
            for tensor in op.outputs:
                self._values.pop(tensor, None)
                self.elements.pop(tensor, None)
            if op.type == LOOP:
                self._find_loop(op)
            elif op.inner:
                self._find_inner(op)
            else:
                self._find(op)

    def _find(self, op: Operation) -> None:
        """Note what is known of the outputs of an operation."""
        found: Sequence[Dims] | None = None
        if op.type in LENGTHS and any(not t.shape.is_fully_defined() for t in op.outputs):
            found = LENGTHS[op.type](op, self)
        for place, tensor in enumerate(op.outputs):
            self.note(tensor, found[place] if found and place < len(found) else None)
        note_elements(op, self)
        if op.outputs and op.outputs[0].dtype in INTEGERS and op.type in VALUES:
            for tensor, value in zip(op.outputs, VALUES[op.type](op, self) or (), strict=False):
                if value is not None and np.size(value) <= MOST_ENTRIES:
                    if all(fits(entry, tensor.dtype) for entry in np.ravel(value)):
                        self.note_value(tensor, value)

    def _enter(
        self,
        program: Program,
        dims: Sequence[Dims],
        values: Sequence[np.ndarray | None],
        elements: Sequence[Any],
    ) -> None:
        """Walk through an inner program, given what is known of its inputs."""
        for place, tensor in enumerate(program.inputs):
            self._values.pop(tensor, None)
            self.note(tensor, dims[place], values[place])
            self.elements[tensor] = elements[place]
        self._walk(program)

    def _find_inner(self, op: Operation) -> None:
        inputs = op.inputs if op.type == COMPILED else op.inputs[1:]
        for inner in op.inner:
            self._enter(
                inner,
                [self.dims(tensor) for tensor in inputs],
                [self.value(tensor) for tensor in inputs],
                [self.elements.get(tensor) for tensor in inputs],
            )
        for place, tensor in enumerate(op.outputs):
            results = [inner.outputs[place] for inner in op.inner]
            value = self.value(results[0]) if len(results) == 1 else None
            self.note(tensor, common([self.dims(result) for result in results]), value)
            elements = [self.elements.get(result) for result in results]
            if all(each == elements[0] for each in elements):
                self.elements[tensor] = elements[0]

    def _find_loop(self, op: Operation) -> None:
        condition, body = op.inner
        dims = [self.dims(tensor) for tensor in op.inputs]
        values = [
            self.value(tensor) if is_kept else None
            for tensor, is_kept in zip(op.inputs, body.passed_through, strict=True)
        ]
        elements = [self.elements.get(tensor) for tensor in op.inputs]
        while True:
            self._enter(body, dims, values, elements)
            wider = [
                common([own, self.dims(out)]) for own, out in zip(dims, body.outputs, strict=True)
            ]
            after = [
                joined_elements(own, self.elements.get(out))
                for own, out in zip(elements, body.outputs, strict=True)
            ]
            if wider == dims and after == elements:
                break
            dims, elements = wider, after
        self._enter(condition, dims, values, elements)
        for place, tensor in enumerate(op.outputs):
            self.note(tensor, dims[place], values[place])
            self.elements[tensor] = elements[place]


def fits(entry: AnySize | None, dtype: tf.DType) -> bool:
    """Whether an entry has no number beyond its type, where TensorFlow starts over from below."""
    most = 2 ** (8 * dtype.size - 1)
    return entry is None or all(-most <= number < most for _, number in terms_of(entry))


def common(found: Sequence[Dims]) -> Dims:
    """The lengths that several tensors have in common."""
    first = found[0]
    if any(dims is None or first is None or len(dims) != len(first) for dims in found):
        return None
    return [
        each[0] if all(dim == each[0] for dim in each) else None
        for each in zip(*found, strict=True)
    ]


def joined_elements(one: Any, other: Any) -> Any:
    """What is known of the elements of a list that is either of two."""
    if one is None or other is None:
        return one or other
    return one.joined(other)
