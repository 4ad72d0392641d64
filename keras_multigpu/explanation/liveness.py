"""The peak memory of a graph: a walk through it frees each tensor after its last use.

Operations run in the order of TensorFlow's executor: each as soon as its inputs are there, first
come, first served. So a tensor that only the backward pass needs, such as `x - mean` of
BatchNormalization, is computed in the forward pass and held from then on. Results that take the
place of an input need no memory, nor do views, constants and the inputs of the graph. The walk goes
through one iteration of a loop, and the lists that it writes get one element for each iteration.
"""

import collections
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.facts import LOOPS, GraphFacts, is_call, passed_on, passed_through
from keras_multigpu.partition.families import ELEMENTWISE, LIST_WRITES
from keras_multigpu.partition.sizes import AnySize, Size, product, value_of

# Their results are the memory of an input, with another shape or name.
VIEWS = {
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"),
    *("Reshape", "Squeeze", "ExpandDims", "Bitcast", "CheckNumerics", "ReadVariableOp"),
}
# So are the results of these if they are as large as the input.
VIEWS_IF_WHOLE = {
    *("Slice", "StridedSlice", "Tile", "BroadcastTo", "Split", "SplitV", "ConcatV2"),
    *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"),
}
# These write each entry of the result in the place of the same entry of an input.
IN_PLACE = {*ELEMENTWISE, "BiasAdd", "Softmax", "LogSoftmax"}
# The second result, the gradient, takes the place of the logits.
LOSSES = {"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"}
# These return the list that they are given.
SAME_LIST = {*LIST_WRITES, "TensorListPopBack", "TensorListResize"}


class Bytes(NamedTuple):
    """Bytes that do not depend on the batch size, and bytes that do."""

    fixed: int = 0
    of_batch: int = 0

    def __add__(self, other: Any) -> "Bytes":
        return Bytes(self.fixed + other.fixed, self.of_batch + other.of_batch)

    def __sub__(self, other: Any) -> "Bytes":
        return Bytes(self.fixed - other.fixed, self.of_batch - other.of_batch)

    @property
    def total(self) -> int:
        return self.fixed + self.of_batch


NOTHING = Bytes()


def largest(amounts: Sequence[Bytes]) -> Bytes:
    return max(amounts, key=lambda held: held.total, default=NOTHING)


class Buffer:
    """Memory that tensors share.

    Args:
        size: Its size.
        is_own: Whether the graph has allocated it. Only then it counts.
        is_kept: Whether a list holds it, which counts it.

    Attributes:
        uses: How many times it will still be read.
    """

    __slots__ = ("is_kept", "is_own", "size", "uses")

    def __init__(self, size: Bytes = NOTHING, is_own: bool = True, is_kept: bool = False) -> None:
        self.size, self.uses, self.is_own, self.is_kept = size, 0, is_own, is_kept


