"""Checks by numbers whether a rule is true: the whole of an operation against its parts.

An operation is tried with every combination of layouts of its inputs. If its rule has a plan, the
parts of several simulated replicas, with uneven and empty shares, are computed by the plan and put
together as it claims. If that differs from the whole, the plan is false. If the rule has no plan,
but the operation itself turns parts of the inputs into parts of the result, a plan is missing.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.emission.operations import run_part, run_with_rows
from keras_multigpu.partition.facts.finding import find_facts
from keras_multigpu.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Block,
    Items,
    Layout,
    Rows,
    stacked,
)
from keras_multigpu.partition.program import Program
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules import RULES, fails_empty
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.sizes import AnySize, Size, value_of

Values = Callable[[np.random.Generator, tuple[int, ...]], Any]


@dataclass(frozen=True)
class Operand:
    """An input of the operation of a sample.

    Args:
        dims: The lengths of its axes.
        dtype: Its type.
        values: Makes a whole value.
        special: Whether one row may be NaN, and another infinite.
        is_list: Whether it is a list of tensors, along its first axis.
    """

    dims: tuple[AnySize, ...]
    dtype: tf.DType
    values: Values
    special: bool = False
    is_list: bool = False


@dataclass(frozen=True)
class Sample:
    """An operation to try.

    Args:
        function: Makes it from its operands, and returns its results.
        operands: Its inputs in layouts.
        modes: Which lengths are numbers before a step runs: all of them ("static"), or those that
            do not change from batch to batch ("open"). "unknown" is like "open", but other changing
            lengths than those of batches are not even known as sizes.
        tolerance: The largest difference that counts as rounding.
        one_row: Whether to try it for a batch of one row, too.
        wishes: Whether to look for missing rules. Some operations would end the process.
    """

    function: Callable[..., Any]
    operands: tuple[Operand, ...]
    modes: tuple[str, ...] = ("open", "static", "unknown")
    tolerance: float = 1e-6
    one_row: bool = True
    wishes: bool = True


@dataclass
class Findings:
    """The faults of a rule.

    Args:
        type: The type of the operation.
    """

    type: str
    false: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    """Results with an unknown number of rows, so that the next operation has to gather them."""


@dataclass(frozen=True)
class Run:
    """The sizes in a trial, and how many examples of each batch the replicas have."""

    numbers: Mapping[str, int]
    shares: tuple[Mapping[str, tuple[int, ...]], ...]
    special: bool = False


def shares(*each: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Mapping[str, Any], ...]:
    return tuple({"batch": batch, "other": other} for batch, other in each)


SIX = {"batch": 6, "other": 5, "time": 3}
USUAL = (
    Run(SIX, shares(((4, 2), (1, 4)), ((3, 2, 1), (0, 5, 0)), ((3, 2, 1, 0), (2, 0, 2, 1)))),
    Run(SIX, shares(((0, 6), (5, 0)), ((1, 0, 5), (1, 1, 3))), special=True),
)
ONE = (Run({"batch": 1, "other": 2, "time": 1}, shares(((1, 0), (0, 2)), ((0, 0, 1), (1, 1, 0)))),)
BATCHES = ("batch", "other")


class Trial:
    """One operation, with the facts that are known in one of the modes.

    Args:
        sample: The sample.
        mode: One of its modes.
    """

    def __init__(self, sample: Sample, mode: str) -> None:
        self.sample, self.mode = sample, mode
        self.runs: tuple[Run, ...] = USUAL
        if mode == "open" and sample.one_row:
            self.runs += ONE
        elif mode == "unknown":
            self.runs = USUAL[:1]
        self._wholes: dict[int, tuple[list[Any], list[Any]]] = {}
        made: list[tf.Operation] = []

        def traced(*operands: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            given = [
                as_list(tensor) if operand.is_list else tensor
                for tensor, operand in zip(operands, sample.operands, strict=True)
            ]
            results = tf.nest.flatten(sample.function(*given))
            op = results[0].op
            made.append(op)
            # All outputs, also those that the function does not return.
            return [shown(tensor) for tensor in op.outputs], [shown(t) for t in op.inputs]

        specs = [
            tf.TensorSpec([dim if isinstance(dim, int) else None for dim in dims], operand.dtype)
            for dims, operand in zip(self._dims(), sample.operands, strict=True)
        ]
        self.whole = tf.function(traced, autograph=False).get_concrete_function(*specs)
        graph = self.whole.graph
        program = Program(graph)
        self.op = program.tensors[made[-1].outputs[0].name].op
        inputs = program.inputs[: len(sample.operands)]
        captured = [None] * (len(graph.inputs) - len(inputs))
        batches = {b: SIX[b] if mode == "static" else Size.of(b) for b in BATCHES}
        self.facts = find_facts(program, [*self._dims(), *captured], batches)
        operands = [
            tensor.users[0].outputs[0] if operand.is_list else tensor
            for tensor, operand in zip(inputs, sample.operands, strict=True)
        ]
        self.places = [
            operands.index(tensor) if tensor in operands else None for tensor in self.op.inputs
        ]

    def _dims(self) -> list[list[AnySize | None]]:
        return [[self._known(dim) for dim in operand.dims] for operand in self.sample.operands]

    def _known(self, dim: AnySize) -> AnySize | None:
        if self.mode == "static":
            return value_of(dim, SIX)
        if self.mode == "unknown" and isinstance(dim, Size) and not dim.names <= {*BATCHES}:
            return None
        return dim

    def false_facts(self) -> Iterator[str]:
        """The facts of the results that are false."""
        for number, run in enumerate(self.runs):
            for tensor, result in zip(self.op.outputs, self.truth(number)[0], strict=True):
                dims, value = self.facts.dims(tensor), self.facts.value(tensor)
                if tensor.dtype != tf.variant and not is_so(dims, np.shape(result), run.numbers):
                    yield f"{self.mode} lengths {dims} for {np.shape(result)}"
                if not is_so(value, result, run.numbers):
                    yield f"{self.mode} value {value} for {result}"

    def layouts(self) -> Iterator[tuple[Layout, ...]]:
        each: list[list[Layout]] = []
        for place in self.places:
            if place is None:
                each.append([REPLICATED])
                continue
            operand = self.sample.operands[place]
            dims = operand.dims[1:] if operand.is_list else operand.dims
            ways: list[Layout] = [REPLICATED]
            if operand.dtype in SUMMED:
                ways.append(PARTIAL)
            for axis, dim in enumerate(dims):
                ways += [Rows(axis, self._blocks(blocks)) for blocks in blocks_of(dim)]
            each.append([Items(way) for way in ways] if operand.is_list else ways)
        yield from itertools.product(*each)

    def _blocks(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        if self.mode != "static":
            return blocks
        return tuple(Block(batch, value_of(factor, SIX)) for batch, factor in blocks)

    def truth(self, number: int) -> tuple[list[Any], list[Any]]:
        """The results of the whole operation in a run, and its inputs."""
        if number not in self._wholes:
            run, random = self.runs[number], np.random.default_rng(number)
            values = []
            for operand in self.sample.operands:
                shape = tuple(value_of(dim, run.numbers) for dim in operand.dims)
                value = np.asarray(operand.values(random, shape), operand.dtype.as_numpy_dtype)
                if run.special and operand.special and value.ndim and len(value) > 2:
                    value[1], value[2] = np.nan, np.inf
                values.append(tf.constant(value, operand.dtype))
            results, inputs = self.whole(*values)
            self._wholes[number] = [numpy(t) for t in results], [numpy(t) for t in inputs]
        return self._wholes[number]

    def local(self, plan: Plan) -> Any:
        specs = []
        for tensor, layout in zip(self.op.inputs, plan.need, strict=True):
            operand = isinstance(layout, Items)
            dims = tensor.shape.as_list() if tensor.shape.rank is not None and not operand else None
            if isinstance(layout, Rows) and dims is not None:
                dims[layout.axis] = None
            specs.append(tf.TensorSpec(dims, shown_type(tensor)))
        constants = [self._constant(tensor) for tensor in self.op.inputs]
        names = [*self.runs[0].numbers]
        scalars = [tf.TensorSpec((), tf.int32)] * len(names)

        def part(
            index: tf.Tensor,
            inputs: list[tf.Tensor],
            numbers: list[tf.Tensor],
            own: list[tf.Tensor],
            before: list[tf.Tensor],
        ) -> list[tf.Tensor]:
            given = [
                known
                if tensor.dtype == tf.resource
                else tf.constant(known, tensor.dtype)
                if known is not None
                else as_list(value)
                if tensor.dtype == tf.variant
                else value
                for known, value, tensor in zip(constants, inputs, self.op.inputs, strict=True)
            ]
            sizes, shares, earlier = (
                dict(zip(names, each, strict=True)) for each in (numbers, own, before)
            )
            batches = {name: Size.of(name) for name in names}
            replica = Replica(index, shares, earlier, sizes, batches)
            run = run_with_rows if fails_empty(self.op, plan, on_cpu=True) else run_part
            return [shown(tensor) for tensor in run(self.op, plan, replica, given)]

        return tf.function(part, autograph=False).get_concrete_function(
            tf.TensorSpec((), tf.int32), specs, scalars, scalars, scalars
        )

    def _constant(self, tensor: tf.Tensor) -> Any:
        """The value of an input that is the same in all runs: a constant or a resource."""
        if tensor.dtype == tf.resource:
            return next(own for own, inner in self.whole.graph.captures if inner is tensor.raw)
        return None if tensor.dtype == tf.variant else tensor.constant

    def parts(self, plan: Plan, number: int, share: Mapping[str, Any], local: Any) -> Any:
        run, (_, inputs) = self.runs[number], self.truth(number)
        count = len(share["batch"])
        names = [*run.numbers]
        numbers = [tf.constant(run.numbers[name]) for name in names]
        given = [
            split(value, layout, run.numbers, share, place)
            for place, (value, layout) in enumerate(zip(inputs, plan.need, strict=True))
        ]
        found = []
        for replica in range(count):
            shares = [share.get(name, (0,) * count) for name in names]
            own = [tf.constant(each[replica]) for each in shares]
            before = [tf.constant(sum(each[:replica])) for each in shares]
            values = [
                parts[replica]
                if tensor.dtype == tf.resource
                else tf.constant(parts[replica], shown_type(tensor))
                for parts, tensor in zip(given, self.op.inputs, strict=True)
            ]
            found.append(
                [
                    numpy(tensor)
                    for tensor in local(tf.constant(replica), values, numbers, own, before)
                ]
            )
        return found

    def fault(self, plan: Plan) -> str | None:
        """What is wrong with a plan; None if nothing is."""
        if len(plan.need) != len(self.op.inputs) or len(plan.out) != len(self.op.outputs):
            return "wrong number of layouts"
        try:
            local = self.local(plan)
        except Exception as error:
            return f"cannot be traced: {short(error)}"
        for number, run in enumerate(self.runs):
            if run.special and PARTIAL in plan.need:
                # A part may be zero although the sum is infinite.
                continue
            for share in run.shares:
                try:
                    found = self.parts(plan, number, share, local)
                    results = [
                        together(parts, layout, run.numbers, share, plan.combine)
                        for parts, layout in zip(zip(*found, strict=True), plan.out, strict=True)
                    ]
                except Exception as error:
                    return f"fails for {share['batch']} of {run.numbers}: {short(error)}"
                for place, (one, other) in enumerate(
                    zip(results, self.truth(number)[0], strict=True)
                ):
                    wrong = difference(one, other, self.sample.tolerance)
                    if wrong:
                        return f"result {place} for {share['batch']} of {run.numbers}: {wrong}"
        return None

    def unmeasured(self, plan: Plan) -> list[Layout]:
        """The layouts of results in rows, of an unknown number."""
        found = []
        for tensor, layout in zip(self.op.outputs, plan.out, strict=True):
            if isinstance(layout, Rows) and tensor.dtype != tf.variant:
                dims = self.facts.dims(tensor)
                if dims is None or dims[layout.axis] is None:
                    found.append(layout)
        return found

    def as_it_is(self, ins: tuple[Layout, ...]) -> str | None:
        """The layouts of the results of the operation itself on parts; None if there are none."""
        plan = Plan(ins, (REPLICATED,) * len(self.op.outputs))
        ways: list[list[Layout]] = []
        for result in self.truth(0)[0]:
            if getattr(result, "ndim", None) is None or not np.size(result):
                return None
            rows = {layout.blocks: None for layout in ins if isinstance(layout, Rows)}
            ways.append(
                [
                    REPLICATED,
                    PARTIAL,
                    *(Rows(axis, blocks) for axis in range(result.ndim) for blocks in rows),
                ]
            )
        try:
            local = self.local(plan)
        except Exception:
            return None
        for number, run in enumerate(self.runs):
            if run.special and PARTIAL in ins:
                continue
            for share in run.shares:
                try:
                    found = self.parts(plan, number, share, local)
                except Exception:
                    return None
                truth = self.truth(number)[0]
                for place, parts in enumerate(zip(*found, strict=True)):
                    ways[place] = [
                        way
                        for way in ways[place]
                        if lies_so(parts, way, truth[place], run, share, self.sample.tolerance)
                    ]
                    if not ways[place]:
                        return None
        if all(not np.any(result) for result in self.truth(0)[0] if result.dtype != object):
            return None
        return str([way[0] for way in ways])


def is_so(told: Any, true: Any, numbers: Mapping[str, int]) -> bool:
    """Whether what is told of entries, such as the lengths of axes, is true where it is known."""
    if told is None:
        return True
    entries = [None if each is None else value_of(each, numbers) for each in np.ravel(told)]
    found = np.ravel(true)
    return len(entries) == len(found) and all(
        one in (None, other) for one, other in zip(entries, found, strict=True)
    )


def validate(sample: Sample, wishes: bool = True) -> Findings:
    """Try an operation with all layouts in all modes.

    Args:
        wishes: Whether to look for missing rules, too.
    """
    findings = None
    for mode in sample.modes:
        trial = Trial(sample, mode)
        findings = findings or Findings(trial.op.type)
        findings.false += trial.false_facts()
        verdicts: dict[Any, str | None] = {}
        for ins in trial.layouts():
            if all(layout in (REPLICATED, Items(REPLICATED)) for layout in ins):
                continue
            told = f"{mode} {ins}"
            rule = RULES.get(trial.op.type)
            plan = rule(trial.op, ins, trial.facts) if rule else None
            if plan is not None:
                key = plan.need, plan.out, plan.combine
                if key not in verdicts:
                    verdicts[key] = trial.fault(plan)
                    if verdicts[key]:
                        findings.false.append(f"{told} -> {plan.out}: {verdicts[key]}")
                    findings.unmeasured += [f"{told} -> {way}" for way in trial.unmeasured(plan)]
            elif wishes and sample.wishes and PARTIAL not in ins:
                # Most rules for open sums are left out on purpose.
                way = trial.as_it_is(ins)
                if way:
                    findings.missing.append(f"{told} -> {way}")
    assert findings is not None
    return findings


def blocks_of(dim: AnySize) -> Iterator[tuple[Block, ...]]:
    """All blocks of examples that make up an axis of this length."""
    if not isinstance(dim, Size):
        return
    blocks = []
    for names, coefficient in dim.terms:
        batches = [name for name in names if name in BATCHES]
        if len(batches) != 1:
            return
        rest = [name for name in names if name not in BATCHES]
        factor: AnySize = coefficient
        for name in rest:
            factor = factor * Size.of(name)
        blocks.append((batches[0], factor, coefficient if not rest else 1))
    for order in {tuple(blocks), tuple(reversed(blocks))}:
        yield tuple(Block(batch, factor) for batch, factor, _ in order)
    if len(blocks) == 1 and blocks[0][2] > 1:
        yield (Block(blocks[0][0], 1),) * blocks[0][2]


def as_list(tensor: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(tensor)[1:]
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=shape)


def shown(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor that can be compared; for a list, its elements, stacked."""
    if tensor.dtype != tf.variant:
        return tf.identity(tensor)
    return tf.raw_ops.TensorListStack(
        input_handle=tensor, element_shape=tf.constant(-1), element_dtype=tf.float64
    )


