"""The peak memory of a replica: a walk through its part frees each value after its last use.

Operations run in the order of TensorFlow's executor: each as soon as its inputs are there, first
come, first served. So a tensor that only the backward pass needs, such as `x - mean` of
BatchNormalization, is computed in the forward pass and held from then on. Results that take the
place of an input need no memory, nor do views, constants and the inputs of the step. The walk goes
through one iteration of a loop, and the lists that it writes get one element for each iteration.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.facts.families import ELEMENTWISE, LIST_WRITES
from keras_multigpu.partition.planning.part import Action, Key, Part, Shape
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.program import LOOP, Operation, has_effect, passed_on
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
    """Finds the peaks of parts.

    Args:
        numbers: The values of named sizes.
        batches: The names of those that change with the batch size.

    Attributes:
        unknown: The values of unknown size, which do not count.
    """

    def __init__(self, numbers: Mapping[str, int], batches: set[str]) -> None:
        self._numbers, self._batches = numbers, batches
        self.unknown: set[Key] = set()

    def peaks(self, part: Part, replaces: bool = False) -> tuple[Bytes, Bytes]:
        """The peak up to the last action on rows of a batch, and the peak after it.

        Args:
            replaces: Whether new values of variables take the place of those before.
        """
        walk = Walk(self, part, replaces=replaces)
        return walk.on_batch, walk.after

    def size_of(self, key: Key, shape: Shape) -> Bytes:
        """The size of a value; nothing if it is not known."""
        if shape.dtype in (tf.resource, tf.string, tf.variant):
            return NOTHING
        found = self.bytes_of(*shape)
        if found is None or shape.dims is None:
            self.unknown.add(key)
            return NOTHING
        return Bytes(0, found) if self.works_on_batch([shape]) else Bytes(found)

    def bytes_of(self, dims: Any, dtype: tf.DType) -> int | None:
        """The size of a tensor with axes of these lengths; None if one of them is not known."""
        if dims is None or None in dims:
            return None
        try:
            return value_of(product(dims), self._numbers) * dtype.size
        except KeyError:
            return None

    def works_on_batch(self, shapes: Sequence[Shape]) -> bool:
        """Whether one of these values has rows of a batch."""
        return any(self._is_of_batch(dim) for shape in shapes for dim in shape.dims or ())

    def _is_of_batch(self, size: AnySize | None) -> bool:
        return isinstance(size, Size) and bool(size.names & self._batches)

    def iterations(self, condition: Planned) -> int:
        """How many iterations a loop has at most; 1 if its condition does not tell."""
        found = []
        for op in condition.program.operations:
            bound = condition.facts.value(op.inputs[1]) if op.type == "Less" else None
            if bound is not None and bound.size == 1 and bound.item() is not None:
                with contextlib.suppress(KeyError):
                    found.append(value_of(bound.item(), self._numbers))
        return min((each for each in found if each > 0), default=1)


def needed_actions(part: Part) -> list[Action]:
    """The actions of a part that its results, or effects, need."""
    needed, kept = {*part.results, *part.new}, []
    for action in reversed(part.actions):
        if not needed.isdisjoint(action.makes) or (action.op and has_effect(action.op)):
            needed.update(action.takes)
            kept.append(action)
    return kept[::-1]


def in_order_of_execution(actions: Sequence[Action]) -> Iterator[Action]:
    """The actions of a part, each as soon as its inputs are there, first come, first served."""
    makers = {key: number for number, each in enumerate(actions) for key in each.makes}
    users: dict[int, list[int]] = collections.defaultdict(list)
    missing: dict[int, int] = {}
    for number, action in enumerate(actions):
        before = {makers[key] for key in action.takes if key in makers}
        if action.after in makers:
            before.add(makers[action.after])
        missing[number] = len(before)
        for each in before:
            users[each].append(number)
    ready = collections.deque(number for number, count in missing.items() if not count)
    while ready:
        number = ready.popleft()
        yield actions[number]
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)


class Walk:
    """A walk through one part.

    Args:
        liveness: Knows the sizes of values.
        part: The part.
        fixed: For the body of a loop, which of its inputs it passes on unchanged.
        replaces: As in `Liveness.peaks`.

    Attributes:
        on_batch: The peak up to the last action on rows of a batch.
        after: The peak after it.
        pushed: The bytes that each iteration adds to lists, by their tensors.
    """

    def __init__(
        self,
        liveness: Liveness,
        part: Part,
        fixed: Sequence[bool] | None = None,
        replaces: bool = False,
    ) -> None:
        self._liveness, self._part, self._live = liveness, part, NOTHING
        self.on_batch = self.after = NOTHING
        self.pushed: dict[Key, Bytes] = {}
        self._pushes: list[tuple[Key, Buffer, Bytes]] = []
        inputs = part.planned.program.inputs
        kept = fixed or [False] * len(inputs)
        given = [Buffer(is_own=False, is_kept=is_kept) for is_kept in kept]
        results = self._walk(dict(zip(inputs, given, strict=True)), replaces)
        # The results of an iteration are the inputs of the next.
        for before, result in zip(given, results, strict=False):
            before.is_kept |= result.is_kept
        for key, buffer, size in self._pushes:
            if not buffer.is_kept:
                self.pushed[key], buffer.is_kept = size, True

    def _walk(self, given: Mapping[Key, Buffer], replaces: bool) -> list[Buffer]:
        """Walk through the part; returns the buffers of its results, one more use for each."""
        part, actions = self._part, needed_actions(self._part)
        uses = collections.Counter(key for action in actions for key in action.takes)
        uses.update([*part.results, *([] if replaces else part.new)])
        # Constants and variables are there before, once for all iterations.
        known: dict[Key, Buffer] = collections.defaultdict(
            functools.partial(Buffer, NOTHING, False, True)
        )
        known |= given
        for action in in_order_of_execution(actions):
            inputs = [known[key] for key in action.takes]
            for key, result in zip(action.makes, self._run(action, inputs), strict=True):
                known[key] = result
                result.uses += uses[key]
                self._free_if_unused(result)
            for buffer in inputs:
                buffer.uses -= 1
                self._free_if_unused(buffer)
        return [known[key] for key in part.results]

    def _run(self, action: Action, inputs: list[Buffer]) -> list[Buffer]:
        """Run an operation, or a conversion; returns the buffers of its results."""
        op, part = action.op, self._part
        kind = "" if op is None else op.type
        if action.is_view or kind in VIEWS:
            return inputs[: len(action.makes)]
        sizes = [self._liveness.size_of(key, part.shape(key)) for key in action.makes]
        inner: list[Walk] = []
        fixed: list[bool] = []
        if op is not None and kind == LOOP:
            fixed = self._part.planned.inner[op][1].program.passed_through
            inner, sizes = self._run_loop(op, sizes, fixed)
        elif op is not None:
            inner = [Walk(self._liveness, each) for each in self._part.inner(op)]
        if kind in VIEWS_IF_WHOLE and len(sizes) == 1:
            whole = [buffer for buffer in inputs if buffer.size == sizes[0] and sizes[0].total]
            if whole:
                return whole[:1]
        made = []
        for place, size in enumerate(sizes):
            is_fixed = place < len(fixed) and fixed[place]
            same = inputs[place] if is_fixed else self._reused(kind, place, size, inputs)
            made.append(Buffer(size) if same is None else same)
            self._live += NOTHING if same is not None else size
        if op is not None and kind in LIST_WRITES:
            self._keep(op, action.takes, inputs)
        inside = [peak for walk in inner for peak in (walk.on_batch, walk.after)]
        self.after = largest([self.after, self._live + largest(inside)])
        taken = [part.shape(key) for key in action.takes if key in part.laid]
        if self._liveness.works_on_batch(taken):
            self.on_batch, self.after = largest([self.on_batch, self.after]), NOTHING
        return made

    def _run_loop(
        self, op: Operation, sizes: list[Bytes], fixed: Sequence[bool]
    ) -> tuple[list["Walk"], list[Bytes]]:
        """A walk through an iteration, and the sizes of the loop's results after all of them."""
        condition, body = self._part.planned.inner[op]
        walk = Walk(self._liveness, self._part.inner(op)[1], fixed)
        count, found = self._liveness.iterations(condition), list(sizes)
        for place, out in enumerate(body.program.outputs):
            pushed = walk.pushed.get(passed_on(out), NOTHING)
            found[place] += Bytes(count * pushed.fixed, count * pushed.of_batch)
        return [walk], found

    def _keep(self, op: Operation, takes: Sequence[Key], inputs: list[Buffer]) -> None:
        """Let a list hold an element that is written to it."""
        item = LIST_WRITES[op.type]
        if op.type == "TensorListPushBack":
            key, part = takes[item], self._part
            size = NOTHING
            if key in part.laid:
                size = self._liveness.size_of(key, part.shape(key))
            self._pushes.append((op.outputs[0], inputs[item], size))
            return
        elements = self._part.planned.facts.elements.get(op.outputs[0])
        # The only element of a list may be overwritten. A longer list already counts all of them.
        inputs[item].is_kept |= elements is not None and elements.count != 1

    def _reused(self, kind: str, place: int, size: Bytes, inputs: list[Buffer]) -> Buffer | None:
        """The input whose memory a result takes, if there is one."""
        if kind in SAME_LIST:
            return None if place else inputs[0]
        candidates = inputs if kind in IN_PLACE and not place else []
        if kind in LOSSES and place:
            candidates = inputs[:1]
        if kind == LOOP:
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
