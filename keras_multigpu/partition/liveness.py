"""How much memory a graph holds at its most: a walk that lets each tensor live until its last use.

Operations run as TensorFlow's executor runs them: each as soon as its inputs are there, first come,
first served. So what the way back needs and can be computed on the way there is held from then on,
such as `x - mean` of BatchNormalization. What kernels do in the place of their input takes nothing;
nor do views of a tensor, constants, and what comes from outside. Of a loop one iteration is walked
through, and the lists that it writes are as long as it has iterations.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.facts import LOOPS, GraphFacts, is_call, passed_on, passed_through
from keras_multigpu.partition.families import BROADCASTING, SAME_SHAPES, UNARY
from keras_multigpu.partition.sizes import AnySize, Size, product, value_of

# The same memory with another shape or name.
VIEWS = {
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"),
    *("Reshape", "Squeeze", "ExpandDims", "Bitcast", "CheckNumerics", "ReadVariableOp"),
}
# So are the results of these where they are as large as their input.
VIEWS_IF_WHOLE = {
    *("Slice", "StridedSlice", "Tile", "BroadcastTo", "Split", "SplitV", "ConcatV2"),
    *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"),
}
# What computes an entry from the entries at the same place, into an input that nobody else needs.
IN_PLACE = {*UNARY, *BROADCASTING, *SAME_SHAPES, "BiasAdd", "Softmax", "LogSoftmax"}
# Their second result, the gradient, takes the place of the logits.
LOSSES = {"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"}
# What keeps one of its inputs in a list, and which; and what gives the list back that it was given.
KEPT_BY_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
SAME_LIST = {*KEPT_BY_LISTS, "TensorListPopBack", "TensorListResize"}


class Bytes(NamedTuple):
    """An amount of memory: what does not depend on the size of a batch, and what does."""

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


class Moment(NamedTuple):
    """What is held while an operation runs; nothing before the first."""

    held: Bytes = NOTHING
    op: tf.Operation | None = None


class Buffer:
    """Memory that tensors share.

    Args:
        size: How large it is.
        is_own: Whether the graph has made it; what comes from outside is not counted here.

    Attributes:
        uses: How often it will still be read.
        is_kept: Whether something else counts it, as a list does whose element it is.
    """

    __slots__ = ("is_kept", "is_own", "size", "uses")

    def __init__(self, size: Bytes = NOTHING, is_own: bool = True, is_kept: bool = False) -> None:
        self.size, self.uses, self.is_own, self.is_kept = size, 0, is_own, is_kept


class Liveness:
    """Walks through a graph.

    Args:
        numbers: What the sizes in it are.
        batches: Which of these numbers change with the size of a batch.

    Attributes:
        unknown: The operations of whose results the size is not known.
    """

    def __init__(self, numbers: Mapping[str, int], batches: set[str]) -> None:
        self._numbers, self._batches = numbers, batches
        self.unknown: list[tf.Operation] = []

    def moments(self, facts: GraphFacts) -> tuple[Moment, Moment]:
        """When most is held: until the last operation on rows of a batch, and after it."""
        walk = Walk(self, facts)
        return walk.on_batch, walk.after

    def size_of(self, tensor: tf.Tensor, facts: GraphFacts) -> Bytes:
        """How large a tensor is; nothing, where that is not known."""
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
        """How large a tensor of these lengths is; None where one of them is not known."""
        if dims is None or None in dims:
            return None
        try:
            return value_of(product(dims), self._numbers) * dtype.size
        except KeyError:
            return None

    def works_on_batch(self, op: tf.Operation, facts: GraphFacts) -> bool:
        """Whether an operation is given rows of a batch."""
        dims = [dim for tensor in op.inputs for dim in facts.dims(tensor) or ()]
        return any(dim is not None and self.is_of_batch(dim) for dim in dims)

    def is_of_batch(self, size: AnySize) -> bool:
        return isinstance(size, Size) and bool(size.names & self._batches)

    def turns(self, condition: GraphFacts) -> int:
        """How many iterations a loop has at most; 1 where its condition does not say."""
        found = []
        for op in condition.operations:
            bound = condition.value(op.inputs[1]) if op.type == "Less" else None
            if bound is not None and bound.size == 1 and bound.item() is not None:
                with contextlib.suppress(KeyError):
                    found.append(value_of(bound.item(), self._numbers))
        return min((each for each in found if each > 0), default=1)


def as_they_run(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    """The operations of a graph, each when what it waits for is over, first come, first served."""
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
    """A walk through one graph, and the functions that it calls.

    Args:
        of: Knows sizes.
        facts: What is known of the graph.
        passed_on: Which of its inputs each iteration passes on, if it is that of a loop.

    Attributes:
        on_batch: When most is held, until the last operation on rows of a batch.
        after: When most is held after it.
        pushed: What each iteration adds to lists, by the names of their tensors.
    """

    def __init__(
        self, of: Liveness, facts: GraphFacts, passed_on: Sequence[bool] | None = None
    ) -> None:
        self._of, self._live = of, NOTHING
        self.on_batch = self.after = Moment()
        self.pushed: dict[str, Bytes] = {}
        self._pushes: list[tuple[str, Buffer, Bytes]] = []
        kept = passed_on or [False] * len(facts.graph.inputs)
        given = [Buffer(is_own=False, is_kept=is_kept) for is_kept in kept]
        results = self._walk(facts, given)
        # What an iteration is given is what the one before has made.
        for before, result in zip(given, results, strict=False):
            before.is_kept |= result.is_kept
        for name, buffer, size in self._pushes:
            if not buffer.is_kept:
                self.pushed[name], buffer.is_kept = size, True

    def _walk(self, facts: GraphFacts, given: list[Buffer]) -> list[Buffer]:
        """Walk through a graph; the buffers of its results, which each count as read once more."""
        uses = collections.Counter(tensor.name for op in facts.operations for tensor in op.inputs)
        uses.update(tensor.name for tensor in facts.graph.outputs)
        known: dict[str, Buffer] = {}

        def note(tensor: tf.Tensor, buffer: Buffer) -> None:
            known[tensor.name] = buffer
            buffer.uses += uses[tensor.name]

        for tensor, buffer in zip(facts.graph.inputs, given, strict=True):
            note(tensor, buffer)
        for op in as_they_run(facts.operations):
            inputs = [known[tensor.name] for tensor in op.inputs]
            made: list[Buffer | None] = [known.get(tensor.name) for tensor in op.outputs]
            if op.type != "Placeholder":
                made = [*self._made(op, facts, inputs)]
            for tensor, result in zip(op.outputs, made, strict=True):
                if tensor.name not in known:
                    note(tensor, result or Buffer(is_own=False))
                    self._free_if_unused(known[tensor.name])
            for buffer in inputs:
                buffer.uses -= 1
                self._free_if_unused(buffer)
        return [known[tensor.name] for tensor in facts.graph.outputs]

    def _made(self, op: tf.Operation, facts: GraphFacts, inputs: list[Buffer]) -> list[Buffer]:
        """The buffers of an operation's results, when it has run."""
        if op.type == "Const":
            return [Buffer(is_own=False) for _ in op.outputs]
        if is_call(op):
            results = self._walk(facts.inner[op.name][0], inputs)
            for buffer in results:
                buffer.uses -= 1
            return results
        if op.type in VIEWS:
            return inputs[: len(op.outputs)]
        inner = [Walk(self._of, each) for each in facts.inner.get(op.name, ())]
        sizes = [self._of.size_of(tensor, facts) for tensor in op.outputs]
        if op.type in LOOPS:
            inner, sizes = self._turned(op, facts, sizes)
        if op.type in VIEWS_IF_WHOLE and len(sizes) == 1:
            whole = [buffer for buffer in inputs if buffer.size == sizes[0] and sizes[0].total]
            if whole:
                return whole[:1]
        made = []
        for place, size in enumerate(sizes):
            same = self._reused(op, place, size, inputs)
            made.append(Buffer(size) if same is None else same)
            self._live += NOTHING if same is not None else size
        if op.type in KEPT_BY_LISTS:
            self._keep(op, inputs[KEPT_BY_LISTS[op.type]], facts)
        inside = [moment.held for walk in inner for moment in (walk.on_batch, walk.after)]
        most = max(inside, key=lambda held: held.total, default=NOTHING)
        self._note(op, most, self._of.works_on_batch(op, facts))
        return made

    def _turned(
        self, op: tf.Operation, facts: GraphFacts, sizes: list[Bytes]
    ) -> tuple[list["Walk"], list[Bytes]]:
        """An iteration of a loop, and the sizes of its results with what all have pushed."""
        condition, body = facts.inner[op.name]
        walk, turns = Walk(self._of, body, passed_through(body.graph)), self._of.turns(condition)
        found = []
        for out, size in zip(body.graph.outputs, sizes, strict=True):
            pushed = walk.pushed.get(passed_on(out).name, NOTHING)
            found.append(size + Bytes(turns * pushed.fixed, turns * pushed.of_batch))
        return [walk], found

    def _keep(self, op: tf.Operation, item: Buffer, facts: GraphFacts) -> None:
        """Let a list keep what is written to it."""
        if op.type == "TensorListPushBack":
            size = self._of.size_of(op.inputs[1], facts)
            self._pushes.append((op.outputs[0].name, item, size))
            return
        elements = facts.elements.get(op.outputs[0].name)
        # A list of one is written again and again; another was as long as that when it was made.
        item.is_kept |= elements is not None and elements.count != 1

    def _reused(
        self, op: tf.Operation, place: int, size: Bytes, inputs: list[Buffer]
    ) -> Buffer | None:
        """The input whose memory an operation's result takes, if there is one."""
        if op.type in SAME_LIST:
            return None if place else inputs[0]
        candidates = inputs if op.type in IN_PLACE and not place else []
        if op.type in LOSSES and place:
            candidates = inputs[:1]
        if op.type in LOOPS:
            # What goes round takes the place of what it was.
            candidates = inputs[place : place + 1]
        for buffer in candidates:
            is_last = sum(each is buffer for each in inputs) == buffer.uses
            if buffer.is_own and is_last and buffer.size == size:
                return buffer
        return None

    def _note(self, op: tf.Operation, inside: Bytes, on_batch: bool) -> None:
        """Note what is held while an operation runs."""
        held = self._live + inside
        if held.total > self.after.held.total:
            self.after = Moment(held, op)
        if on_batch:
            self.on_batch = max(self.on_batch, self.after, key=lambda moment: moment.held.total)
            self.after = Moment()

    def _free_if_unused(self, buffer: Buffer) -> None:
        if buffer.is_own and buffer.uses <= 0:
            self._live -= buffer.size
            buffer.size = NOTHING
