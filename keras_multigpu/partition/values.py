"""What is known of the values of shapes, axes and counts, before a step runs.

Only what holds for batches of every size is concluded. Which of two sizes is the larger is not
known, so a `Maximum` of them is not known either.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.sizes import AnySize, Size, product, quotient

VALUES: dict[str, Callable[[tf.Operation, Any], Any]] = {}
"""The values of an operation's outputs, by its type; None for those that are not known."""


def value_of(*types: str) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        VALUES.update(dict.fromkeys(types, function))
        return function

    return enter


def each(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    """A function of single entries, None where one of them is not known."""

    def known(*entries: Any) -> Any:
        return None if any(entry is None for entry in entries) else function(*entries)

    return np.asarray(np.frompyfunc(known, len(arrays), 1)(*arrays), object)


def is_number(entry: Any) -> bool:
    return entry is not None and not isinstance(entry, Size)


def numbers(array: np.ndarray | None) -> np.ndarray | None:
    """An array all of whose entries are plain numbers."""
    if array is None or not all(is_number(entry) for entry in array.ravel()):
        return None
    return np.asarray(array.tolist())


@value_of("Const")
def const(op: tf.Operation, facts: Any) -> Any:
    shape = op.outputs[0].shape
    if (shape.num_elements() or 0) > 64:
        return None
    found = tf.get_static_value(op.outputs[0])
    return None if found is None else [np.asarray(found).astype(object)]


@value_of("Shape", "ShapeN")
def shape(op: tf.Operation, facts: Any) -> Any:
    found = [facts.dims(tensor) for tensor in op.inputs]
    return [None if dims is None else np.array([*dims, None], object)[:-1] for dims in found]


@value_of("Size")
def size(op: tf.Operation, facts: Any) -> Any:
    dims = facts.dims(op.inputs[0])
    return None if dims is None or None in dims else [scalar(product(dims))]


@value_of("Rank")
def rank(op: tf.Operation, facts: Any) -> Any:
    dims = facts.dims(op.inputs[0])
    return None if dims is None else [scalar(len(dims))]


def scalar(entry: AnySize) -> np.ndarray:
    found = np.empty((), object)
    found[()] = entry
    return found


@value_of("Identity", "StopGradient", "Cast", "EnsureShape", "PreventGradient", "Snapshot")
def same(op: tf.Operation, facts: Any) -> Any:
    if op.inputs[0].dtype == tf.bool != op.outputs[0].dtype:
        whole = numbers(facts.value(op.inputs[0]))
        return None if whole is None else [whole.astype(int).astype(object)]
    if op.inputs[0].dtype not in (tf.int32, tf.int64) or op.outputs[0].dtype == tf.bool:
        known = op.inputs[0].dtype == op.outputs[0].dtype
        return [facts.value(op.inputs[0])] if known else None
    return [facts.value(op.inputs[0])]


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda one, two: one + two,
    "AddV2": lambda one, two: one + two,
    "Sub": lambda one, two: one - two,
    "Mul": lambda one, two: one * two,
}


