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

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import ELEMENTWISE, LIST_WRITES
from keras_multigpu.partition.program import LOOP, Operation, Program, Tensor, passed_on
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
        self.unknown: list[Operation] = []

    def peaks(self, facts: Facts, replacing: Collection[Tensor] = ()) -> tuple[Bytes, Bytes]:
        """The peak up to the last operation on rows of a batch, and the peak after it.

        Args:
            replacing: The results that take the place of something outside, which is freed then.
        """
        walk = Walk(self, facts, facts.program, replacing=replacing)
        return walk.on_batch, walk.after

    def size_of(self, tensor: Tensor, facts: Facts) -> Bytes:
        """The size of a tensor; nothing if it is not known."""
        dims: Any = facts.dims(tensor)
        dtype = tensor.dtype
        if dtype == tf.variant:
            elements = facts.elements.get(tensor)
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

    def works_on_batch(self, op: Operation, facts: Facts) -> bool:
        """Whether an operation has rows of a batch as an input."""
        dims = [dim for tensor in op.inputs for dim in facts.dims(tensor) or ()]
        return any(dim is not None and self.is_of_batch(dim) for dim in dims)

    def is_of_batch(self, size: AnySize) -> bool:
        return isinstance(size, Size) and bool(size.names & self._batches)

    def iterations(self, condition: Program, facts: Facts) -> int:
        """How many iterations a loop has at most; 1 if its condition does not tell."""
        found = []
        for op in condition.operations:
            bound = facts.value(op.inputs[1]) if op.type == "Less" else None
            if bound is not None and bound.size == 1 and bound.item() is not None:
                with contextlib.suppress(KeyError):
                    found.append(value_of(bound.item(), self._numbers))
        return min((each for each in found if each > 0), default=1)


def in_order_of_execution(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations of a graph, each as soon as its inputs are there, first come, first served."""
    known = set(operations)
    users: dict[Operation, list[Operation]] = collections.defaultdict(list)
    missing: dict[Operation, int] = {}
    for op in operations:
        before = {tensor.op for tensor in op.inputs}.union(op.after) & known
        missing[op] = len(before)
        for each in before:
            users[each].append(op)
    ready = collections.deque(op for op in operations if not missing[op])
    while ready:
        op = ready.popleft()
        yield op
        for user in users[op]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)


class Walk:
    """A walk through one program.

    Args:
        liveness: Knows the sizes of tensors.
        facts: What is known of its tensors.
        program: The program.
        fixed: For the body of a loop, which of its inputs it passes on unchanged.
        replacing: As in `Liveness.peaks`.

    Attributes:
        on_batch: The peak up to the last operation on rows of a batch.
        after: The peak after it.
        pushed: The bytes that each iteration adds to lists, by their tensors.
    """

    def __init__(
        self,
        liveness: Liveness,
        facts: Facts,
        program: Program,
        fixed: Sequence[bool] | None = None,
        replacing: Collection[Tensor] = (),
    ) -> None:
        self._liveness, self._facts, self._live = liveness, facts, NOTHING
        self.on_batch = self.after = NOTHING
        self.pushed: dict[Tensor, Bytes] = {}
        self._pushes: list[tuple[Tensor, Buffer, Bytes]] = []
        kept = fixed or [False] * len(program.inputs)
        given = [Buffer(is_own=False, is_kept=is_kept) for is_kept in kept]
        results = self._walk(program, given, replacing)
        # The results of an iteration are the inputs of the next.
        for before, result in zip(given, results, strict=False):
            before.is_kept |= result.is_kept
        for tensor, buffer, size in self._pushes:
            if not buffer.is_kept:
                self.pushed[tensor], buffer.is_kept = size, True

    def _walk(
        self, program: Program, given: list[Buffer], replacing: Collection[Tensor] = ()
    ) -> list[Buffer]:
        """Walk through a program; returns the buffers of its results, one more use for each."""
        uses = collections.Counter(tensor for op in program.operations for tensor in op.inputs)
        uses.update(tensor for tensor in program.outputs if tensor not in replacing)
        known: dict[Tensor, Buffer] = {}

        def note(tensor: Tensor, buffer: Buffer) -> None:
            known[tensor] = buffer
            buffer.uses += uses[tensor]

        for tensor, buffer in zip(program.inputs, given, strict=True):
            note(tensor, buffer)
        for op in in_order_of_execution(program.operations):
            inputs = [known[tensor] for tensor in op.inputs]
            for tensor, result in zip(op.outputs, self._run(op, inputs), strict=True):
                note(tensor, result)
                self._free_if_unused(result)
            for buffer in inputs:
                buffer.uses -= 1
                self._free_if_unused(buffer)
        return [known[tensor] for tensor in program.outputs]

    def _run(self, op: Operation, inputs: list[Buffer]) -> list[Buffer]:
        """Run an operation; returns the buffers of its results."""
        if op.type == "Const":
            return [Buffer(is_own=False) for _ in op.outputs]
        if op.type in VIEWS:
            return inputs[: len(op.outputs)]
        sizes = [self._liveness.size_of(tensor, self._facts) for tensor in op.outputs]
        if op.type == LOOP:
            inner, sizes = self._run_loop(op, sizes)
        else:
            inner = [Walk(self._liveness, self._facts, each) for each in op.inner]
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
            self._keep(op, inputs[LIST_WRITES[op.type]])
        inside = [peak for walk in inner for peak in (walk.on_batch, walk.after)]
        self.after = largest([self.after, self._live + largest(inside)])
        if self._liveness.works_on_batch(op, self._facts):
            self.on_batch, self.after = largest([self.on_batch, self.after]), NOTHING
        return made

    def _run_loop(self, op: Operation, sizes: list[Bytes]) -> tuple[list["Walk"], list[Bytes]]:
        """A walk through an iteration, and the sizes of the loop's results after all of them."""
        condition, body = op.inner
        walk = Walk(self._liveness, self._facts, body, body.passed_through)
        count = self._liveness.iterations(condition, self._facts)
        found = []
        for out, size in zip(body.outputs, sizes, strict=True):
            pushed = walk.pushed.get(passed_on(out), NOTHING)
            found.append(size + Bytes(count * pushed.fixed, count * pushed.of_batch))
        return [walk], found

    def _keep(self, op: Operation, item: Buffer) -> None:
        """Let a list hold an element that is written to it."""
        if op.type == "TensorListPushBack":
            size = self._liveness.size_of(op.inputs[1], self._facts)
            self._pushes.append((op.outputs[0], item, size))
            return
        elements = self._facts.elements.get(op.outputs[0])
        # The only element of a list may be overwritten. A longer list already counts all of them.
        item.is_kept |= elements is not None and elements.count != 1

    def _reused(
        self, op: Operation, place: int, size: Bytes, inputs: list[Buffer]
    ) -> Buffer | None:
        """The input whose memory a result takes, if there is one."""
        if op.type in SAME_LIST:
            return None if place else inputs[0]
        candidates = inputs if op.type in IN_PLACE and not place else []
        if op.type in LOSSES and place:
            candidates = inputs[:1]
        if op.type == LOOP:
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
