"""A function traced once for all replicas, although these exchange sums in the middle of it.

Where the function calls `total`, its graph is cut. Every replica runs one stage after another
on its device; between them the replicas sum what the cuts ask for:

    stage 0 ──> sum ──> stage 1 ──> sum ──> stage 2

An operation stands in the first stage that has all it needs, so sums that need nothing from
each other stand between the same two stages and travel in one pack.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.exchange.packing import Packing

SumAll = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""Sums each of some tensors over all replicas, when all of them call it."""

_thread = threading.local()


def total(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over replicas; its gradient is the sum of theirs."""

    @tf.custom_gradient
    def summed(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return totals([own])[0], total

    result: tf.Tensor = summed(tensor)
    return result


def totals(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors over replicas, which pass no gradient on.

    TensorFlow walks back from a sum to look for variables, through the graphs of all replicas,
    which takes minutes where there are many sums. It stops where nothing is differentiated.
    """
    result: list[tf.Tensor] = _thread.sum([tf.stop_gradient(tensor) for tensor in tensors])
    return result


@contextlib.contextmanager
def summing(function: SumAll | None) -> Iterator[None]:
    """Let `total` sum with this function."""
    before = present_sum()
    _thread.sum = function
    try:
        yield
    finally:
        _thread.sum = before


def present_sum() -> SumAll | None:
    """What `total` sums with now; None outside of replicas."""
    return getattr(_thread, "sum", None)


class Stages:
    """The stages of a function, which a replica runs one after another.

    Args:
        whole: The function, traced.
        cuts: The operations of its graph that stand for sums.
        trace: Traces a stage for arguments of some specs.
    """

    def __init__(self, whole: Any, cuts: Sequence[tf.Operation], trace: Callable[..., Any]) -> None:
        self.graph = whole.graph
        self.structured_outputs = whole.structured_outputs
        self._captured = whole.captured_inputs
        apart = {tensor.op.name for tensor in self.graph.inputs} | {cut.name for cut in cuts}
        numbers = stage_numbers(self.graph, {cut.name for cut in cuts})
        parts = [Part() for _ in range(1 + max(numbers.values()))]
        for operation in self.graph.get_operations():
            if operation.name in numbers and operation.name not in apart:
                parts[numbers[operation.name]].operations.append(operation)
        for cut in cuts:
            if cut.name in numbers:
                parts[numbers[cut.name]].cuts.append(cut)
        whole_def = self.graph.as_graph_def()
        nodes = {node.name: node for node in whole_def.node}
        for part in parts:
            part.find_inputs(nodes)
        wanted = {tensor.name for tensor in self.graph.outputs}
        wanted.update(name for part in parts for name in part.names_needed)
        for part in parts:
            part.trace(wanted, whole_def, trace)
        self._parts = parts

    def __call__(self, *args: Any) -> Any:
        """What the function returns to one replica, when all call it."""
        given = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if leaf is not None]
        known = {
            placeholder.name: tf.convert_to_tensor(value, placeholder.dtype)
            for placeholder, value in zip(self.graph.inputs, [*given, *self._captured], strict=True)
        }
        for part in self._parts:
            known |= part(known)
            own = [known[cut.inputs[0].name] for cut in part.cuts]
            packing = Packing(own)
            summed = packing.unpack(totals(packing.pack(own)))
            known |= {c.outputs[0].name: t for c, t in zip(part.cuts, summed, strict=True)}
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else known[leaf.name],
            self.graph.structured_outputs,
            expand_composites=True,
        )


