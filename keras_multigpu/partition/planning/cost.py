"""`StepCost`: what the replicas of a split step exchange, and how much arithmetic they share.

Bytes and arithmetic are sizes: numbers, or polynomials of the batch size if it is open.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.facts.axes import AXES, PRODUCTS, New, sizes_of
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import table
from keras_multigpu.partition.layouts import REPLICATED, Items, Rows, is_sharded
from keras_multigpu.partition.planning.part import Action, Conversion, Key, Part
from keras_multigpu.partition.planning.planner import (
    UNSENT,
    CannotSplit,
    require_sendable,
)
from keras_multigpu.partition.program import BRANCH, LOOP, Operation, Tensor
from keras_multigpu.partition.sizes import AnySize, Size, product, value_of

# What a GPU computes while a byte travels: 16 TFLOPS behind PCIe's 16 GB/s. Bytes are cheaper with
# NVLink, and more expensive between hosts.
FLOPS_PER_BYTE = 1000
# Fewer bytes travel in the tenth of a millisecond that an exchange takes to start.
LEAST_BYTES = 1_000_000


class Moved(NamedTuple):
    """A value that all replicas receive.

    Attributes:
        kind: "summed"; "gathered", of the rows of a batch; "weights", of variables in parts; or
            "scattered", a sum of which each replica receives only its rows.
        bytes: Its size, for all the times that it is moved in a step; None if that is not known.
        op: The operation that needs it; None for a result of the step.
    """

    kind: str
    bytes: AnySize | None
    op: Operation | None


class Work(NamedTuple):
    """A product or a convolution.

    Attributes:
        flops: Its arithmetic for the whole batch in a step; None if that is not known.
        op: The operation.
        shared: Whether each replica does only its part.
        after_gather: Whether it is not shared because its inputs were gathered.
    """

    flops: AnySize | None
    op: Operation
    shared: bool
    after_gather: bool


class StepCost:
    """What the plans of a step cost.

    Attributes:
        moved: The values that replicas exchange.
        work: The products and convolutions.
        once: The operations that only the first replica runs, for all.
        pieces_wait: Whether products and convolutions on rows come after an exchange. If replicas
            take their shares in pieces, all pieces are kept until then.
    """

    def __init__(self) -> None:
        self.pieces_wait = False
        self.moved: list[Moved] = []
        self.work: list[Work] = []
        self.once: list[Operation] = []

    def bytes(
        self, kind: str, numbers: Mapping[str, int], moved: Sequence[Moved] | None = None
    ) -> int:
        """How many bytes are summed, or gathered, for these values of named sizes."""
        found = self.moved if moved is None else moved
        return sum(number_of(each.bytes, numbers) for each in found if each.kind == kind)

    def times_unsharded(self, numbers: Mapping[str, int]) -> float:
        """How many times the bytes of the same step move if replicas did not divide variables.

        A sum moves twice: it is a scatter and a gather.
        """
        summed, scattered, gathered, weights = (
            self.bytes(kind, numbers) for kind in ("summed", "scattered", "gathered", "weights")
        )
        moved = 2 * summed + scattered + gathered + weights
        return moved / max(2 * (summed + scattered) + gathered, 1)

    def flops(self, numbers: Mapping[str, int], work: Iterable[Work] | None = None) -> int:
        """The arithmetic of all products and convolutions, or of some."""
        found = self.work if work is None else work
        return sum(number_of(each.flops, numbers) for each in found)

    def shared(self, numbers: Mapping[str, int]) -> float | None:
        """The fraction of the arithmetic that replicas share; None if there is none."""
        everything = self.flops(numbers)
        shared = self.flops(numbers, [work for work in self.work if work.shared])
        return shared / everything if everything else None

    def part_of_gathers(self, numbers: Mapping[str, int], replicas: int) -> float:
        """The fraction of a replica's step that is due to gathers.

        This includes the arithmetic that each replica then does for the whole batch. Gathers that
        take no longer than an exchange takes to start do not count.
        """
        gathered, summed, scattered = (
            self.bytes(kind, numbers) for kind in ("gathered", "summed", "scattered")
        )
        after = self.flops(numbers, [work for work in self.work if work.after_gather])
        for_gathers = FLOPS_PER_BYTE * gathered + after
        if for_gathers < FLOPS_PER_BYTE * LEAST_BYTES:
            return 0.0
        shared = self.flops(numbers, [work for work in self.work if work.shared])
        own = self.flops(numbers) - shared + shared // replicas
        return for_gathers / (FLOPS_PER_BYTE * (gathered + summed + scattered) + own)


def number_of(size: AnySize | None, numbers: Mapping[str, int]) -> int:
    """A size as a number; 0 if it is not known."""
    try:
        return 0 if size is None else value_of(size, numbers)
    except KeyError:
        return 0


def bytes_of(source: Tensor | Operation, facts: Facts) -> AnySize | None:
    """The size of a tensor, of a list, or of the variable that a handle or an assignment is for."""
    tensor = source.inputs[0] if isinstance(source, Operation) else source
    dtype, dims = tensor.dtype, facts.dims(tensor)
    if dtype == tf.resource:
        dtype = graph_internals.held_dtype(tensor.raw)
    known = facts.elements.get(tensor)
    if known is not None:
        dims = None if known.dims is None else [known.count, *known.dims]
        dtype = known.dtype or dtype
    if dims is None or None in dims:
        return None
    return product(dims) * dtype.size  # type: ignore[arg-type]


# Convolutions and their gradients: which of the inputs and outputs, without shapes, are the kernel
# and the images that the convolution makes.
CONVOLUTIONS: dict[str, tuple[int, int]] = table(
    {
        "Conv2D Conv3D DepthwiseConv2dNative": (-2, -1),
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput": (-3, -2),
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter": (-1, -2),
    }
)
# These multiply and add. Nothing else makes a step slow.
HEAVY = {*PRODUCTS, *CONVOLUTIONS}


def flops_of(op: Operation, facts: Facts) -> AnySize | None:
    """The arithmetic of a product or a convolution; None if the lengths of axes are not known."""
    if op.type in PRODUCTS:
        axes = AXES[op.type](op, facts)
        if axes is None:
            return None
        new = [each.length for each in axes.out if isinstance(each, New)]
        lengths: list[Any] = [*sizes_of(op, facts, axes).values(), *new]
        return None if None in lengths else 2 * product(lengths)
    factors: list[Any] = [
        facts.dims(tensor) for tensor in (*op.inputs, *op.outputs) if not is_shape(tensor)
    ]
    if any(dims is None or None in dims for dims in factors):
        return None
    kernel, made = (factors[place] for place in CONVOLUTIONS[op.type])
    each = kernel[:-2] if op.type.startswith("Depthwise") else kernel[:-1]
    return 2 * product(made) * product(each)


def is_shape(tensor: Tensor) -> bool:
    return tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank in (0, 1)


class CostFinder:
    """Adds up what a part costs, and refuses what replicas would have to exchange but cannot.

    Args:
        replicas: How many there are.
    """

    def __init__(self, replicas: int) -> None:
        self.cost, self._replicas = StepCost(), replicas

    def add(
        self,
        part: Part,
        times: AnySize = 1,
        after_gather: Collection[Key] = (),
        after_exchange: Collection[Key] = (),
    ) -> None:
        """Add the cost of a part.

        Args:
            times: How often it runs.
            after_gather: The values that it takes whole because they, or others before, were
                gathered.
            after_exchange: Those that it takes after an exchange.
        """
        gathered, exchanged = set(after_gather), set(after_exchange)
        for action in part.actions:
            waits = not exchanged.isdisjoint(action.takes)
            if action.op is not None:
                follows_gather = not gathered.isdisjoint(action.takes)
                is_whole = self._note(action.op, part, times, waits, follows_gather)
                if is_whole and follows_gather:
                    gathered.update(action.makes)
                waits |= self._exchanges(action.op, part, times)
                if action.op.inner:
                    self._enter(action, part, times, gathered, waits)
            elif action.conversion is not None and action.conversion.kind is not None:
                self._convert(action.conversion, part.facts, times)
                waits = True
                if isinstance(action.conversion.have, Rows):
                    gathered.update(action.makes)
            if waits:
                exchanged.update(action.makes)

    def _convert(self, conversion: Conversion, facts: Facts, times: AnySize) -> None:
        """Note what replicas exchange to have a value in another layout."""
        tensor, have, _, op, kind = conversion
        if tensor.variable is None and not isinstance(have, Items):
            dims = facts.dims(tensor)
            require_sendable(have, tensor.dtype, None if dims is None else len(dims), op)
        self._moved(str(kind), bytes_of(tensor, facts), op, times)

    def _moved(self, kind: str, size: AnySize | None, op: Operation | None, times: AnySize) -> None:
        if self._replicas > 1:
            self.cost.moved.append(Moved(kind, None if size is None else size * times, op))

    def _note(
        self, op: Operation, part: Part, times: AnySize, waits: bool, follows_gather: bool
    ) -> bool:
        """Note the arithmetic of an operation; returns whether each replica does all of it."""
        plan = part.planned.plans[op]
        is_whole = not plan.exchanges and {*plan.need, *plan.out} <= {REPLICATED}
        if op.type in HEAVY:
            flops = flops_of(op, part.facts)
            flops = None if flops is None else flops * times
            self.cost.work.append(Work(flops, op, not is_whole, is_whole and follows_gather))
            is_of_rows = any(need != REPLICATED and not is_sharded(need) for need in plan.need)
            self.cost.pieces_wait |= waits and is_of_rows
        return is_whole

    def _exchanges(self, op: Operation, part: Part, times: AnySize) -> bool:
        """Note what replicas exchange of the results of an operation; returns whether they do."""
        planned, facts = part.planned, part.facts
        if op.inner or (op.inputs and op.inputs[0].variable is not None):
            return False
        if op in planned.moments:
            # A mean and a mean of squares, as float64.
            dims = facts.dims(op.outputs[0])
            size = None if dims is None or None in dims else 16 * product(dims)  # type: ignore[arg-type]
            self._moved("summed", size, op, times)
        elif op in planned.once:
            self.cost.once.append(op)
            for tensor in op.outputs:
                if tensor.dtype in UNSENT and self._replicas > 1:
                    reason = "its result cannot be sent to the other replicas"
                    raise CannotSplit(reason, op, tensor.dtype)
                self._moved("summed", bytes_of(tensor, facts), op, times)
        elif planned.plans[op].exchanges:
            size = bytes_of(op.outputs[0], facts)
            self._moved("summed", None if size is None else size * self._replicas, op, times)
        else:
            return False
        return True

    def _enter(
        self, action: Action, part: Part, times: AnySize, gathered: set[Key], waits: bool
    ) -> None:
        """Add the cost of the programs that an operation runs."""
        op = action.op
        assert op is not None
        takes = action.takes[int(op.type == BRANCH) :]
        if op.type == LOOP:
            times = times * iterations_of(op, part.facts)
        for inner in part.inner(op):
            inputs = inner.planned.program.inputs
            whole = [own for each, own in zip(takes, inputs, strict=False) if each in gathered]
            self.add(inner, times, whole, [*inputs, *inner.numbers] if waits else ())


def iterations_of(op: Operation, facts: Facts) -> AnySize:
    """How many iterations a loop has; a size of that name if it is not known."""
    # The first inputs of TensorFlow's loops are a counter and its bound.
    bound = facts.value(op.inputs[1]) if len(op.inputs) > 1 else None
    count: Any = None if bound is None or bound.ndim else bound[()]
    is_known = count is not None and (not isinstance(count, int) or count > 0)
    return count if is_known else Size.of("iterations")
