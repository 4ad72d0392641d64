"""`Program`: a traced step as the partition reads it.

TensorFlow's graph of a step calls functions, has two or three types of each loop and condition, and
keeps operations that nothing needs. A program has one form of each, and calls nothing: the
operations of called functions stand where they are called, once for each call. Only what XLA must
compile stays a call, because TensorFlow has no kernels for its operations.

`Operation` and `Tensor` look like TensorFlow's, so that rules read either. But TensorFlow makes a
new object, or a new string, at each look, and names are not unique where a function is called
twice; here both are plain Python, and a tensor is its own key.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals

LOOP, BRANCH, COMPILED = "While", "Case", "XlaMustCompile"
"""The types of operations that have programs of their own."""

OPEN_READ, CLOSING = "ReadOpenSum", "CloseSum"
"""Those of sums that wait, see `accumulation`."""

ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
SCATTERED = {
    f"ResourceScatter{kind}{name}": combine
    for kind in ("", "Nd")
    for name, combine in {
        "Add": tf.tensor_scatter_nd_add,
        "Sub": tf.tensor_scatter_nd_sub,
        "Update": tf.tensor_scatter_nd_update,
        "Max": tf.tensor_scatter_nd_max,
        "Min": tf.tensor_scatter_nd_min,
    }.items()
}
WRITES = {*ASSIGNMENTS, *SCATTERED, "ResourceStridedSliceAssign", "RngReadAndSkip"}

EFFECTLESS = {
    "Placeholder",
    "ReadVariableOp",
    OPEN_READ,
    "VariableShape",
    "VarIsInitializedOp",
    "ResourceGather",
    "ResourceGatherNd",
}
# These run once for all replicas: they may have effects that TensorFlow does not know of.
COUNTED_AS_EFFECTS = {"PrintV2", "Print", "PyFunc", "EagerPyFunc", "PyFuncStateless"}
# Each replica can read a lookup table by itself, unless the step changes one.
TABLE_READS = {"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"}
TABLE_WRITES = {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"}
MOST_BYTES = 256
"""The size of constants that may be the same operation where they are equal."""
CUDNN_RNNS = ("CudnnRNNV3", "CudnnRNNBackpropV3")


class Operation:
    """An operation of a program.

    Args:
        raw: TensorFlow's.
        type: Its type: TensorFlow's, or one of those above.
        inputs: What it takes.
        inner: The programs that it runs: the condition and the body of a loop, the branches of a
            condition in the order of their numbers, or what XLA compiles. Branches take all inputs
            but the first one.
    """

    __slots__ = ("after", "inner", "inputs", "name", "outputs", "raw", "type")

    def __init__(
        self,
        raw: tf.Operation,
        type: str,  # noqa: A002
        inputs: Sequence["Tensor"] = (),
        inner: "Sequence[Program]" = (),
    ) -> None:
        self.raw, self.type, self.name = raw, type, raw.name
        self.inputs, self.inner = list(inputs), list(inner)
        self.outputs = [Tensor(self, place, each) for place, each in enumerate(raw.outputs)]
        self.after: list[Operation] = []
        """The operations that it has to wait for besides those that make its inputs."""

    def __getattr__(self, name: str) -> Any:
        """Whatever else TensorFlow's has, such as its attributes and the user's line."""
        return getattr(self.raw, name)

    @property
    def writes(self) -> set[int]:
        """The numbers of the variables that it assigns, also in its programs."""
        found = set().union(*(inner.writes for inner in self.inner))
        if self.type in WRITES and self.inputs[0].variable is not None:
            found.add(self.inputs[0].variable)
        return found


class Closing(Operation):
    """Sums what replicas have, if a condition takes another branch than the one that can wait.

    Args:
        raw: An operation with such a result.
        inputs: The condition, and what replicas have.
        waiting: The number of the branch that can wait.
    """

    __slots__ = ("waiting",)

    def __init__(self, raw: tf.Operation, inputs: Sequence["Tensor"], waiting: int) -> None:
        super().__init__(raw, CLOSING, inputs)
        self.waiting = waiting

    @property
    def accumulator(self) -> int | None:
        """The number of the variable that keeps what waits."""
        return self.inputs[1].op.inputs[0].op.inputs[0].variable


class Tensor:
    """A tensor of a program.

    Args:
        op: The operation that makes it.
        value_index: Its place among that one's results.
        raw: TensorFlow's.

    Attributes:
        users: The operations that take it, once each.
        variable: The number of the variable whose handle it is; None for all others.
    """

    __slots__ = ("dtype", "op", "raw", "shape", "users", "value_index", "variable")

    def __init__(self, op: Operation, value_index: int, raw: tf.Tensor) -> None:
        self.op, self.value_index, self.raw = op, value_index, raw
        self.dtype, self.shape = raw.dtype, raw.shape
        self.users: list[Operation] = []
        self.variable: int | None = None

    @property
    def name(self) -> str:
        return str(self.raw.name)

    def set_shape(self, shape: Any) -> None:
        """Note what else is known of its shape."""
        self.shape = self.shape.merge_with(shape)

    @property
    def constant(self) -> Any:
        """Its value as an array, if TensorFlow knows it while it traces; otherwise None."""
        return tf.get_static_value(self.raw)


class Program:
    """The operations that results and effects need, each after those it needs.

    Apart from that they keep the order of the graph, so that a variable is read before or after it
    is assigned, as there.

    Args:
        graph: The graph of a function.
        variables: The number of the variable whose handle each input is, or None.
        taps: Tensors of the graph that are needed besides the results.

    Attributes:
        inputs: What it takes. Their operations are placeholders, which it does not contain.
        outputs: Its results.
        taps: What `taps` have become.
        operations: Its operations.
        tensors: What the tensors of the graph have become, by name.
    """

    def __init__(
        self, graph: Any, variables: Sequence[int | None] = (), taps: Sequence[tf.Tensor] = ()
    ) -> None:
        self.inputs = [Operation(each.op, "Placeholder").outputs[0] for each in graph.inputs]
        for tensor, number in zip(self.inputs, variables, strict=False):
            tensor.variable = number
        self.operations: list[Operation] = []
        self._constants: dict[bytes, Operation] = {}
        self.tensors = self._read(graph, self.inputs, taps)
        self.outputs = [self.tensors[tensor.name] for tensor in graph.outputs]
        self.taps = [self.tensors[tensor.name] for tensor in taps]
        self.keep_needed()

    def all_operations(self) -> Iterator[Operation]:
        """The operations, and those of the programs that they run."""
        for op in self.operations:
            yield op
            for inner in op.inner:
                yield from inner.all_operations()

    @property
    def writes(self) -> set[int]:
        """The numbers of the variables that it assigns."""
        return set().union(*(op.writes for op in self.operations))

    @property
    def passed_through(self) -> list[bool]:
        """As the body of a loop: which of its inputs it passes on unchanged."""
        pairs = zip(self.outputs, self.inputs, strict=True)
        return [passed_on(out) is given for out, given in pairs]

    def _read(
        self, graph: Any, given: Sequence[Tensor], taps: Sequence[tf.Tensor] = ()
    ) -> dict[str, Tensor]:
        """Add the operations of a graph that takes these tensors; returns its tensors, by name."""
        made = {each.name: own for each, own in zip(graph.inputs, given, strict=True)}
        operations: dict[str, Operation] = {}
        for raw in in_order(graph, taps):
            if raw.type == "Placeholder" and f"{raw.name}:0" in made:
                continue
            inputs = [made[tensor.name] for tensor in raw.inputs]
            name = called(raw)
            if name is not None and not is_compiled(raw):
                inner = called_graph(raw, name, inputs)
                results = self._read(inner, inputs)
                for out, result in zip(raw.outputs, inner.outputs, strict=True):
                    made[out.name] = refined(results[result.name], out)
                continue
            constant = constant_in(raw)
            op = self._constants.get(constant)
            if op is None:
                op = self._operation(raw, name, inputs)
                self.operations.append(op)
                if constant:
                    self._constants[constant] = op
            operations[raw.name] = op
            op.after = [operations[o.name] for o in raw.control_inputs if o.name in operations]
            made |= {out.name: own for out, own in zip(raw.outputs, op.outputs, strict=True)}
        for tensor, own in zip(graph.inputs, given, strict=True):
            refined(own, tensor)
        return made

    def _operation(self, raw: tf.Operation, name: str | None, inputs: list[Tensor]) -> Operation:
        if raw.type in ("While", "StatelessWhile"):
            # An iteration may change a shape, so those of the inputs are not enough.
            shapes = [tf.TensorShape(shape) for shape in raw.get_attr("output_shapes")]
            names = [raw.get_attr(each).name for each in ("cond", "body")]
            graphs = [graph_internals.called_graph(raw, name, shapes) for name in names]
            op = Operation(raw, LOOP, inputs, [inner_program(each, inputs) for each in graphs])
            handles = inputs
        elif raw.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            # The number of a branch is the condition's: 0 where it is false.
            names = (
                [each.name for each in raw.get_attr("branches")]
                if "Case" in raw.type
                else [raw.get_attr(each).name for each in ("else_branch", "then_branch")]
            )
            graphs = [called_graph(raw, name, inputs[1:]) for name in names]
            inner = [inner_program(each, inputs[1:]) for each in graphs]
            op = Operation(raw, BRANCH, inputs, inner)
            handles = inner[0].outputs
        elif name is not None:
            op = Operation(
                raw, COMPILED, inputs, [inner_program(called_graph(raw, name, inputs), inputs)]
            )
            handles = op.inner[0].outputs
        else:
            op = Operation(raw, raw.type, inputs)
            handles = inputs[:1] if raw.type == "Identity" else []
        for out, handle in zip(op.outputs, handles, strict=False):
            out.variable = handle.variable
        return op

    def keep_needed(self) -> None:
        """Drop the operations that neither results nor effects need, and note all users."""
        needed = {tensor.op for tensor in (*self.outputs, *self.taps)}
        kept = []
        for op in reversed(self.operations):
            if op in needed or has_effect(op):
                needed.update(tensor.op for tensor in op.inputs)
                kept.append(op)
        self.operations = kept[::-1]
        for tensor in (*self.inputs, *(out for op in self.operations for out in op.outputs)):
            tensor.users = []
        for op in self.operations:
            for tensor in dict.fromkeys(op.inputs):
                tensor.users.append(op)

    def replace(self, tensor: Tensor, other: Tensor) -> None:
        """Let all users take another tensor."""
        for op in tensor.users:
            op.inputs = [other if each is tensor else each for each in op.inputs]
        self.outputs = [other if each is tensor else each for each in self.outputs]


def inner_program(graph: Any, given: Sequence[Tensor]) -> Program:
    """The program of a graph that an operation runs, given these tensors."""
    return Program(graph, [tensor.variable for tensor in given])


def refined(tensor: Tensor, raw: tf.Tensor) -> Tensor:
    """A tensor, with what is known of the shape of another one that is the same."""
    if raw.dtype not in (tf.resource, tf.variant) and not tensor.shape.is_fully_defined():
        tensor.set_shape(raw.shape)
    return tensor


def called(raw: tf.Operation) -> str | None:
    """The name of the function that an operation calls; None if it calls none."""
    if raw.type in ("PartitionedCall", "StatefulPartitionedCall"):
        return str(raw.get_attr("f").name)
    return raw.type if graph_internals.is_function(raw) else None


def called_graph(raw: tf.Operation, name: str, inputs: Sequence[Tensor]) -> Any:
    return graph_internals.called_graph(raw, name, [tensor.shape for tensor in inputs])


def constant_in(raw: tf.Operation) -> bytes:
    """A small constant, as bytes that equal ones share; empty if an operation is not one.

    A quarter of a step are shapes and axes, most of which are the same few.
    """
    if raw.type != "Const" or raw.control_inputs:
        return b""
    value = raw.node_def.attr["value"]
    return value.SerializeToString() if value.ByteSize() < MOST_BYTES else b""


def is_compiled(raw: tf.Operation) -> bool:
    """Whether XLA compiles the function that an operation calls."""
    attributes = raw.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def in_order(graph: Any, taps: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """The operations of a graph that may be needed, each after those that make its inputs."""
    # The gradient of a loop adds outputs to it, so an operation may need one that was made later.
    done: set[str] = set()
    for start in graph.get_operations():
        stack = [start]
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


def passed_on(tensor: Tensor) -> Tensor:
    """The tensor behind any number of identities."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def has_effect(op: Operation | tf.Operation) -> bool:
    """Whether an operation, of a program or of TensorFlow's, has an effect besides its results."""
    if isinstance(op, Operation) and op.inner:
        return any(has_effect(each) for inner in op.inner for each in inner.operations)
    if op.type in CUDNN_RNNS and not op.get_attr("dropout"):
        return False  # They keep the state of a generator, for dropout between layers.
    return bool(
        op.op_def.is_stateful and op.type not in EFFECTLESS and not op.type.startswith("TensorList")
    )


def runs_once(op: Operation | tf.Operation, changes_tables: bool) -> bool:
    """Whether only one replica may run an operation, because it has effects or a state.

    Args:
        op: The operation, which does not access a known variable.
        changes_tables: Whether the step changes a lookup table.
    """
    if op.type in COUNTED_AS_EFFECTS:
        return True
    if op.type in TABLE_READS:
        return changes_tables
    return has_effect(op) and op.type not in ("Assert", "EmptyTensorList", "HashTableV2")