class Part:
    """The operations of one stage, and the sums that replicas make after it."""

    def __init__(self) -> None:
        self.operations: list[tf.Operation] = []
        self.cuts: list[tf.Operation] = []
        self._nodes: dict[str, Any] = {}
        self._inputs: dict[str, tf.Tensor] = {}
        self._outputs: list[tf.Tensor] = []
        self._function: Any = None

    @property
    def names_needed(self) -> list[str]:
        """The names of tensors that have to be there, for the operations and for the sums."""
        needed = [*self._inputs.values(), *(cut.inputs[0] for cut in self.cuts)]
        return [tensor.name for tensor in needed]

    def find_inputs(self, nodes: dict[str, Any]) -> None:
        """Find what comes from outside: tensors, and operations that must be over.

        Args:
            nodes: The definitions of all operations of the graph, by name.
        """
        self._nodes = {operation.name: nodes[operation.name] for operation in self.operations}
        for operation in self.operations:
            for tensor in operation.inputs:
                if is_constant(tensor.op):
                    # XLA must see it where it is used.
                    self._nodes.setdefault(tensor.op.name, nodes[tensor.op.name])
                elif tensor.op.name not in self._nodes:
                    self._inputs[tensor.name] = tensor
            outside = [op for op in operation.control_inputs if op.name not in self._nodes]
            if outside:
                self._wait(operation, with_outputs(outside))

    def _wait(self, operation: tf.Operation, earlier: list[tf.Operation]) -> None:
        """Let an operation wait for others, by way of what these put out."""
        node = type(self._nodes[operation.name])()
        node.CopyFrom(self._nodes[operation.name])
        inside = [name for name in node.input if name.lstrip("^") in self._nodes or name[0] != "^"]
        del node.input[:]
        node.input.extend([*inside, *(f"^{each.name}" for each in earlier)])
        self._nodes[operation.name] = node
        for each in earlier:
            if each.name not in self._nodes:
                self._inputs[f"^{each.name}"] = each.outputs[0]

    def trace(self, wanted: set[str], whole: Any, trace: Callable[..., Any]) -> None:
        """Make a function of the operations.

        Args:
            wanted: The names of tensors that are needed outside.
            whole: The definition of the whole graph.
            trace: See `Stages`.
        """
        self._outputs = [t for op in self.operations for t in op.outputs if t.name in wanted]
        graph = type(whole)(versions=whole.versions, library=whole.library)
        graph.node.extend(self._nodes.values())
        for node in graph.node:
            node.attr.pop("_class", None)

        outputs = [tensor.name for tensor in self._outputs]

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            given = dict(zip(self._inputs, tensors, strict=True))
            made: list[tf.Tensor] = tf.graph_util.import_graph_def(graph, given, outputs)
            return made

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._inputs.values()]
        self._function = trace(run, specs)

    def __call__(self, known: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The tensors that are needed outside, by name.

        Args:
            known: Those of earlier stages.
        """
        made = self._function(*(known[tensor.name] for tensor in self._inputs.values()))
        for tensor, value in zip(self._outputs, made, strict=True):
            # The next function takes what its specs say, and no less.
            value.set_shape(tensor.shape)
        return {tensor.name: value for tensor, value in zip(self._outputs, made, strict=True)}


def stage_numbers(graph: Any, cuts: set[str]) -> dict[str, int]:
    """In which stage each operation runs, by name, if the results need it.

    Args:
        graph: The graph of a function.
        cuts: The names of operations that stand for sums.
    """
    numbers: dict[str, int] = {}
    waiting = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while waiting:
        operation = waiting[-1]
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        unknown = [each for each in before if each.name not in numbers]
        if unknown and operation.name not in numbers:
            waiting += unknown
            continue
        waiting.pop()
        numbers[operation.name] = max(
            [0, *(numbers[each.name] + (each.name in cuts) for each in before)]
        )
    return numbers


def is_constant(operation: tf.Operation) -> bool:
    """Whether an operation can be repeated in each stage that uses it."""
    return operation.type == "Const" and not operation.control_inputs


def with_outputs(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Operations, and instead of those without outputs what these wait for."""
    found: list[tf.Operation] = []
    for operation in operations:
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        found += [operation] if operation.outputs else with_outputs(before)
    return found
