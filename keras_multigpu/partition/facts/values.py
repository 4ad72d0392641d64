"""The values of shapes, axes and counts, as far as they are known before a step runs.

A value is known only if it holds for batches of every size. It is not known which of two sizes is
larger, so their `Maximum` is not known either.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import ALL, FIRST, NONE, SECOND
from keras_multigpu.partition.facts.slices import OPEN, entries_of
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.sizes import is_number, product, quotient

# Values with more entries are not tracked: shapes have fewer.
MOST_ENTRIES = 64

VALUES: dict[str, Callable[[Operation, Facts], Any]] = {}
"""A function for each type of operation: the values of the outputs, None for unknown ones."""


def values_of(*types: str) -> Callable[[Any], Any]:
    """Enter a function for these types of operations."""

    def enter(function: Any) -> Any:
        VALUES.update(dict.fromkeys(types, function))
        return function

    return enter


def if_known(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function where all its arguments are known, and None elsewhere."""
    return lambda *entries: None if None in entries else function(*entries)


def numbers(array: np.ndarray | None) -> np.ndarray | None:
    """An array as plain numbers; None unless all entries are."""
    if array is None or not all(is_number(entry) for entry in array.ravel()):
        return None
    return np.asarray(array.tolist())


@values_of("Const")
def const(op: Operation, facts: Facts) -> Any:
    if (op.outputs[0].shape.num_elements() or 0) > MOST_ENTRIES:
        return None
    found = op.outputs[0].constant
    return None if found is None else [np.asarray(found).astype(object)]


# How the results of these follow from the shape of an input.
COUNTS: dict[str, Callable[[Any], Any]] = {
    "Shape": lambda dims: dims,
    "ShapeN": lambda dims: dims,
    "Size": lambda dims: None if None in dims else product(dims),
    "Rank": len,
}


@values_of(*COUNTS)
def counted(op: Operation, facts: Facts) -> Any:
    shapes = [facts.dims(tensor) for tensor in op.inputs]
    counts = [None if dims is None else COUNTS[op.type](dims) for dims in shapes]
    return [None if count is None else np.array(count, object) for count in counts]