def shown_type(tensor: tf.Tensor) -> tf.DType:
    return tf.float64 if tensor.dtype == tf.variant else tensor.dtype


def numpy(tensor: tf.Tensor) -> Any:
    return tensor if tensor.dtype == tf.resource else tensor.numpy()


def pieces(layout: Rows, numbers: Mapping[str, int], share: Mapping[str, Any]) -> list[list[int]]:
    """For each block, how many rows each replica has."""
    return [
        [own * value_of(factor, numbers) for own in share[batch]] for batch, factor in layout.blocks
    ]


def split(
    value: Any, layout: Layout, numbers: Mapping[str, int], share: Mapping[str, Any], seed: int
) -> list[Any]:
    """Each replica's part of a value."""
    count = len(share["batch"])
    if isinstance(layout, Items):
        layout = stacked(layout.element)
    if isinstance(layout, Rows):
        lengths = pieces(layout, numbers, share)
        if sum(map(sum, lengths)) != value.shape[layout.axis]:
            raise ValueError(f"{layout} of {value.shape}")
        cuts = np.cumsum([n for block in lengths for n in block])[:-1]
        found = np.split(value, cuts, layout.axis)
        return [np.concatenate(found[n::count], layout.axis) for n in range(count)]
    if layout == PARTIAL:
        random = np.random.default_rng(seed)
        parts = []
        for place in range(count - 1):
            part = random.normal(place - 1, 2, value.shape)
            if value.dtype.kind == "c":
                part = part + 1j * random.normal(size=value.shape)
            parts.append((part * 3).astype(value.dtype) if value.dtype.kind == "i" else part)
        return [
            *(part.astype(value.dtype) for part in parts),
            value - sum(parts).astype(value.dtype),
        ]
    return [value] * count


