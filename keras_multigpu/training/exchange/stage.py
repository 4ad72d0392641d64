"""`Stage`: what a replica computes between two sums, as a function that TensorFlow calls."""

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.exchange.cuts import sources

# TensorFlow knows functions by their names in the whole process: no two models may share one.
_numbers = itertools.count()


class Stage:
    """The operations between two sums, and the cuts that come after them.

    Args:
        of_piece: Whether each piece of a share runs them.
        operations: The operations, in the order of the graph.

    Attributes:
        inputs: The tensors that it takes from outside, by name.
        alike: The names of summands that are not summed but gathered: pieces have the same.
        outputs: The tensors that others need.
        call: The values of `outputs`, given those of `inputs`.
    """

    # It becomes a function by its definition: to trace it would take TensorFlow as long as to
    # trace the model once more.
    def __init__(self, of_piece: bool = False, operations: Sequence[tf.Operation] = ()) -> None:
        self.of_piece = of_piece
        self.operations = list(operations)
        self.cuts: list[tf.Operation] = []
        self.alike: set[str] = set()
        self._nodes: dict[str, Any] = {}
        self.inputs: dict[str, tf.Tensor] = {}
        self._places: dict[str, int] = {}
        self.outputs: list[tf.Tensor] = []
        self.call: Any = None
        self._name = ""

    @property
    def passes_lists(self) -> bool:
        """Whether a list of tensors comes from an earlier stage, or goes to a later one."""
        tensors = [*self.inputs.values(), *self.outputs]
        return any(tensor.dtype == tf.variant for tensor in tensors)

    @property
    def names_needed(self) -> list[str]:
        """The names of the tensors that the operations and the sums need."""
        return [*self.inputs, *self.summands]

    @property
    def summands(self) -> list[str]:
        return list(dict.fromkeys(cut.inputs[0].name for cut in self.cuts))

    def find_nodes(self, nodes: dict[str, Any]) -> None:
        """Find its operations' definitions, and what they need from outside."""
        self._nodes = {operation.name: nodes[operation.name] for operation in self.operations}
        for operation in self.operations:
            for earlier in (tensor.op for tensor in operation.inputs):
                # A constant that the function has captured is an input of it.
                is_constant = earlier.type == "Const" and not earlier.control_inputs
                if is_constant and earlier.name in nodes:
                    # XLA must see it where it is used.
                    self._nodes.setdefault(earlier.name, nodes[earlier.name])
        for operation in self.operations:
            if any(source.name not in self._nodes for source in sources(operation)):
                self._nodes[operation.name] = self._connected(operation)

    def _connected(self, operation: tf.Operation) -> Any:
        """An operation's definition, with the stage's inputs for what comes from outside."""
        node = type(self._nodes[operation.name])()
        node.CopyFrom(self._nodes[operation.name])
        names = [name for name in node.input if not name.startswith("^")]
        for place, tensor in enumerate(operation.inputs):
            if tensor.op.name not in self._nodes:
                names[place] = self._input(tensor)
        inside = [op for op in operation.control_inputs if op.name in self._nodes]
        outside = [op for op in operation.control_inputs if op.name not in self._nodes]
        waits = [self._nodes[op.name].name for op in inside]
        for earlier in with_outputs(outside):
            is_inside = earlier.name in self._nodes
            name = self._nodes[earlier.name].name if is_inside else self._input(earlier.outputs[0])
            waits.append(name)
        node.ClearField("input")
        node.input.extend([*names, *(f"^{name}" for name in dict.fromkeys(waits))])
        return node

    def _input(self, tensor: tf.Tensor) -> str:
        """The name of the function's input that is this tensor."""
        self.inputs.setdefault(tensor.name, tensor)
        return f"kmg_input_{self._places.setdefault(tensor.name, len(self._places))}"

    def definition(self, whole: Any, wanted: set[str], must_run: set[str]) -> Any:
        """The definition of a function of the operations.

        Args:
            whole: The definition of the whole function.
            wanted: The names of the tensors that others need.
            must_run: The names of operations that run although nothing needs them.
        """
        self.outputs = [t for op in self.operations for t in op.outputs if t.name in wanted]
        definition = type(whole)()
        signature = definition.signature
        signature.name = f"kmg_stage_{next(_numbers)}"
        for place, tensor in enumerate(self.inputs.values()):
            name = f"kmg_input_{place}"
            signature.input_arg.add(name=name, type=tensor.dtype.as_datatype_enum)
        for place, tensor in enumerate(self.outputs):
            name = f"kmg_output_{place}"
            signature.output_arg.add(name=name, type=tensor.dtype.as_datatype_enum)
            definition.ret[name] = reference(tensor, self._nodes[tensor.op.name].name)
        definition.node_def.extend(self._nodes.values())
        for node in definition.node_def:
            # Names of operations to be placed with, which may be in other stages.
            node.attr.pop("_class", None)
        for operation in self.operations:
            if operation.name in must_run:
                name = self._nodes[operation.name].name
                signature.control_output.append(name)
                definition.control_ret[name] = name
        return definition

    def define(self, function: Any, compiled: Any = None) -> None:
        """Register the function with TensorFlow; `compiled` as in `Stages`."""
        name = self._name = function.signature.name
        graph_internals.add_function(function)
        # TensorFlow would keep it until the process ends, and so those of all models ever traced.
        weakref.finalize(self, graph_internals.remove_function, name)
        kind = tf.raw_ops.PartitionedCall
        # TensorFlow may leave out or merge calls of the other kind. Of one for XLA that others only
        # wait for, it leaves a "NoOp", which XLA then takes for a function.
        is_stateful = any(operation.op_def.is_stateful for operation in self.operations)
        if is_stateful or compiled is not None:
            kind = tf.raw_ops.StatefulPartitionedCall
        types = [tensor.dtype for tensor in self.outputs]
        self.call = functools.partial(call_by_name, kind, name, types)
        if compiled is not None and not self.passes_lists:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.inputs.values()]
            self.call = compiled(self.call, specs)

    def run(self, known: Sequence[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Run for all pieces, and add the outputs to what each knows; the summands, by name."""
        summands: dict[str, tf.Tensor] = {}
        before: list[tf.Tensor] = []
        made: dict[str, tf.Tensor] = {}
        for place, each in enumerate(known):
            if place and not self.of_piece:
                each |= made
                continue
            # Sums are added up after each piece, so that its memory is free for the next.
            with tf.control_dependencies(before):
                made = self(each)
            each |= made
            for name in self.summands:
                is_added = place and name not in self.alike
                summands[name] = summands[name] + each[name] if is_added else each[name]
            before = [*summands.values()] or list(made.values())
        return summands

    def call_eagerly(self, known: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The values of the outputs, by name, without a graph around it."""
        if not self.operations:
            return {}
        inputs = [known[name] for name in self.inputs]
        made = graph_internals.call_function(self._name, inputs, len(self.outputs))
        return dict(zip([tensor.name for tensor in self.outputs], made, strict=True))

    def __call__(self, known: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The values of the outputs, by name."""
        if not self.operations:
            return {}
        made = self.call(*(known[name] for name in self.inputs))
        for tensor, value in zip(self.outputs, made, strict=True):
            # The next function takes what its specs say, and no less.
            value.set_shape(tensor.shape)
        return {tensor.name: value for tensor, value in zip(self.outputs, made, strict=True)}


RunStage = Callable[[Stage, list[dict[str, tf.Tensor]]], dict[str, tf.Tensor]]
"""Runs a stage for all pieces of a replica's share, as `Stage.run` does."""


def size_of(tensor: tf.Tensor) -> int:
    """How many bytes a tensor takes; 0 if unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def call_by_name(kind: Any, name: str, types: Sequence[tf.DType], *tensors: tf.Tensor) -> Any:
    """Call a function that is registered with TensorFlow."""
    results = kind(args=tensors, Tout=types, f=name)
    return results if types else []


def definitions_of(whole: Any, stages: Sequence[Stage], wanted: Collection[str]) -> list[Any]:
    """The definitions of stages of a function.

    Args:
        whole: The function, traced.
        wanted: The names of the tensors that are needed besides those that stages need.
    """
    graph, definition = whole.graph, whole.function_def
    # A function gives some operations other names, and keeps their order.
    inputs = {tensor.op.name for tensor in graph.inputs}
    names = [each.name for each in graph.get_operations() if each.name not in inputs]
    nodes = dict(zip(names, definition.node_def, strict=True))
    for stage in stages:
        stage.find_nodes(nodes)
    needed = {*wanted, *(name for stage in stages for name in stage.names_needed)}
    must_run = {operation.name for operation in graph.control_outputs}
    return [stage.definition(definition, needed, must_run) for stage in stages]


def reference(tensor: tf.Tensor, name: str) -> str:
    """How a function refers to a tensor whose operation has this name in it."""
    operation, place = tensor.op, tensor.value_index
    for argument in operation.op_def.output_arg:
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        if place < count:
            return f"{name}:{argument.name}:{place}"
        place -= count
    raise IndexError(tensor.name)


def with_outputs(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The operations; in place of those without outputs, what these wait for."""
    found: list[tf.Operation] = []
    for operation in operations:
        found += [operation] if operation.outputs else with_outputs(sources(operation))
    return found
