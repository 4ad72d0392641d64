"""A function with sums over replicas in its middle, traced once for all replicas.

Where the function calls `sum_over_replicas`, its graph is cut. Every replica runs one stage after
another on its device; between two stages the replicas sum what the cuts ask for:

    stage 0 ──> sum ──> stage 1 ──> sum ──> stage 2

An operation runs in the first stage that has all its inputs, so independent sums fall between
the same two stages and travel in one pack.

A replica may take its share in pieces. It then runs each stage for one piece after another and adds
up their summands, before it sums these with the other replicas. What is the same for all pieces it
computes once:

    stage 0 of piece 0 ──> stage 0 of piece 1 ──> sum ──> stage 1
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.training.exchange.cuts import (
    ancestors,
    descendants,
    owned_operations,
    sources,
    stage_numbers,
)
from keras_multigpu.training.exchange.packing import filling
from keras_multigpu.training.exchange.sums import sum_with_riders, summing

Alike = Mapping[str, Callable[[tf.Tensor], None] | None]
"""Who takes results that are the same for all replicas, by name; None for one that nobody takes."""

AT_ONCE = 2**25
"""How many bytes of such results may be there at a time."""

# TensorFlow knows functions by their names in the whole process: no two models may share one.
_numbers = itertools.count()


def trace_stages(
    function: Callable[..., Any],
    specs: Sequence[Any],
    jit_compile: bool,
    of_piece: Sequence[int] = (),
    owned: Callable[[Any], dict[str, int]] = lambda results: {},
) -> Any:
    """Trace a function for arguments of these specs, cut where replicas sum.

    TensorFlow optimizes the graph once, and not for each replica, unless XLA compiles it. It is
    traced outside any strategy; called inside a replica it runs on the replica's device.

    Args:
        of_piece: Which tensors of the arguments differ between the pieces of a share.
        owned: Chooses, from the results, those that one replica of this process computes for all:
            the names of their tensors, with the replica's place.
    """
    cuts: list[tf.Operation] = []
    over_pieces_only: set[str] = set()

    def cut(tensors: list[tf.Tensor], over_pieces: bool = False) -> list[tf.Tensor]:
        cuts.extend(tensor.op for tensor in tensors)
        over_pieces_only.update(tensor.op.name for tensor in tensors if over_pieces)
        return tensors

    def trace(part: Callable[..., Any], part_specs: Sequence[Any]) -> Any:
        with graph_internals.single_device():
            return tf.function(
                part, jit_compile=jit_compile, autograph=False
            ).get_concrete_function(*part_specs)

    with summing(cut):
        whole = trace(function, specs)
    inputs = {whole.graph.inputs[place].op.name for place in of_piece}
    owners = owned(whole.structured_outputs)
    if jit_compile and not cuts and not of_piece and not owners:
        return whole
    compiled = trace if jit_compile else None
    return Stages(whole, cuts, compiled, inputs, over_pieces_only, owners)


class Stages:
    """The stages of a function, which a replica runs one after another.

    Args:
        whole: The function, traced.
        cuts: The operations where it sums.
        compiled: Lets XLA compile a function for arguments of some specs; None without XLA.
        of_piece: The names of the inputs that differ between the pieces of a share.
        over_pieces_only: The names of the cuts that sum over the pieces of one replica's share.
        owners: The names of the results that one replica computes for all, with its place.
    """

    def __init__(
        self,
        whole: Any,
        cuts: Sequence[tf.Operation],
        compiled: Callable[[Callable[..., Any], Sequence[Any]], Any] | None,
        of_piece: Collection[str],
        over_pieces_only: Collection[str],
        owners: dict[str, int],
    ) -> None:
        self._over_pieces_only, self._owners = over_pieces_only, owners
        self.graph = whole.graph
        self.structured_outputs = whole.structured_outputs
        # Functions that its operations call live as long as it does.
        self._whole = whole
        names = {cut.name for cut in cuts}
        outside = names | {tensor.op.name for tensor in self.graph.inputs}
        numbers = stage_numbers(self.graph, names)
        of_pieces = descendants(self.graph, of_piece, names)
        # With pieces, each stage comes in two: what all pieces have in common, and each piece.
        halves = 2 if of_piece else 1
        count = halves * (1 + max(numbers.values()))
        self._stages = [Stage(of_piece=place % halves == 1) for place in range(count)]
        # After all stages comes what one replica computes for all.
        self._owned = {place: Stage() for place in sorted(set(owners.values()))}
        owned = owned_operations(self.graph, owners, outside | (of_pieces & numbers.keys()))
        made = {op.name: at for at, op in enumerate(self.graph.get_operations())}
        for operation in self.graph.get_operations():
            name = operation.name
            if name in owned:
                self._owned[owned[name]].operations.append(operation)
            elif name in numbers and name not in outside:
                place = halves * numbers[name] + (name in of_pieces)
                self._stages[place].operations.append(operation)
        # In the order in which their tensors are computed, not in which they were requested.
        for cut in sorted(cuts, key=lambda cut: made[cut.inputs[0].op.name]):
            if cut.name in numbers:
                self._stages[halves * (numbers[cut.name] + 1) - 1].cuts.append(cut)
        self._define([*self._stages, *self._owned.values()], compiled)
        self._exchanges = exchanges(self._stages, over_pieces_only)

    def _define(self, stages: "Sequence[Stage]", compiled: Any) -> None:
        """Make TensorFlow functions of the stages."""
        definition = self._whole.function_def
        nodes = node_definitions(self.graph, definition)
        for stage in stages:
            stage.find_nodes(nodes)
        wanted = {tensor.name for tensor in self.graph.outputs}
        wanted.update(name for stage in stages for name in stage.names_needed)
        must_run = {operation.name for operation in self.graph.control_outputs}
        functions = [stage.definition(definition, wanted, must_run) for stage in stages]
        if compiled is None:
            # Once for all replicas: TensorFlow would do it for each call, which was 22 of the 67 s
            # of processor time of a first step on 8 replicas. This takes 1.1 s.
            functions = graph_internals.optimized_functions(functions, self.graph.as_graph_def())
        elif any(stage.passes_lists for stage in stages):
            # XLA has no way to hand on a list, such as a loop makes for the way back. TensorFlow
            # runs these stages, but for what only XLA can do, or does in another way.
            only_xla = sorted(filter(needs_xla, types_in(self.graph)))
            if only_xla:
                raise CannotSplit(f"XLA cannot sum between a loop and its gradient: {only_xla}")
        for stage, function in zip(stages, functions, strict=True):
            stage.define(function, compiled)

    def __call__(self, *args: Any) -> Any:
        return self.in_pieces([args])[0]

    def in_pieces(
        self,
        pieces: Sequence[Sequence[Any]],
        run: "RunStage | None" = None,
        place: int | None = None,
        alike: Collection[str] = (),
    ) -> list[Any]:
        """What the function returns for each piece of a replica's share.

        Args:
            pieces: The arguments for each piece.
            run: Runs a stage for all pieces; `Stage.run` by default.
            place: The replica's. Its results that other replicas compute are None. By default one
                device computes all.
            alike: The names of results of which the first piece alone is given.
        """
        if not tf.executing_eagerly():
            # The calls that this graph makes need the functions of the stages.
            tf.compat.v1.add_to_collection("keras_multigpu/stages", self)
        run = run or Stage.run
        known = [self._inputs(args) for args in pieces]
        summands: dict[str, tf.Tensor] = {}
        for stage, all_cuts in zip(self._stages, self._exchanges, strict=True):
            summands |= run(stage, known)
            own = [cut for cut in stage.cuts if cut.name in self._over_pieces_only]
            sums = {cut.outputs[0].name: summands[cut.inputs[0].name] for cut in own}
            for cuts in all_cuts:
                tensors = [summands[cut.inputs[0].name] for cut in cuts]
                summed = sum_with_riders(tensors)
                sums |= {cut.outputs[0].name: t for cut, t in zip(cuts, summed, strict=True)}
            for each in known:
                each |= sums
        for owner, stage in self._owned.items():
            if place in (None, owner):
                run(stage, known)
        others = {name for name, own in self._owners.items() if place not in (None, own)}
        left_out = [others, *[others.union(alike)] * (len(known) - 1)]
        return [
            tf.nest.map_structure(
                lambda leaf, each=each, left=left: (
                    None if leaf is None or leaf.name in left else each[leaf.name]
                ),
                self.graph.structured_outputs,
                expand_composites=True,
            )
            for each, left in zip(known, left_out, strict=True)
        ]

    def run_in_turn(self, all_args: Sequence[Any], alike: Alike) -> list[Any]:
        """As `in_pieces`, without a graph around it, in little memory.

        Args:
            all_args: The arguments for each replica.
            alike: The results that are the same for all, which are taken and not returned.
        """
        stages = [*self._stages, *self._owned.values()]
        last = {name: number for number, stage in enumerate(stages) for name in stage.names_needed}
        results = {tensor.name for tensor in self.graph.outputs} - alike.keys()
        known = [self._inputs(args) for args in all_args]
        left = {name: taken_by for name, taken_by in alike.items() if taken_by is not None}

        def take(name: str, value: tf.Tensor) -> None:
            if name in left:
                left.pop(name)(value)

        for number, stage in enumerate(stages):
            ends = [t for t in stage.outputs if t.name in alike and t.name not in last]
            common, parts = self._apart(stage, ends, alike)
            sums: dict[str, tf.Tensor] = {}
            for place, each in enumerate(known):
                made = common.call_eagerly(each)
                for end in ends if not parts else ():
                    take(end.name, made.pop(end.name))
                for name in stage.summands:
                    value = made[name] if name in made else each[name]
                    sums[name] = sums[name] + value if place else value
                    if last[name] == number and name not in results:
                        made.pop(name, None)
                    del value
                each |= made
                del made
            for part in parts:
                for name, value in part.call_eagerly(known[0]).items():
                    take(name, value)
            for cut in stage.cuts:
                whole = sums[cut.inputs[0].name]
                for each in known:
                    each[cut.outputs[0].name] = whole
            for each in known:
                for name in [name for name in each if last.get(name) == number]:
                    if name not in results and name not in left:
                        del each[name]
        # Some are inputs or sums, or other stages need them.
        for name in list(left):
            take(name, known[0][name])
        return [
            tf.nest.map_structure(
                lambda leaf, each=each: (
                    None if leaf is None or leaf.name in alike else each[leaf.name]
                ),
                self.graph.structured_outputs,
                expand_composites=True,
            )
            for each in known
        ]

    def _apart(
        self, stage: "Stage", ends: Sequence[tf.Tensor], alike: Alike
    ) -> "tuple[Stage, list[Stage]]":
        """A stage without the outputs that the first replica computes for all, and with some each.

        Args:
            ends: These outputs, which no stage needs. If they are small, the stage stays whole.
            alike: Those that nobody takes are left out.
        """
        if sum(map(size_of, ends)) <= AT_ONCE:
            return stage, []
        groups: list[list[tf.Tensor]] = [[]]
        for end in ends:
            if alike[end.name] is not None:
                if sum(map(size_of, groups[-1])) + size_of(end) > AT_ONCE:
                    groups.append([])
                groups[-1].append(end)
        names = {end.name for end in ends}
        others = [tensor for tensor in stage.outputs if tensor.name not in names]
        must_run = {operation.name for operation in self.graph.control_outputs}
        kept = [op for op in stage.operations if op.name in must_run]
        made = []
        nodes = node_definitions(self.graph, self._whole.function_def)
        outside = {tensor.op.name for tensor in stage.inputs.values()}
        for wanted, effects in ((others, kept), *((group, ()) for group in groups if group)):
            part = Stage()
            needed = ancestors([*(tensor.op for tensor in wanted), *effects], stop=outside)
            part.operations = [op for op in stage.operations if op.name in needed]
            part.find_nodes(nodes)
            names = {tensor.name for tensor in wanted}
            definition = part.definition(self._whole.function_def, names, must_run)
            part.define(definition, None)
            made.append(part)
        return made[0], made[1:]

    @property
    def after_sums(self) -> list["Stage"]:
        """The stages after all sums: the last part of an update."""
        summing = [number for number, stage in enumerate(self._stages) if stage.cuts]
        return [*self._stages[max(summing, default=-1) + 1 :], *self._owned.values()]

    def types_after_sums(self) -> set[str]:
        """The types of operations that pieces run after a sum: what these need is kept for all."""
        later = [stage for stage in self._stages[2:] if stage.of_piece]
        return {operation.type for stage in later for operation in stage.operations}

    def _inputs(self, args: Any) -> dict[str, tf.Tensor]:
        """The values of the graph's inputs for these arguments, by name."""
        given = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if leaf is not None]
        given += self._whole.captured_inputs
        return {
            placeholder.name: tf.convert_to_tensor(value, placeholder.dtype)
            for placeholder, value in zip(self.graph.inputs, given, strict=True)
        }


