"""`StepCost`: what the replicas of a split step exchange, and how much arithmetic they share.

Bytes and arithmetic are sizes: numbers, or polynomials of the batch size if it is open.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.facts.axes import AXES, PRODUCTS, New, sizes_of
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import table
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout, Rows, is_sharded
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.planning.planner import (
    UNSENT,
    CannotSplit,
    are_exchanged,
    require_sendable,
)
from keras_multigpu.partition.program import BRANCH, LOOP, Operation, Tensor, runs_once
from keras_multigpu.partition.rules.plan import Plan
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
    """Adds up what plans cost, and refuses what replicas would have to exchange but cannot.

    Args:
        replicas: How many there are.
        changes_tables: As in `Planner`.
    """

    def __init__(self, replicas: int, changes_tables: bool) -> None:
        self.cost = StepCost()
        self._replicas, self._changes_tables = replicas, changes_tables
        self._exchanged: set[Any] = set()
        self._read: dict[Tensor, Any] = {}
        """What made the value that an operation has read from a variable."""
        self._after_gather: set[Tensor] = set()
        self._after_exchange: set[Any] = set()

    def add_step(
        self, planned: Planned, results: Sequence[Layout], variables: Mapping[int, Layout]
    ) -> None:
        """Add the cost of a step.

        Args:
            results: The layouts in which it leaves its results.
            variables: And its variables, by number.
        """
        sources: dict[int, Any] = {}
        self._add(planned, 1, sources)
        for tensor, need in zip(planned.program.outputs, results, strict=True):
            self._convert(planned, None, tensor, planned.layouts[tensor], need, 1)
        for number, source in sources.items():
            self._convert(planned, None, source, planned.state[number], variables[number], 1)

    def _add(self, planned: Planned, times: AnySize, sources: dict[int, Any]) -> None:
        """Add the cost of a program that runs this many times.

        Args:
            sources: Gets, for the number of each variable that it assigns, what made the last
                value: a tensor, or an operation.
        """
        state = dict(planned.given)
        for op in planned.program.operations:
            plan = planned.plans[op]
            used = {*op.inputs, *(self._read[each] for each in op.inputs if each in self._read)}
            are_moved = [
                self._convert(planned, op, tensor, planned.layouts[tensor], need, times)
                for tensor, need in zip(op.inputs, plan.need, strict=True)
            ]
            for number, need in plan.variables.items():
                handle = next(each for each in op.inputs if each.variable == number)
                source = sources.get(number, handle)
                used.add(source)
                are_moved.append(self._convert(planned, op, source, state[number], need, times))
            if op.type == "ReadVariableOp" and op.inputs[0].variable is not None:
                self._read[op.outputs[0]] = sources.get(op.inputs[0].variable, op.inputs[0])
            state |= plan.assigned
            if any(are_moved) or not used.isdisjoint(self._after_exchange):
                self._note_wait(op, plan)
            self._note(op, plan, planned, times)
            is_assignment = op.type == "AssignVariableOp"
            for number in op.writes:
                sources[number] = op.inputs[1] if is_assignment else op

    def _convert(
        self,
        planned: Planned,
        op: Operation | None,
        source: Any,
        have: Layout,
        need: Layout,
        times: AnySize,
    ) -> bool:
        """Note what replicas exchange to have a value in another layout, once for each value.

        Returns whether they exchange anything.
        """
        if not are_exchanged([have], [need]) or source in planned.free:
            return False
        element = have.element if isinstance(have, Items) else have
        bucket = planned.buckets.get(op) if op and is_sharded(element) else None
        key = self._read.get(source, source), bucket
        if key in self._exchanged:
            return True
        self._exchanged.add(key)
        size = bytes_of(source, planned.facts)
        if isinstance(source, Tensor) and source.variable is None and not isinstance(have, Items):
            dims = planned.facts.dims(source)
            require_sendable(have, source.dtype, None if dims is None else len(dims), op)
        kind = "summed" if element == PARTIAL else "gathered"
        if is_sharded(element):
            kind = "weights"
        elif source in planned.scattered:
            kind = "scattered"
        self._moved(kind, size, op, times)
        return True

    def _note_wait(self, op: Operation, plan: Plan) -> None:
        """Note that an operation comes after an exchange."""
        inside = [tensor for inner in op.inner for tensor in inner.inputs]
        self._after_exchange.update([op, *op.outputs, *inside])
        is_of_rows = any(need != REPLICATED and not is_sharded(need) for need in plan.need)
        self.cost.pieces_wait |= op.type in HEAVY and is_of_rows

    def _moved(self, kind: str, size: AnySize | None, op: Operation | None, times: AnySize) -> None:
        if self._replicas > 1:
            self.cost.moved.append(Moved(kind, None if size is None else size * times, op))

    def _note(self, op: Operation, plan: Plan, planned: Planned, times: AnySize) -> None:
        """Note what an operation itself costs."""
        layouts = [planned.layouts[tensor] for tensor in op.inputs]
        is_whole = not plan.exchanges and {*plan.need, *plan.out} <= {REPLICATED}
        follows_gather = is_whole and any(
            tensor in self._after_gather
            or (isinstance(layout, Rows) and tensor not in planned.free)
            for tensor, layout in zip(op.inputs, layouts, strict=True)
        )
        if follows_gather:
            self._after_gather.update(op.outputs)
        if op.type in HEAVY:
            flops = flops_of(op, planned.facts)
            flops = None if flops is None else flops * times
            self.cost.work.append(Work(flops, op, not is_whole, follows_gather))
        if op in planned.inner:
            self._enter(op, plan, planned.inner[op], layouts, times)
        elif op.inputs and op.inputs[0].variable is not None:
            return
        elif op in planned.moments:
            if op is planned.moments[op].mean:
                # A mean and a mean of squares, as float64.
                size = bytes_of(op.outputs[0], planned.facts)
                doubles = None if size is None else size * 16
                variance = planned.moments[op].variance
                self._after_exchange.update([*op.outputs, *variance.outputs])
                self._moved("summed", doubles, op, times)
        elif runs_once(op, self._changes_tables):
            self.cost.once.append(op)
            self._after_exchange.update(op.outputs)
            for tensor in op.outputs:
                if tensor.dtype in UNSENT and self._replicas > 1:
                    reason = "its result cannot be sent to the other replicas"
                    raise CannotSplit(reason, op, tensor.dtype)
                self._moved("summed", bytes_of(tensor, planned.facts), op, times)
        elif plan.exchanges:
            size = bytes_of(op.outputs[0], planned.facts)
            every = None if size is None else size * self._replicas
            self._after_exchange.update(op.outputs)
            self._moved("summed", every, op, times)

    def _enter(
        self,
        op: Operation,
        plan: Plan,
        programs: Sequence[Planned],
        layouts: Sequence[Layout],
        times: AnySize,
    ) -> None:
        if op.type == LOOP:
            times = times * iterations_of(op, programs[0].facts)
        first = int(op.type == BRANCH)
        for inner in programs:
            for outer, layout, need, own in zip(
                op.inputs[first:],
                layouts[first:],
                plan.need[first:],
                inner.program.inputs,
                strict=True,
            ):
                is_gathered = isinstance(layout, Rows) and need == REPLICATED
                if is_gathered or outer in self._after_gather:
                    self._after_gather.add(own)
            sources: dict[int, Any] = {}
            self._add(inner, times, sources)
            if op.type == BRANCH and inner.may_exchange:
                for tensor, need in zip(inner.program.outputs, plan.out, strict=True):
                    self._convert(inner, None, tensor, inner.layouts[tensor], need, times)
                for number, source in sources.items():
                    new = inner.state[number], plan.assigned[number]
                    self._convert(inner, None, source, *new, times)


def iterations_of(op: Operation, facts: Facts) -> AnySize:
    """How many iterations a loop has; a size of that name if it is not known."""
    # The first inputs of TensorFlow's loops are a counter and its bound.
    bound = facts.value(op.inputs[1]) if len(op.inputs) > 1 else None
    count: Any = None if bound is None or bound.ndim else bound[()]
    is_known = count is not None and (not isinstance(count, int) or count > 0)
    return count if is_known else Size.of("iterations")
