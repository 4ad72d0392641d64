"""What is known of a step's graph before it runs: the lengths of axes, and the values of shapes.

TensorFlow knows the length of an axis as a number, or not at all. Here the batch's axis has the
length `batch`, and lengths follow from it: `2 * batch`, `batch * time`. A length that follows from
nothing stays unknown, and then nothing is concluded from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.layouts import Block
from keras_multigpu.partition.lengths import LENGTHS
from keras_multigpu.partition.list_elements import note_elements
from keras_multigpu.partition.sizes import AnySize, terms_of
from keras_multigpu.partition.values import VALUES

# Larger values are not tracked. The gradient of `concat` packs hundreds of shapes into one value.
MOST_ENTRIES = 2048
INTEGERS = (tf.int32, tf.int64, tf.bool)
LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")

Dims = list[AnySize | None] | None


class GraphFacts:
    """What is known of the tensors of one graph.

    Args:
        graph: The graph of a function.
        dims: The lengths of the axes of each input; None to take TensorFlow's.
        batches: The size of each batch, by name: a number if the graph was traced for it.
        values: The known values of inputs, by place.
        elements: The `Elements` of inputs that are lists, by place.
        taps: Tensors that are needed besides the results.

    Attributes:
        inner: The facts of the functions that an operation calls, by its name.
        elements: The `Elements` of lists, by the names of their tensors.
        operations: The operations that results and side effects need, each after those it needs.
    """

    def __init__(
        self,
        graph: Any,
        dims: Sequence[Dims],
        batches: Mapping[str, AnySize],
        values: Mapping[int, np.ndarray] | None = None,
        elements: Mapping[int, Any] | None = None,
        taps: Sequence[tf.Tensor] = (),
    ) -> None:
        self.graph = graph
        self.batches = batches
        self.inner: dict[str, list[GraphFacts]] = {}
        self._dims: dict[str, Dims] = {}
        self._values: dict[str, np.ndarray] = {}
        self.elements: dict[str, Any] = {}
        for place, (tensor, own) in enumerate(zip(graph.inputs, dims, strict=True)):
            self.note(tensor, own)
            if values and values.get(place) is not None:
                self.note_value(tensor, values[place])
            if elements and elements.get(place) is not None:
                self.elements[tensor.name] = elements[place]
        self.operations = list(needed(graph, taps))
        for op in self.operations:
            self._find(op)

    def all_operations(self) -> Iterator[tf.Operation]:
        """The operations of the graph and of all functions that they call."""
        yield from self.operations
        for functions in self.inner.values():
            for inner in functions:
                yield from inner.all_operations()

    def dims(self, tensor: tf.Tensor) -> Dims:
        """The length of each axis, None if it is unknown; None if their number is unknown."""
        if tensor.name not in self._dims:
            self.note(tensor, None)
        return self._dims[tensor.name]

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """The value of a small tensor of integers: an array of `AnySize`; None if it is not known.

        Single entries may be None.
        """
        return self._values.get(tensor.name)

    def length(self, blocks: tuple[Block, ...]) -> AnySize:
        """The global length of an axis of such blocks."""
        total: AnySize = 0
        for batch, factor in blocks:
            total = total + self.batches[batch] * factor
        return total

    def note(self, tensor: tf.Tensor, dims: Dims) -> None:
        """Note the lengths of a tensor's axes, besides those that TensorFlow knows.

        For the handle of a variable, these are the axes of its value.
        """
        if tensor.dtype == tf.resource:
            held = graph_internals.held_shape(tensor) if dims is None else dims
            self._dims[tensor.name] = None if held is None else list(held)
            return
        if tensor.shape.rank is None and dims is not None and tensor.dtype != tf.variant:
            # In the bodies of loops TensorFlow has often lost the rank, and rules need it.
            tensor.set_shape([None] * len(dims))
        rank = tensor.shape.rank
        if rank is None:
            self._dims[tensor.name] = None if dims is None else list(dims)
            return
        known = tensor.shape.as_list()
        if dims is not None and len(dims) == rank:
            known = [dim if own is None else own for own, dim in zip(known, dims, strict=True)]
        self._dims[tensor.name] = known

    def note_value(self, tensor: tf.Tensor, value: np.ndarray) -> None:
        """Note a tensor's value."""
        array = np.asarray(value, object)
        self._values[tensor.name] = array
        self._dims[tensor.name] = list(array.shape)

    def _find(self, op: tf.Operation) -> None:
        """Note what is known of the outputs of an operation."""
        if op.type == "Placeholder":
            return
        if op.type in LOOPS:
            self._find_loop(op)
            return
        if op.type in BRANCHES or is_call(op):
            self._find_called(op)
            return
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

    def _find_called(self, op: tf.Operation) -> None:
        inputs = op.inputs if is_call(op) else op.inputs[1:]
        if is_call(op):
            names = [op.get_attr("f").name if op.type in CALLS else op.type]
        elif "Case" in op.type:
            names = [function.name for function in op.get_attr("branches")]
        else:
            names = [op.get_attr(each).name for each in ("then_branch", "else_branch")]
        inner = [
            GraphFacts(
                graph_internals.called_graph(op, name, [tensor.shape for tensor in inputs]),
                [self.dims(tensor) for tensor in inputs],
                self.batches,
                {n: self._values[t.name] for n, t in enumerate(inputs) if t.name in self._values},
                {place: self.elements.get(t.name) for place, t in enumerate(inputs)},
            )
            for name in names
        ]
        self.inner[op.name] = inner
        for place, tensor in enumerate(op.outputs):
            results = [(each, each.graph.outputs[place]) for each in inner]
            self.note(tensor, common([each.dims(result) for each, result in results]))
            value = inner[0].value(results[0][1]) if len(inner) == 1 else None
            if value is not None:
                self.note_value(tensor, value)
            elements = [each.elements.get(result.name) for each, result in results]
            if elements[0] is not None and all(each == elements[0] for each in elements):
                self.elements[tensor.name] = elements[0]

    def _find_loop(self, op: tf.Operation) -> None:
        shapes = [tf.TensorShape(shape) for shape in op.get_attr("output_shapes")]
        graphs = [
            graph_internals.called_graph(op, op.get_attr(which).name, shapes)
            for which in ("cond", "body")
        ]
        kept = passed_through(graphs[1])
        dims = [self.dims(tensor) for tensor in op.inputs]
        inputs = list(enumerate(op.inputs))
        values = {n: self._values[t.name] for n, t in inputs if kept[n] and t.name in self._values}
        elements = {n: self.elements[t.name] for n, t in inputs if t.name in self.elements}
        while True:
            body = GraphFacts(graphs[1], dims, self.batches, values, elements)
            wider = [
                common([own, body.dims(out)])
                for own, out in zip(dims, graphs[1].outputs, strict=True)
            ]
            after = {
                n: joined_elements(elements.get(n), body.elements.get(out.name))
                for n, out in enumerate(graphs[1].outputs)
                if n in elements or out.name in body.elements
            }
            if wider == dims and all(after[n] == elements.get(n) for n in after):
                break
            dims, elements = wider, {n: each for n, each in after.items() if each is not None}
        self.inner[op.name] = [GraphFacts(graphs[0], dims, self.batches, values, elements), body]
        for place, tensor in enumerate(op.outputs):
            self.note(tensor, dims[place])
            if place in values:
                self.note_value(tensor, values[place])
            if place in elements:
                self.elements[tensor.name] = elements[place]


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