class Stage:
    """The operations between two sums, and the cuts that come after them.

    Args:
        of_piece: Whether each piece of a share runs them.

    Attributes:
        inputs: The tensors that it takes from outside, by name.
        outputs: The tensors that others need.
        call: The values of `outputs`, given those of `inputs`.
    """

    # It becomes a function by its definition: to trace it would take TensorFlow as long as to
    # trace the model once more.
    def __init__(self, of_piece: bool = False) -> None:
        self.of_piece = of_piece
        self.operations: list[tf.Operation] = []
        self.cuts: list[tf.Operation] = []
        self._nodes: dict[str, Any] = {}
        self.inputs: dict[str, tf.Tensor] = {}
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
        return f"kmg_input_{list(self.inputs).index(tensor.name)}"

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

    def define(self, function: Any, compiled: Any) -> None:
        """Register the function with TensorFlow; `compiled` as in `Stages`."""
        name = self._name = function.signature.name
        graph_internals.add_function(function)
        # TensorFlow would keep it until the process ends, and so those of all models ever traced.
        weakref.finalize(self, graph_internals.remove_function, name)
        kind = tf.raw_ops.PartitionedCall
        # TensorFlow may leave out or merge calls of the other kind.
        if any(operation.op_def.is_stateful for operation in self.operations):
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
                summands[name] = summands[name] + each[name] if place else each[name]
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