def plain(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of plain numbers alone."""
    return lambda one, two: function(one, two) if is_number(one) and is_number(two) else None


def divided(one: Any, two: Any) -> Any:
    if is_number(one) and is_number(two):
        return one // two if two else None
    return quotient(one, two)


def extreme(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The larger or the smaller of two: of equal sizes either."""

    def of(one: Any, two: Any) -> Any:
        if is_number(one) and is_number(two):
            return function(one, two)
        return one if one == two else None

    return of


def equal(one: Any, two: Any) -> Any:
    if is_number(one) and is_number(two):
        return one == two
    return True if one == two else None


ARITHMETIC |= {
    "FloorDiv": divided,
    "Maximum": extreme(max),
    "Minimum": extreme(min),
    "FloorMod": plain(lambda one, two: one % two if two else None),
    "Equal": equal,
    "NotEqual": lambda one, two: None if equal(one, two) is None else not equal(one, two),
    "Greater": plain(lambda one, two: one > two),
    "GreaterEqual": plain(lambda one, two: one >= two),
    "Less": plain(lambda one, two: one < two),
    "LessEqual": plain(lambda one, two: one <= two),
    "LogicalAnd": plain(lambda one, two: bool(one and two)),
    "LogicalOr": plain(lambda one, two: bool(one or two)),
}


@value_of(*ARITHMETIC)
def arithmetic(op: tf.Operation, facts: Any) -> Any:
    one, two = (facts.value(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    return [each(ARITHMETIC[op.type], one, two)]


@value_of("Neg")
def negated(op: tf.Operation, facts: Any) -> Any:
    found = facts.value(op.inputs[0])
    return None if found is None else [each(lambda entry: -entry, found)]


@value_of("LogicalNot")
def inverted(op: tf.Operation, facts: Any) -> Any:
    found = facts.value(op.inputs[0])
    return None if found is None else [each(lambda entry: not entry, found)]


@value_of("SelectV2", "Select")
def selected(op: tf.Operation, facts: Any) -> Any:
    chosen, one, two = (facts.value(tensor) for tensor in op.inputs)
    if chosen is None or one is None or two is None:
        return None
    return [
        np.asarray(
            np.frompyfunc(lambda c, a, b: None if c is None else (a if c else b), 3, 1)(
                chosen, one, two
            ),
            object,
        )
    ]


@value_of("Pack")
def packed(op: tf.Operation, facts: Any) -> Any:
    parts = [facts.value(tensor) for tensor in op.inputs]
    if any(part is None and op.inputs[0].shape.rank != 0 for part in parts):
        return None
    whole = [scalar(None) if part is None else part for part in parts]  # type: ignore[arg-type]
    return [np.stack(whole, op.get_attr("axis"))]


@value_of("Unpack", "Split")
def taken_apart(op: tf.Operation, facts: Any) -> Any:
    unpacks = op.type == "Unpack"
    found = facts.value(op.inputs[0 if unpacks else 1])
    axis = np.array(op.get_attr("axis")) if unpacks else numbers(facts.value(op.inputs[0]))
    if found is None or axis is None:
        return None
    parts = np.split(found, len(op.outputs), int(axis))
    return [np.squeeze(part, int(axis)) for part in parts] if unpacks else parts


@value_of("SplitV")
def taken_apart_by_sizes(op: tf.Operation, facts: Any) -> Any:
    found, sizes, axis = (facts.value(tensor) for tensor in op.inputs)
    sizes, axis = numbers(sizes), numbers(axis)
    if found is None or sizes is None or axis is None or -1 in sizes:
        return None
    return np.split(found, np.cumsum(sizes[:-1]).astype(int), int(axis))


@value_of("ConcatV2")
def concatenated(op: tf.Operation, facts: Any) -> Any:
    *parts, axis = [facts.value(tensor) for tensor in op.inputs]
    if axis is None or any(
        part is None and (tensor.shape.rank != 1 or tensor.shape[0] is None)
        for part, tensor in zip(parts, op.inputs[:-1], strict=True)
    ):
        return None
    whole = [
        np.full(tensor.shape.as_list(), None, object) if part is None else part
        for part, tensor in zip(parts, op.inputs[:-1], strict=True)
    ]
    return [np.concatenate(whole, int(axis))]


@value_of("Reshape")
def reshaped(op: tf.Operation, facts: Any) -> Any:
    found, to = facts.value(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    return None if found is None or to is None else [found.reshape([int(n) for n in to])]


@value_of("Transpose")
def transposed(op: tf.Operation, facts: Any) -> Any:
    found, order = facts.value(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    return None if found is None or order is None else [found.transpose(order.astype(int))]


@value_of("ConcatOffset")
def offsets(op: tf.Operation, facts: Any) -> Any:
    """Where each of the shapes of what is concatenated begins."""
    axis, *shapes = [facts.value(tensor) for tensor in op.inputs]
    if numbers(axis) is None or any(own is None for own in shapes):
        return None
    begin: Any = 0
    place, found = int(axis), []
    for own in shapes:
        offset = np.zeros(len(own), object)
        offset[place] = begin
        found.append(offset)
        unknown = begin is None or own[place] is None
        begin = None if unknown else begin + own[place]
    return found


@value_of("ExpandDims")
def expanded(op: tf.Operation, facts: Any) -> Any:
    found, axis = facts.value(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    return None if found is None or axis is None else [np.expand_dims(found, int(axis))]


@value_of("Squeeze")
def squeezed(op: tf.Operation, facts: Any) -> Any:
    found = facts.value(op.inputs[0])
    if found is None:
        return None
    axes = tuple(op.get_attr("squeeze_dims"))
    return [np.squeeze(found, axes or None)]


@value_of("StridedSlice")
def sliced(op: tf.Operation, facts: Any) -> Any:
    found = facts.value(op.inputs[0])
    bounds = [numbers(facts.value(tensor)) for tensor in op.inputs[1:]]
    if found is None or any(bound is None for bound in bounds):
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis")}
    new, shrunk = op.get_attr("new_axis_mask"), op.get_attr("shrink_axis_mask")
    index: list[Any] = []
    for place, (begin, end, stride) in enumerate(zip(*bounds, strict=True)):
        if masks["ellipsis"] >> place & 1:
            index.append(Ellipsis)
        elif new >> place & 1:
            index.append(np.newaxis)
        elif shrunk >> place & 1:
            index.append(int(begin))
        else:
            first = None if masks["begin"] >> place & 1 else int(begin)
            last = None if masks["end"] >> place & 1 else int(end)
            index.append(slice(first, last, int(stride)))
    taken = found[tuple(index)]
    return [taken if isinstance(taken, np.ndarray) else scalar(taken)]


@value_of("Slice")
def cut(op: tf.Operation, facts: Any) -> Any:
    found = facts.value(op.inputs[0])
    begin, length = (numbers(facts.value(tensor)) for tensor in op.inputs[1:])
    if found is None or begin is None or length is None:
        return None
    pairs = zip(begin, length, strict=True)
    return [found[tuple(slice(b, None if n < 0 else b + n) for b, n in pairs)]]


@value_of("GatherV2")
def gathered(op: tf.Operation, facts: Any) -> Any:
    found, places, axis = (facts.value(tensor) for tensor in op.inputs)
    places, axis = numbers(places), numbers(axis)
    if found is None or places is None or axis is None or op.get_attr("batch_dims"):
        return None
    taken = np.take(found, places.astype(int), int(axis))
    return [taken if isinstance(taken, np.ndarray) else scalar(taken)]


@value_of("Prod", "Sum", "Max", "Min", "All", "Any")
def reduced(op: tf.Operation, facts: Any) -> Any:
    found, axes = facts.value(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    if found is None or axes is None:
        return None
    over: Any = {"axis": tuple(map(int, np.ravel(axes))), "keepdims": op.get_attr("keep_dims")}
    if op.type in ("Prod", "Sum"):
        function, start = (operator.mul, 1) if op.type == "Prod" else (operator.add, 0)

        def known(one: Any, two: Any) -> Any:
            return None if one is None or two is None else function(one, two)

        every: Any = np.frompyfunc(known, 2, 1)
        result = every.reduce(found, initial=start, **over)
    else:
        whole = numbers(found)
        if (
            op.type in ("Max", "Min")
            and found.size
            and all(each == found.flat[0] for each in found.flat)
        ):
            # Of equal sizes any.
            whole = found
        if whole is None or not whole.size:
            return None
        plain_functions: dict[str, Any] = {
            "Max": np.max,
            "Min": np.min,
            "All": np.all,
            "Any": np.any,
        }
        result = np.asarray(plain_functions[op.type](whole, **over)).astype(object)
    return [result if isinstance(result, np.ndarray) else scalar(result)]


@value_of("Fill")
def filled(op: tf.Operation, facts: Any) -> Any:
    shape, value = numbers(facts.value(op.inputs[0])), facts.value(op.inputs[1])
    if shape is None or value is None or np.prod(shape) > 64:
        return None
    found = np.empty([int(n) for n in shape], object)
    found[...] = value[()]
    return [found]


@value_of("ZerosLike", "OnesLike")
def filled_alike(op: tf.Operation, facts: Any) -> Any:
    shape = op.outputs[0].shape
    if not shape.is_fully_defined() or shape.num_elements() > 64:
        return None
    return [np.full(shape.as_list(), int(op.type == "OnesLike"), object)]


@value_of("Range")
def ranged(op: tf.Operation, facts: Any) -> Any:
    bounds = [numbers(facts.value(tensor)) for tensor in op.inputs]
    if any(bound is None for bound in bounds):
        return None
    found = np.arange(*(int(bound) for bound in bounds))  # type: ignore[arg-type]
    return [found.astype(object)] if found.size <= 64 else None


@value_of("InvertPermutation")
def inverse(op: tf.Operation, facts: Any) -> Any:
    found = numbers(facts.value(op.inputs[0]))
    return None if found is None else [np.argsort(found).astype(object)]


@value_of("DynamicStitch")
def stitched(op: tf.Operation, facts: Any) -> Any:
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


@value_of("BroadcastArgs")
def broadcast(op: tf.Operation, facts: Any) -> Any:
    one, two = (facts.value(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    return [np.array([*broadcast_dims([list(one), list(two)]), None], object)[:-1]]


@value_of("BroadcastGradientArgs")
def summed_axes(op: tf.Operation, facts: Any) -> Any:
    """Over which axes gradients are summed.

    Where a batch has one row TensorFlow names its axis for both, and sums over that one row: what
    is said here then gives the same.
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
    return [np.array([*each_axes, None], object)[:-1] for each_axes in axes]


def broadcast_dims(all_dims: list[list[Any]]) -> list[Any]:
    """The lengths of axes of what is broadcast; None where not known."""
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