def is_call(op: tf.Operation) -> bool:
    """Whether an operation calls a function."""
    return op.type in CALLS or graph_internals.is_function(op)


def joined_elements(one: Any, other: Any) -> Any:
    """What is known of the elements of a list that is either of two."""
    if one is None or other is None:
        return one or other
    return one.joined(other)


def passed_on(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor behind any number of identities."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def passed_through(graph: Any) -> list[bool]:
    """Which of its inputs the body of a loop passes on unchanged."""
    return [passed_on(out) is given for out, given in zip(graph.outputs, graph.inputs, strict=True)]


def needed(graph: Any, taps: Sequence[tf.Tensor] = ()) -> Iterator[tf.Operation]:
    """The operations that results and side effects need, each after those it needs.

    Apart from that they keep the order of the program, so that a variable is read before or after
    it is assigned, as there.
    """
    operations = graph.get_operations()
    wanted = [tensor.op for tensor in (*graph.outputs, *taps)]
    wanted += [op for op in operations if has_effect(op)]
    names: set[str] = set()
    while wanted:
        op = wanted.pop()
        if op.name not in names:
            names.add(op.name)
            wanted += [tensor.op for tensor in op.inputs]
    # The gradient of a loop adds outputs to it, so an operation may need one that was made later.
    done: set[str] = set()
    for start in operations:
        stack = [start] if start.name in names else []
        while stack:
            op = stack[-1]
            before = [t.op for t in op.inputs if t.op.name not in done]
            if op.name in done or not before:
                stack.pop()
                if op.name not in done:
                    done.add(op.name)
                    yield op
            else:
                stack += before


EFFECTLESS = {
    "Placeholder",
    "ReadVariableOp",
    "VariableShape",
    "VarIsInitializedOp",
    "ResourceGather",
    "ResourceGatherNd",
    "StatelessWhile",
    "StatelessIf",
    "StatelessCase",
}
CUDNN_RNNS = ("CudnnRNNV3", "CudnnRNNBackpropV3")


def has_effect(op: tf.Operation) -> bool:
    """Whether an operation has a side effect."""
    if op.type in CUDNN_RNNS and not op.get_attr("dropout"):
        return False  # They keep the state of a generator, for dropout between layers.
    return bool(
        op.op_def.is_stateful and op.type not in EFFECTLESS and not op.type.startswith("TensorList")
    )