class Liveness:
    """Finds the peaks of graphs.

    Args:
        numbers: The values of named sizes.
        batches: The names of those that change with the batch size.

    Attributes:
        unknown: The operations with results of unknown size, which do not count.
    """

    def __init__(self, numbers: Mapping[str, int], batches: set[str]) -> None:
        self._numbers, self._batches = numbers, batches
        self.unknown: list[tf.Operation] = []

    def peaks(self, facts: GraphFacts, replacing: Collection[str] = ()) -> tuple[Bytes, Bytes]:
        """The peak up to the last operation on rows of a batch, and the peak after it.

        Args:
            replacing: The names of results that take the place of something outside, which is
                freed then.
        """
        walk = Walk(self, facts, replacing=replacing)
        return walk.on_batch, walk.after

    def size_of(self, tensor: tf.Tensor, facts: GraphFacts) -> Bytes:
        """The size of a tensor; nothing if it is not known."""
        dims: Any = facts.dims(tensor)
        dtype = tensor.dtype
        if dtype == tf.variant:
            elements = facts.elements.get(tensor.name)
            if elements is None or elements.dims is None or elements.count is None:
                return NOTHING
            dims, dtype = [elements.count, *elements.dims], elements.dtype or tf.float32
        if dtype in (tf.resource, tf.string):
            return NOTHING
        found = self.bytes_of(dims, dtype)
        if found is None:
            self.unknown.append(tensor.op)
            return NOTHING
        return Bytes(0, found) if self.is_of_batch(product(dims)) else Bytes(found)

    def bytes_of(self, dims: Any, dtype: tf.DType) -> int | None:
        """The size of a tensor with axes of these lengths; None if one of them is not known."""
        if dims is None or None in dims:
            return None
        try:
            return value_of(product(dims), self._numbers) * dtype.size
        except KeyError:
            return None

    def works_on_batch(self, op: tf.Operation, facts: GraphFacts) -> bool:
        """Whether an operation has rows of a batch as an input."""
        dims = [dim for tensor in op.inputs for dim in facts.dims(tensor) or ()]
        return any(dim is not None and self.is_of_batch(dim) for dim in dims)

    def is_of_batch(self, size: AnySize) -> bool:
        return isinstance(size, Size) and bool(size.names & self._batches)

    def iterations(self, condition: GraphFacts) -> int:
        """How many iterations a loop has at most; 1 if its condition does not tell."""
        found = []
        for op in condition.operations:
            bound = condition.value(op.inputs[1]) if op.type == "Less" else None
            if bound is not None and bound.size == 1 and bound.item() is not None:
                with contextlib.suppress(KeyError):
                    found.append(value_of(bound.item(), self._numbers))
        return min((each for each in found if each > 0), default=1)


