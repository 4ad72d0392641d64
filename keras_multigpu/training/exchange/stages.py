"""A function traced once for all replicas, although these exchange sums in the middle of it.

Where the function calls `totals`, its graph is cut. Every replica runs one stage after another
on its device; between them the replicas sum what the cuts ask for:

    stage 0 ──> sum ──> stage 1 ──> sum ──> stage 2

An operation runs in the first stage that has all its inputs, so independent sums fall between
the same two stages and travel in one pack.

A replica may take its share in pieces, one after another. Then it runs each stage for all pieces,
adding up what they have, before it sums that with the others; what is the same for all pieces it
computes once:

    stage 0 of piece 0 ──> stage 0 of piece 1 ──> sum ──> stage 1
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.training.exchange.packing import Packing, SumAll, has_room

# `MirroredStrategy` runs each replica on a thread of its own.
_thread = threading.local()
# TensorFlow knows functions by their names in the whole process: no two models may share one.
_numbers = itertools.count()


def totals(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors over replicas, which pass no gradient on."""
    # TensorFlow walks back from a sum to look for variables, through the graphs of all replicas,
    # which takes minutes where there are many sums. It stops where nothing is differentiated.
    result: list[tf.Tensor] = _thread.sum([tf.stop_gradient(tensor) for tensor in tensors])
    return result