@values_of("Identity", "StopGradient", "Cast", "EnsureShape", "PreventGradient", "Snapshot")
def same(op: Operation, facts: Facts) -> Any:
    value, before, after = facts.value(op.inputs[0]), op.inputs[0].dtype, op.outputs[0].dtype
    if before == tf.bool != after:
        whole = numbers(value)
        return None if whole is None else [whole.astype(int).astype(object)]
    is_same = before == after or (before in (tf.int32, tf.int64) and after != tf.bool)
    return [value] if is_same else None


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is known only for plain numbers."""
    return lambda *entries: function(*entries) if all(map(is_number, entries)) else None


def divided(one: Any, two: Any) -> Any:
    if is_number(one) and is_number(two):
        return one // two if two else None
    return quotient(one, two)


def of_equals(function: Callable[[Any, Any], Any], result: Any = None) -> Callable[..., Any]:
    """A function of plain numbers. For equal sizes it is the size, or `result`."""

    def compare(one: Any, two: Any) -> Any:
        if is_number(one) and is_number(two):
            return function(one, two)
        return None if one != two else one if result is None else result

    return compare


ENTRY_BY_ENTRY: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "AddV2": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Abs": plain(abs),
    "FloorDiv": divided,
    "FloorMod": plain(lambda one, two: one % two if two else None),
    "Maximum": of_equals(max),
    "Minimum": of_equals(min),
    "Equal": of_equals(operator.eq, True),
    "NotEqual": of_equals(operator.ne, False),
    "Greater": plain(operator.gt),
    "GreaterEqual": plain(operator.ge),
    "Less": plain(operator.lt),
    "LessEqual": plain(operator.le),
    "LogicalAnd": operator.and_,
    "LogicalOr": operator.or_,
    "LogicalNot": operator.not_,
    "SelectV2": lambda chosen, one, two: one if chosen else two,
    "Select": lambda chosen, one, two: one if chosen else two,
}


@values_of(*ENTRY_BY_ENTRY)
def entry_by_entry(op: Operation, facts: Facts) -> Any:
    found = [facts.value(tensor) for tensor in op.inputs]
    if any(own is None for own in found):
        return None
    function = np.frompyfunc(if_known(ENTRY_BY_ENTRY[op.type]), len(found), 1)
    return [np.asarray(function(*found), object)]


# Operations that only move entries: the inputs that have these, and how they move. The other inputs
# have to be plain numbers.
MOVES: dict[str, tuple[slice, Callable[..., Any]]] = {
    "Pack": (ALL, lambda op, *parts: [np.stack(parts, op.get_attr("axis"))]),
    "Unpack": (FIRST, lambda op, whole: np.moveaxis(whole, op.get_attr("axis"), 0)),
    "Split": (SECOND, lambda op, axis, whole: np.split(whole, len(op.outputs), int(axis))),
    "SplitV": (FIRST, lambda op, whole, sizes, axis: split_to(whole, sizes, int(axis))),
    "ConcatV2": (slice(-1), lambda op, *parts: [np.concatenate(parts[:-1], int(parts[-1]))]),
    "Reshape": (FIRST, lambda op, whole, shape: [whole.reshape(shape.astype(int))]),
    "Transpose": (FIRST, lambda op, whole, order: [whole.transpose(order.astype(int))]),
    "ExpandDims": (FIRST, lambda op, whole, axis: [np.expand_dims(whole, int(axis))]),
    "Squeeze": (
        FIRST,
        lambda op, whole: [whole.squeeze(tuple(op.get_attr("squeeze_dims")) or None)],
    ),
    "Slice": (FIRST, lambda op, whole, begin, length: [whole[tuple(map(cut, begin, length))]]),
    "GatherV2": (
        FIRST,
        lambda op, whole, places, axis: (
            None if op.get_attr("batch_dims") else [np.take(whole, places.astype(int), int(axis))]
        ),
    ),
    "Fill": (SECOND, lambda op, shape, entry: [np.full(shape.astype(int), entry[()], object)]),
    "Range": (NONE, lambda op, *bounds: [np.arange(*map(int, bounds))]),
    "InvertPermutation": (NONE, lambda op, order: [np.argsort(order)]),
}


def split_to(whole: np.ndarray, sizes: np.ndarray, axis: int) -> Any:
    return None if -1 in sizes else np.split(whole, np.cumsum(sizes[:-1]).astype(int), axis)


def cut(begin: Any, length: Any) -> slice:
    return slice(begin, None if length < 0 else begin + length)


@values_of(*MOVES)
def moved(op: Operation, facts: Facts) -> Any:
    places, function = MOVES[op.type]
    found = [facts.value(tensor) for tensor in op.inputs]
    entries = range(len(found))[places]
    if entries and all(found[place] is None for place in entries):
        return None
    for place, tensor in enumerate(op.inputs):
        if place not in entries:
            found[place] = numbers(found[place])
        elif found[place] is None and tensor.shape.is_fully_defined():
            found[place] = np.full(tensor.shape, None, object)
    if any(own is None for own in found):
        return None
    if op.type in ("Fill", "Range") and (op.outputs[0].shape.num_elements() or 0) > MOST_ENTRIES:
        return None
    results = function(op, *found)
    return None if results is None else [np.asarray(own, object) for own in results]


@values_of("ConcatOffset")
def concat_offsets(op: Operation, facts: Facts) -> Any:
    """The start of each tensor in the concatenated one."""
    found: list[Any] = [facts.value(tensor) for tensor in op.inputs]
    axis, *shapes = found
    if numbers(axis) is None or any(own is None for own in shapes):
        return None
    begin: Any = 0
    place, offsets = int(axis), []
    for own in shapes:
        offset = np.zeros(len(own), object)
        offset[place] = begin
        offsets.append(offset)
        unknown = begin is None or own[place] is None
        begin = None if unknown else begin + own[place]
    return offsets


@values_of("StridedSlice")
def sliced(op: Operation, facts: Facts) -> Any:
    found = facts.value(op.inputs[0])
    entries = None if found is None else entries_of(op, facts, found.ndim)
    if found is None or entries is None:
        return None
    index: list[Any] = []
    for entry in entries:
        bounds = [entry.begin, entry.end, entry.stride]
        if entry.shrinks:
            bounds[1] = OPEN
        if not all(map(is_number, bounds)):
            return None
        begin, end, stride = (None if each is OPEN else int(each) for each in bounds)
        whole = np.newaxis if entry.axis is None else slice(begin, end, stride)
        index.append(begin or 0 if entry.shrinks else whole)
    return [np.asarray(found[tuple(index)], object)]


REDUCED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "Prod": (operator.mul, 1),
    "Sum": (operator.add, 0),
    "Max": (of_equals(max), None),
    "Min": (of_equals(min), None),
    "All": (operator.and_, True),
    "Any": (operator.or_, False),
}


@values_of(*REDUCED)
def reduced(op: Operation, facts: Facts) -> Any:
    found, axes = facts.value(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    function, empty = REDUCED[op.type]
    if found is None or axes is None or (empty is None and not found.size):
        return None
    over = np.frompyfunc(if_known(function), 2, 1)
    for axis in sorted({int(axis) % found.ndim for axis in np.ravel(axes)}, reverse=True):
        start = {} if empty is None else {"initial": empty}
        found = over.reduce(found, axis, keepdims=op.get_attr("keep_dims"), **start)
        found = np.asarray(found, object)
    return [found]


@values_of("ZerosLike", "OnesLike")
def zeros_or_ones(op: Operation, facts: Facts) -> Any:
    shape = op.outputs[0].shape
    if not shape.is_fully_defined() or shape.num_elements() > MOST_ENTRIES:
        return None
    return [np.full(shape.as_list(), int(op.type == "OnesLike"), object)]


@values_of("DynamicStitch")
def stitched(op: Operation, facts: Facts) -> Any:
    count = len(op.inputs) // 2
    places = [numbers(facts.value(tensor)) for tensor in op.inputs[:count]]
    parts = [facts.value(tensor) for tensor in op.inputs[count:]]
    if any(place is None for place in places) or any(part is None for part in parts):
        return None
    last = max((int(np.max(p)) for p in places if p is not None and np.size(p)), default=-1)
    found = np.full([1 + last], None, object)
    for place, part in zip(places, parts, strict=True):
        for at, entry in zip(np.ravel(place), np.ravel(part), strict=True):  # type: ignore[arg-type]
            found[int(at)] = entry
    return [found]


@values_of("BroadcastArgs")
def broadcast(op: Operation, facts: Facts) -> Any:
    one, two = (facts.value(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    return [np.array(broadcast_dims([list(one), list(two)]), object)]


@values_of("BroadcastGradientArgs")
def summed_axes(op: Operation, facts: Facts) -> Any:
    """The axes over which the gradients of broadcast inputs are summed.

    For a batch of one row TensorFlow also names the batch's axis, for both inputs. A sum over one
    row changes nothing, so leaving it out gives the same.
    """
    one, two = (facts.value(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    if list(one) == list(two) and None not in list(one):
        return [np.empty(0, object)] * 2
    most = max(len(one), len(two))
    padded = [[1] * (most - len(dims)) + list(dims) for dims in (one, two)]
    axes: tuple[list[int], list[int]] = ([], [])
    for axis, (a, b) in enumerate(zip(*padded, strict=True)):
        if a == b and a is not None:
            if is_number(a) and a == 1:
                axes[0].append(axis)
                axes[1].append(axis)
        elif is_number(a) and a == 1:
            axes[0].append(axis)
        elif is_number(b) and b == 1:
            axes[1].append(axis)
        elif not (is_number(a) and is_number(b)):
            # Either may be 1 when the step runs.
            return None
    return [np.array(each_axes, object) for each_axes in axes]


def broadcast_dims(all_dims: list[list[Any]]) -> list[Any]:
    """The shape to which these shapes are broadcast; None for lengths that are not known."""
    most = max(len(dims) for dims in all_dims)
    padded = [[1] * (most - len(dims)) + list(dims) for dims in all_dims]
    return [broadcast_dim(entries) for entries in zip(*padded, strict=True)]


def broadcast_dim(entries: Any) -> Any:
    wide = [entry for entry in entries if not (is_number(entry) and entry == 1)]
    if not wide:
        return 1
    fixed = [entry for entry in wide if is_number(entry)]
    if fixed:
        return fixed[0]
    if any(entry is None for entry in wide) or any(entry != wide[0] for entry in wide):
        return None
    return wide[0]