def together(
    parts: Sequence[Any],
    layout: Layout,
    numbers: Mapping[str, int],
    share: Mapping[str, Any],
    combine: str | None = None,
) -> Any:
    """The whole of parts in this layout."""
    count = len(parts)
    if isinstance(layout, Items):
        layout = stacked(layout.element)
    if isinstance(layout, Rows):
        lengths = pieces(layout, numbers, share)
        own = [
            np.split(part, np.cumsum([block[n] for block in lengths])[:-1], layout.axis)
            for n, part in enumerate(parts)
        ]
        for n, found in enumerate(own):
            if [piece.shape[layout.axis] for piece in found] != [block[n] for block in lengths]:
                raise ValueError(f"{layout} of {parts[n].shape}")
        blocks = [own[n][block] for block in range(len(lengths)) for n in range(count)]
        return np.concatenate(blocks, layout.axis)
    if layout == PARTIAL:
        return np.sum(np.stack(parts), 0, dtype=parts[0].dtype)
    if combine:
        # Like `Conversions.combine`.
        return getattr(tf.raw_ops, combine)(input=tf.stack(parts), axis=0).numpy()
    for part in parts[1:]:
        if difference(part, parts[0], 1e-6):
            raise ValueError("replicas have different wholes")
    return parts[0]


def lies_so(
    parts: Sequence[Any], way: Layout, truth: Any, run: Run, share: Mapping[str, Any], limit: float
) -> bool:
    if way == PARTIAL and (truth.dtype.kind not in "fci" or truth.dtype == object):
        return False
    try:
        found = together(parts, way, run.numbers, share)
    except ValueError:
        return False
    return not difference(found, truth, limit)


def difference(one: Any, other: Any, limit: float) -> str | None:
    """How two values differ, apart from rounding; None if they do not."""
    if not isinstance(one, (np.ndarray, np.generic, bytes, int)):
        return None
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {one.shape} for {other.dtype} {other.shape}"
    if other.dtype.kind in "fc" or other.dtype.name == "bfloat16":
        wide = complex if other.dtype.kind == "c" else float
        with np.errstate(all="ignore"):
            equal = np.allclose(one.astype(wide), other.astype(wide), limit, limit, equal_nan=True)
    else:
        equal = np.array_equal(one, other)
    return None if equal else f"{one.ravel()[:6]} for {other.ravel()[:6]}"


def short(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())[:240]}"