def run_in_turn(function: Any, all_args: Sequence[Any], alike: Alike) -> list[Any]:
    """What a traced function returns for each replica, run on one device for one after another.

    Args:
        alike: As in `Stages.run_in_turn`.
    """
    if isinstance(function, Stages):
        return function.run_in_turn(all_args, alike)
    found = [function(*args) for args in all_args]
    names = [leaf.name for leaf in function.graph.outputs]
    values = tf.nest.flatten(found[0], expand_composites=True)
    known = dict(zip(names, (each for each in values if each is not None), strict=True))
    for name, take in alike.items():
        if take is not None:
            take(known[name])
    return found


def size_of(tensor: tf.Tensor) -> int:
    """How many bytes a tensor takes; 0 if unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def exchanges(stages: Sequence[Stage], left_out: Collection[str]) -> list[list[list[tf.Operation]]]:
    """What replicas exchange after each stage: lists of cuts, which are packed by themselves.

    Collectives run one after another on each device, in the order in which they are called. What
    the next stage needs comes first. Gradients, which only the update needs, wait until they fill
    a bucket: if all of them waited for the update, their sums could hide behind nothing.

    Args:
        left_out: The names of cuts that are not exchanged.
    """
    due = due_times(stages)
    late = [
        cut
        for number, stage in enumerate(stages)
        for cut in stage.cuts
        if due[cut.name] > number + 1 and cut.name not in left_out
    ]
    left = sum(map(bytes_of_cut, late))
    found: list[list[list[tf.Operation]]] = []
    waiting: list[tf.Operation] = []
    for number, stage in enumerate(stages):
        waiting += [cut for cut in stage.cuts if cut.name not in left_out]
        needed = [cut for cut in waiting if due[cut.name] <= number + 1]
        waiting = [cut for cut in waiting if due[cut.name] > number + 1]
        found.append([needed] if needed else [])
        size = sum(map(bytes_of_cut, waiting))
        if size and size >= filling(left):
            found[-1].append(waiting)
            waiting, left = [], left - size
    return found


def bytes_of_cut(cut: tf.Operation) -> int:
    """How many bytes a cut sums; 0 if it sums rows, whose number is open."""
    (tensor,) = cut.inputs
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def due_times(stages: Sequence[Stage]) -> dict[str, int]:
    """The first stage that needs each sum, by the name of its cut."""
    due = {cut.name: len(stages) for stage in stages for cut in stage.cuts}
    for number, stage in reversed(list(enumerate(stages))):
        for name in stage.names_needed:
            cut = name.rpartition(":")[0]
            if cut in due:
                due[cut] = number
    return due


def types_in(graph: Any) -> set[str]:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for each in definition.library.function for n in each.node_def)]
    return {node.op for node in nodes}


def needs_xla(kind: str) -> bool:
    """Whether an operation's type has other numbers without XLA, or no kernel at all."""
    return kind.startswith("Xla") or "Normal" in kind or "Multinomial" in kind


def call_by_name(kind: Any, name: str, types: Sequence[tf.DType], *tensors: tf.Tensor) -> Any:
    """Call a function that is registered with TensorFlow."""
    results = kind(args=tensors, Tout=types, f=name)
    return results if types else []


def node_definitions(graph: Any, function: Any) -> dict[str, Any]:
    """The definitions of a graph's operations in its function, by the operations' names."""
    # A function gives some of them other names, and keeps their order.
    inputs = {tensor.op.name for tensor in graph.inputs}
    names = [each.name for each in graph.get_operations() if each.name not in inputs]
    return dict(zip(names, function.node_def, strict=True))


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