def in_order_of_execution(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    """The operations of a graph, each as soon as its inputs are there, first come, first served."""
    names = {op.name for op in operations}
    users: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    missing: dict[str, int] = {}
    for op in operations:
        before = {t.op.name for t in op.inputs} | {each.name for each in op.control_inputs}
        missing[op.name] = len(before & names)
        for name in before & names:
            users[name].append(op)
    ready = collections.deque(op for op in operations if not missing[op.name])
    while ready:
        op = ready.popleft()
        yield op
        for user in users[op.name]:
            missing[user.name] -= 1
            if not missing[user.name]:
                ready.append(user)


class Walk:
    """A walk through one graph and the functions that it calls.

    Args:
        liveness: Knows the sizes of tensors.
        facts: The facts of the graph.
        fixed: For the body of a loop, which of its inputs it passes on unchanged.
        replacing: As in `Liveness.peaks`.

    Attributes:
        on_batch: The peak up to the last operation on rows of a batch.
        after: The peak after it.
        pushed: The bytes that each iteration adds to lists, by the names of their tensors.
    """

    def __init__(
        self,
        liveness: Liveness,
        facts: GraphFacts,
        fixed: Sequence[bool] | None = None,
        replacing: Collection[str] = (),
    ) -> None:
        self._liveness, self._live = liveness, NOTHING
        self.on_batch = self.after = NOTHING
        self.pushed: dict[str, Bytes] = {}
        self._pushes: list[tuple[str, Buffer, Bytes]] = []
        kept = fixed or [False] * len(facts.graph.inputs)
        given = [Buffer(is_own=False, is_kept=is_kept) for is_kept in kept]
        results = self._walk(facts, given, replacing)
        # The results of an iteration are the inputs of the next.
        for before, result in zip(given, results, strict=False):
            before.is_kept |= result.is_kept
        for name, buffer, size in self._pushes:
            if not buffer.is_kept:
                self.pushed[name], buffer.is_kept = size, True

    def _walk(
        self, facts: GraphFacts, given: list[Buffer], replacing: Collection[str] = ()
    ) -> list[Buffer]:
        """Walk through a graph; returns the buffers of its results, with one more use for each."""
        uses = collections.Counter(tensor.name for op in facts.operations for tensor in op.inputs)
        uses.update(t.name for t in facts.graph.outputs if t.name not in replacing)
        known: dict[str, Buffer] = {}

        def note(tensor: tf.Tensor, buffer: Buffer) -> None:
            known[tensor.name] = buffer
            buffer.uses += uses[tensor.name]

        for tensor, buffer in zip(facts.graph.inputs, given, strict=True):
            note(tensor, buffer)
        for op in in_order_of_execution(facts.operations):
            inputs = [known[tensor.name] for tensor in op.inputs]
            made: list[Buffer | None] = [known.get(tensor.name) for tensor in op.outputs]
            if op.type != "Placeholder":
                made = [*self._run(op, facts, inputs)]
            for tensor, result in zip(op.outputs, made, strict=True):
                if tensor.name not in known:
                    note(tensor, result or Buffer(is_own=False))
                    self._free_if_unused(known[tensor.name])
            for buffer in inputs:
                buffer.uses -= 1
                self._free_if_unused(buffer)
        return [known[tensor.name] for tensor in facts.graph.outputs]

    def _run(self, op: tf.Operation, facts: GraphFacts, inputs: list[Buffer]) -> list[Buffer]:
        """Run an operation; returns the buffers of its results."""
        if op.type == "Const":
            return [Buffer(is_own=False) for _ in op.outputs]
        if is_call(op):
            results = self._walk(facts.inner[op.name][0], inputs)
            for buffer in results:
                buffer.uses -= 1
            return results
        if op.type in VIEWS:
            return inputs[: len(op.outputs)]
        inner = [Walk(self._liveness, each) for each in facts.inner.get(op.name, ())]
        sizes = [self._liveness.size_of(tensor, facts) for tensor in op.outputs]
        if op.type in LOOPS:
            inner, sizes = self._run_loop(op, facts, sizes)
        if op.type in VIEWS_IF_WHOLE and len(sizes) == 1:
            whole = [buffer for buffer in inputs if buffer.size == sizes[0] and sizes[0].total]
            if whole:
                return whole[:1]
        made = []
        for place, size in enumerate(sizes):
            same = self._reused(op, place, size, inputs)
            made.append(Buffer(size) if same is None else same)
            self._live += NOTHING if same is not None else size
        if op.type in LIST_WRITES:
            self._keep(op, inputs[LIST_WRITES[op.type]], facts)
        inside = [peak for walk in inner for peak in (walk.on_batch, walk.after)]
        self.after = largest([self.after, self._live + largest(inside)])
        if self._liveness.works_on_batch(op, facts):
            self.on_batch, self.after = largest([self.on_batch, self.after]), NOTHING
        return made

    def _run_loop(
        self, op: tf.Operation, facts: GraphFacts, sizes: list[Bytes]
    ) -> tuple[list["Walk"], list[Bytes]]:
        """A walk through an iteration, and the sizes of the loop's results after all of them."""
        condition, body = facts.inner[op.name]
        walk = Walk(self._liveness, body, passed_through(body.graph))
        count = self._liveness.iterations(condition)
        found = []
        for out, size in zip(body.graph.outputs, sizes, strict=True):
            pushed = walk.pushed.get(passed_on(out).name, NOTHING)
            found.append(size + Bytes(count * pushed.fixed, count * pushed.of_batch))
        return [walk], found

    def _keep(self, op: tf.Operation, item: Buffer, facts: GraphFacts) -> None:
        """Let a list hold an element that is written to it."""
        if op.type == "TensorListPushBack":
            size = self._liveness.size_of(op.inputs[1], facts)
            self._pushes.append((op.outputs[0].name, item, size))
            return
        elements = facts.elements.get(op.outputs[0].name)
        # The only element of a list may be overwritten. A longer list already counts all of them.
        item.is_kept |= elements is not None and elements.count != 1

    def _reused(
        self, op: tf.Operation, place: int, size: Bytes, inputs: list[Buffer]
    ) -> Buffer | None:
        """The input whose memory a result takes, if there is one."""
        if op.type in SAME_LIST:
            return None if place else inputs[0]
        candidates = inputs if op.type in IN_PLACE and not place else []
        if op.type in LOSSES and place:
            candidates = inputs[:1]
        if op.type in LOOPS:
            # The result of an iteration takes the place of its input.
            candidates = inputs[place : place + 1]
        for buffer in candidates:
            is_last = sum(each is buffer for each in inputs) == buffer.uses
            if buffer.is_own and is_last and buffer.size == size:
                return buffer
        return None

    def _free_if_unused(self, buffer: Buffer) -> None:
        if buffer.is_own and buffer.uses <= 0:
            self._live -= buffer.size
            buffer.size = NOTHING