def totals_of_pieces(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors over the pieces of one replica's share, where that comes in pieces."""
    result: list[tf.Tensor] = _thread.sum(
        [tf.identity(tensor) for tensor in tensors], of_pieces=True
    )
    return result


@contextlib.contextmanager
def summing(function: Any) -> Iterator[None]:
    """Let `totals` sum with this function."""
    before = present_sum()
    _thread.sum = function
    try:
        yield
    finally:
        _thread.sum = before


def present_sum() -> SumAll | None:
    """What `totals` sums with now; None outside of replicas."""
    return getattr(_thread, "sum", None)


@contextlib.contextmanager
def riding(numbers: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Let some float32 numbers be summed in a pack that stages send in this context anyway.

    The list has their sums then; it stays empty without numbers, or where no pack has room.
    """
    found: list[tf.Tensor] = []
    _thread.riders = (numbers, found) if numbers.shape[0] else None
    try:
        yield found
    finally:
        _thread.riders = None


def traced(
    function: Callable[..., Any],
    specs: Sequence[Any],
    jit_compile: bool,
    of_piece: Sequence[int] = (),
    rounded: Callable[[Collection[str]], Collection[str]] = lambda cuts: (),
    owned: Callable[[Any], dict[str, int]] = lambda results: {},
) -> Any:
    """A graph of `function` for arguments of the given specs, cut where replicas sum.

    If pieces of a replica's share have some arguments of their own, `of_piece` has the places of
    these among all tensors of the arguments; see `Stages.in_pieces`. Once it is traced, `rounded`
    chooses from the names of all operations that mark sums those which travel in bfloat16, and
    `owned` from the results those that one replica of this process computes alone: the names of
    their tensors, with its place.

    TensorFlow optimizes it once, and not for each replica, unless XLA compiles it.

    It is traced outside any strategy, as for one device; called inside a replica it runs
    on that replica's device. TensorFlow itself would trace it once for each replica.
    """
    cuts: list[tf.Operation] = []
    inside: set[str] = set()

    def cut(tensors: list[tf.Tensor], of_pieces: bool = False) -> list[tf.Tensor]:
        cuts.extend(tensor.op for tensor in tensors)
        inside.update(tensor.op.name for tensor in tensors if of_pieces)
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
    in_fewer_bytes = rounded({cut.name for cut in cuts})
    compiled = trace if jit_compile else None
    return Stages(whole, cuts, compiled, inputs, inside, in_fewer_bytes, owners)


class Stages:
    """The stages of a function, which a replica runs one after another.

    Args:
        compiled: What XLA shall make of a function, if it shall.
        of_piece: The names of the inputs that each piece of a replica's share has for itself.
        sums_of_pieces: The names of the cuts that sum over the pieces of one replica only.
        rounded: The names of the cuts whose sums travel in bfloat16.
        owners: The names of results that one replica computes alone, with its place.
    """

    def __init__(
        self,
        whole: Any,
        cuts: Sequence[tf.Operation],
        compiled: Callable[[Callable[..., Any], Sequence[Any]], Any] | None,
        of_piece: Collection[str],
        sums_of_pieces: Collection[str],
        rounded: Collection[str],
        owners: dict[str, int],
    ) -> None:
        self._sums_of_pieces, self._rounded, self._owners = sums_of_pieces, rounded, owners
        self.graph = whole.graph
        self.structured_outputs = whole.structured_outputs
        # Functions that its operations call live as long as it does.
        self._whole = whole
        apart = {tensor.op.name for tensor in self.graph.inputs} | {cut.name for cut in cuts}
        numbers = stage_numbers(self.graph, {cut.name for cut in cuts})
        of_pieces = made_of(self.graph, of_piece, {cut.name for cut in cuts})
        # Of each stage first what is the same for all pieces.
        twice = 2 if of_piece else 1
        count = twice * (1 + max(numbers.values()))
        parts = [Part(of_piece=place % twice == 1) for place in range(count)]
        # After all stages comes what one replica computes alone.
        self._own = {place: Part() for place in sorted(set(owners.values()))}
        alone = needed_by_one(self.graph, owners, apart | (of_pieces & numbers.keys()))
        for operation in self.graph.get_operations():
            name = operation.name
            if name in alone:
                self._own[alone[name]].operations.append(operation)
            elif name in numbers and name not in apart:
                parts[twice * numbers[name] + (name in of_pieces)].operations.append(operation)
        # In the order in which their tensors are computed, not in which they were requested.
        made = {operation.name: at for at, operation in enumerate(self.graph.get_operations())}
        for cut in sorted(cuts, key=lambda cut: made[cut.inputs[0].op.name]):
            if cut.name in numbers:
                parts[twice * numbers[cut.name] + twice - 1].cuts.append(cut)
        definition = whole.function_def
        nodes = definitions(self.graph, definition)
        everything = [*parts, *self._own.values()]
        for part in everything:
            part.find_nodes(nodes)
        wanted = {tensor.name for tensor in self.graph.outputs}
        wanted.update(name for part in everything for name in part.names_needed)
        must_run = {operation.name for operation in self.graph.control_outputs}
        functions = [part.definition(definition, wanted, must_run) for part in everything]
        if compiled is None:
            # Once for all replicas: TensorFlow would do it for each call, which was 22 of the 67 s
            # of processor time of a first step on 8 replicas. This takes 1.1 s.
            functions = graph_internals.optimized_functions(functions, self.graph.as_graph_def())
        elif any(part.hands_on_lists for part in everything):
            # XLA has no way to hand on a list, such as a loop makes for the way back. TensorFlow
            # runs these stages, but for what only XLA can do, or does in another way.
            only_of_xla = sorted(filter(is_of_xla, types_in(self.graph)))
            if only_of_xla:
                raise CannotSplit(f"XLA cannot sum between a loop and its gradient: {only_of_xla}")
        for part, function in zip(everything, functions, strict=True):
            part.define(function, compiled)
        self._parts = parts
        self._due = due_times(parts)

    def __call__(self, *args: Any) -> Any:
        return self.in_pieces([args])[0]

    def in_pieces(
        self,
        pieces: Sequence[Sequence[Any]],
        run: "RunPart | None" = None,
        place: int | None = None,
    ) -> list[Any]:
        """What the function returns for each piece of a replica's share.

        Args:
            run: Runs a part for all pieces; by default here, for one after another.
            place: The replica's, of whose results those that others compute alone are None; by
                default one device has all.
        """
        if not tf.executing_eagerly():
            # The calls that this graph makes need the functions of the stages.
            tf.compat.v1.add_to_collection("keras_multigpu/stages", self)
        known = [self._given(args) for args in pieces]
        summands: dict[str, tf.Tensor] = {}
        waiting: list[tf.Operation] = []
        for number, part in enumerate(self._parts):
            summands |= part.run(known) if run is None else run(part, known)
            here = [cut for cut in part.cuts if cut.name in self._sums_of_pieces]
            sums = {cut.outputs[0].name: summands[cut.inputs[0].name] for cut in here}
            waiting += [cut for cut in part.cuts if cut not in here]
            # Gradients go in buckets of their own, and not with what the next stage waits for.
            due = [cut for cut in waiting if self._due[cut.name] <= number + 1]
            waiting = [cut for cut in waiting if self._due[cut.name] > number + 1]
            own = [summands[cut.inputs[0].name] for cut in due]
            sent_as = [
                tf.bfloat16 if cut.name in self._rounded else tensor.dtype
                for cut, tensor in zip(due, own, strict=True)
            ]
            summed = summed_with_riders(own, sent_as)
            sums |= {cut.outputs[0].name: t for cut, t in zip(due, summed, strict=True)}
            for each in known:
                each |= sums
        for owner, part in self._own.items():
            if place in (None, owner):
                _ = part.run(known) if run is None else run(part, known)
        left = {name for name, own in self._owners.items() if place not in (None, own)}
        return [
            tf.nest.map_structure(
                lambda leaf, each=each: (
                    None if leaf is None or leaf.name in left else each[leaf.name]
                ),
                self.graph.structured_outputs,
                expand_composites=True,
            )
            for each in known
        ]

    def types_of_later_pieces(self) -> set[str]:
        """The types of operations that pieces run after a sum: what these need is kept for all."""
        later = [part for part in self._parts[2:] if part.of_piece]
        return {operation.type for part in later for operation in part.operations}

    def _given(self, args: Any) -> dict[str, tf.Tensor]:
        """What the graph's inputs are for these arguments, by name."""
        given = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if leaf is not None]
        given += self._whole.captured_inputs
        return {
            placeholder.name: tf.convert_to_tensor(value, placeholder.dtype)
            for placeholder, value in zip(self.graph.inputs, given, strict=True)
        }


class Part:
    """The operations of one stage, and the sums that replicas make after it.

    Args:
        of_piece: Whether each piece of a replica's share runs them for itself.

    Attributes:
        inputs: The tensors that have to be there, by name.
        outputs: The tensors that are needed outside.
        call: The values of `outputs`, given those of `inputs`.
    """

    # They become a function by their definitions: to trace it would take TensorFlow as long as to
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
    def hands_on_lists(self) -> bool:
        """Whether a list of tensors comes from an earlier stage, or goes to a later one."""
        tensors = [*self.inputs.values(), *self.outputs]
        return any(tensor.dtype == tf.variant for tensor in tensors)

    @property
    def names_needed(self) -> list[str]:
        """The names of tensors that have to be there, for the operations and for the sums."""
        return [*self.inputs, *self.summands]

    @property
    def summands(self) -> list[str]:
        return list(dict.fromkeys(cut.inputs[0].name for cut in self.cuts))

    def find_nodes(self, nodes: dict[str, Any]) -> None:
        """Find what it runs, and what comes from outside: tensors, and what must be over."""
        self._nodes = {operation.name: nodes[operation.name] for operation in self.operations}
        for operation in self.operations:
            for earlier in (tensor.op for tensor in operation.inputs):
                # A constant that the function has captured is an input of it.
                if is_constant(earlier) and earlier.name in nodes:
                    # XLA must see it where it is used.
                    self._nodes.setdefault(earlier.name, nodes[earlier.name])
        for operation in self.operations:
            outside = [op for op in operation.control_inputs if op.name not in self._nodes]
            if outside or any(tensor.op.name not in self._nodes for tensor in operation.inputs):
                self._nodes[operation.name] = self._connected(operation, outside)

    def _connected(self, operation: tf.Operation, outside: list[tf.Operation]) -> Any:
        """An operation's definition with the function's inputs for what comes from outside.

        Args:
            outside: For which operations it waits that are not in this stage; it waits for what
                they put out.
        """
        node = type(self._nodes[operation.name])()
        node.CopyFrom(self._nodes[operation.name])
        names = [name for name in node.input if not name.startswith("^")]
        waits = [self._nodes[op.name].name for op in operation.control_inputs if op not in outside]
        for place, tensor in enumerate(operation.inputs):
            if tensor.op.name not in self._nodes:
                names[place] = self._input(tensor)
        for earlier in with_outputs(outside):
            inside = earlier.name in self._nodes
            waits.append(
                self._nodes[earlier.name].name if inside else self._input(earlier.outputs[0])
            )
        node.ClearField("input")
        node.input.extend([*names, *(f"^{name}" for name in dict.fromkeys(waits))])
        return node

    def _input(self, tensor: tf.Tensor) -> str:
        """The name of the input that is this tensor."""
        self.inputs.setdefault(tensor.name, tensor)
        return f"kmg_input_{list(self.inputs).index(tensor.name)}"

    def definition(self, whole: Any, wanted: set[str], must_run: set[str]) -> Any:
        """A function of the operations.

        Args:
            wanted: The names of tensors that are needed outside.
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
            # Names of operations to stand beside, which may be in other stages.
            node.attr.pop("_class", None)
        for operation in self.operations:
            if operation.name in must_run:
                name = self._nodes[operation.name].name
                signature.control_output.append(name)
                definition.control_ret[name] = name
        return definition

    def define(
        self, function: Any, compiled: Callable[[Callable[..., Any], Sequence[Any]], Any] | None
    ) -> None:
        """Let TensorFlow know the function; `compiled` as in `Stages`."""
        name = self._name = function.signature.name
        graph_internals.add_function(function)
        # TensorFlow would keep it until the process ends, and so those of all models ever traced.
        weakref.finalize(self, graph_internals.remove_function, name)
        kind = tf.raw_ops.PartitionedCall
        # TensorFlow may leave out or merge calls of the other kind.
        if any(operation.op_def.is_stateful for operation in self.operations):
            kind = tf.raw_ops.StatefulPartitionedCall
        types = [tensor.dtype for tensor in self.outputs]
        self.call = functools.partial(called, kind, name, types)
        if compiled is not None and not self.hands_on_lists:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.inputs.values()]
            self.call = compiled(self.call, specs)

    def run(self, known: Sequence[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Run for all pieces, and give them what they need; what is to be summed, by name."""
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

    def without_graph(self, known: Sequence[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """As `run`, for all replicas and without a graph around it."""
        for each in known:
            if self.operations:
                inputs = [each[name] for name in self.inputs]
                made = graph_internals.call_function(self._name, inputs, len(self.outputs))
                each |= zip([tensor.name for tensor in self.outputs], made, strict=True)
        return {name: sum_of([each[name] for each in known]) for name in self.summands}

    def __call__(self, known: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The tensors that are needed outside, by name."""
        if not self.operations:
            return {}
        made = self.call(*(known[name] for name in self.inputs))
        for tensor, value in zip(self.outputs, made, strict=True):
            # The next function takes what its specs say, and no less.
            value.set_shape(tensor.shape)
        return {tensor.name: value for tensor, value in zip(self.outputs, made, strict=True)}


RunPart = Callable[[Part, list[dict[str, tf.Tensor]]], dict[str, tf.Tensor]]
"""Runs a part for all pieces of a replica's share, as `Part.run` does."""


def due_times(parts: Sequence[Part]) -> dict[str, int]:
    """Which stage is the first that needs a sum, by the name of its operation."""
    due = {cut.name: len(parts) for part in parts for cut in part.cuts}
    for number, part in reversed(list(enumerate(parts))):
        for name in part.names_needed:
            cut = name.rpartition(":")[0]
            if cut in due:
                due[cut] = number
    return due


def summed_together(own: list[tf.Tensor], sent_as: Sequence[tf.DType]) -> list[tf.Tensor]:
    """The sums of tensors over replicas, in one pack; one alone needs none.

    Each travels as a dtype.
    """
    if len(own) < 2:
        return summed_as(own, sent_as) if own else []
    # Where a tensor is as long as the batch, its size is known only when the step runs.
    is_open = [not tensor.shape.is_fully_defined() for tensor in own]
    sizes = {place: tf.shape(own[place]) for place, is_so in enumerate(is_open) if is_so}
    summed: dict[int, tf.Tensor] = {}
    for dtypes in dict.fromkeys((own[place].dtype, sent_as[place]) for place in sizes):
        members = [place for place in sizes if (own[place].dtype, sent_as[place]) == dtypes]
        flat = tf.concat([tf.reshape(own[place], [-1]) for place in members], axis=0)
        whole = summed_as([flat], dtypes[1:])[0]
        parts = tf.split(whole, [tf.size(own[place]) for place in members])
        for place, part in zip(members, parts, strict=True):
            summed[place] = tf.reshape(part, sizes[place])
            summed[place].set_shape(own[place].shape)
    fixed = [place for place, is_so in enumerate(is_open) if not is_so]
    if fixed:
        packing = Packing([own[n] for n in fixed], sent_as=[sent_as[n] for n in fixed])
        packs = summed_as(packing.pack([own[place] for place in fixed]), packing.sent_as)
        summed.update(zip(fixed, packing.unpack(packs), strict=True))
    return [summed[place] for place in range(len(own))]


def summed_with_riders(own: list[tf.Tensor], sent_as: Sequence[tf.DType]) -> list[tf.Tensor]:
    """As `summed_together`, with the numbers that wait for a pack, see `riding`."""
    riders = getattr(_thread, "riders", None)
    if riders is None or not any(map(has_room, own, sent_as)):
        return summed_together(own, sent_as)
    numbers, found = riders
    _thread.riders = None
    of_riders, *summed = summed_together([numbers, *own], [tf.float32, *sent_as])
    found.append(of_riders)
    return summed


def summed_as(own: Sequence[tf.Tensor], sent_as: Sequence[tf.DType]) -> list[tf.Tensor]:
    """The sums of tensors over replicas, each of which travels as a dtype."""
    summed = _thread.sum([tf.cast(each, dtype) for each, dtype in zip(own, sent_as, strict=True)])
    return [tf.cast(whole, each.dtype) for whole, each in zip(summed, own, strict=True)]


def types_in(graph: Any) -> set[str]:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for each in definition.library.function for n in each.node_def)]
    return {node.op for node in nodes}


def is_of_xla(kind: str) -> bool:
    """Whether XLA has other numbers for operations of a type, or TensorFlow no kernel."""
    return kind.startswith("Xla") or "Normal" in kind or "Multinomial" in kind


def called(kind: Any, name: str, types: Sequence[tf.DType], *tensors: tf.Tensor) -> Any:
    """What a function yields that TensorFlow knows by name."""
    results = kind(args=tensors, Tout=types, f=name)
    return results if types else []


def definitions(graph: Any, function: Any) -> dict[str, Any]:
    """What each operation of a graph is in the definition of its function, by name."""
    # A function gives some of them other names, and keeps their order.
    inputs = {tensor.op.name for tensor in graph.inputs}
    names = [each.name for each in graph.get_operations() if each.name not in inputs]
    return dict(zip(names, function.node_def, strict=True))


def reference(tensor: tf.Tensor, name: str) -> str:
    """How a function names a tensor, when it gives the tensor's operation this name."""
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


def for_all(function: Any, all_args: Sequence[Any]) -> list[Any]:
    """What a traced function returns for each replica, where one device runs it for all in turn."""
    if not isinstance(function, Stages):
        return [function(*args) for args in all_args]
    with summing(list):
        return function.in_pieces(all_args, Part.without_graph)


def sum_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(lambda one, two: one + two, tensors)


def stage_numbers(graph: Any, cuts: set[str]) -> dict[str, int]:
    """In which stage each operation runs, by name, if the results need it."""
    numbers: dict[str, int] = {}
    # By a list and not by recursion: graphs are deeper than Python's stack.
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


def needed_by_one(graph: Any, owners: dict[str, int], others: Collection[str]) -> dict[str, int]:
    """The operations that only results of one replica need, by name, with its place.

    Args:
        owners: The names of such results, with its place.
        others: The names of operations that every replica runs.
    """
    if not owners:
        return {}

    def needed(waiting: list[tf.Operation], known: Collection[str]) -> set[str]:
        found: set[str] = set()
        while waiting:
            operation = waiting.pop()
            if operation.name not in known and operation.name not in found:
                found.add(operation.name)
                waiting += [*(t.op for t in operation.inputs), *operation.control_inputs]
        return found

    results = [t.op for t in graph.outputs if t.name not in owners]
    named = [graph.get_operation_by_name(name) for name in others]
    common = needed([*results, *graph.control_outputs, *named], ())
    found: dict[str, int] = {}
    for place in sorted(set(owners.values())):
        own = [t.op for t in graph.outputs if owners.get(t.name) == place]
        for name in needed(own, common):
            if name in found:
                twice = needed([graph.get_operation_by_name(name)], common)
                common |= twice
            found[name] = place
    return {name: place for name, place in found.items() if name not in common}


def made_of(graph: Any, inputs: Collection[str], cuts: Collection[str]) -> set[str]:
    """The names of operations that need some inputs of a graph other than through sums."""
    found: set[str] = set(inputs)
    if not inputs:
        return found
    users: dict[str, list[tf.Operation]] = {}
    for operation in graph.get_operations():
        for before in [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]:
            users.setdefault(before.name, []).append(operation)
    waiting = list(inputs)
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user.name not in found and user.name not in cuts:
                found.add(user.name)
                waiting.append(user.name)
    return found


def is_constant(operation: tf.Operation) -> bool:
    return operation.type == "Const" and not operation.control_inputs


def with_outputs(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Operations, and instead of those without outputs what these wait for."""
    found: list[tf.Operation] = []
    for operation in operations:
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        found += [operation] if operation.outputs else with_outputs(before)
    return found
