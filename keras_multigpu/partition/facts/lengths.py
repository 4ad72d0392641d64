"""The lengths of the axes of an operation's outputs, where TensorFlow knows no number.

Most follow from the `Axes` of the operation. The outputs of operations that are in neither table
have unknown lengths, so operations on these need whole tensors.

It would not be enough to run TensorFlow's own shape functions for batches of two sizes: `x[:3]` may
have three rows both times, but has two for a batch of two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_multigpu.partition.facts.axes import AXES, New, entry_of, sizes_of
from keras_multigpu.partition.facts.facts import Dims, Facts
from keras_multigpu.partition.facts.families import EXAMPLES
from keras_multigpu.partition.facts.slices import Entry, entries_of
from keras_multigpu.partition.facts.values import numbers
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.sizes import AnySize, is_number, product, quotient

Lengths = Sequence[Dims] | None
LENGTHS: dict[str, Callable[[Operation, Facts], Lengths]] = {}
"""A function for each type of operation: the lengths of the axes of its outputs."""


def shape_in(facts: Facts, tensor: Tensor) -> Dims:
    value = facts.value(tensor)
    if value is None or np.ndim(value) != 1:
        return None
    return [None if is_number(entry) and entry < 0 else entry for entry in value]


def number_in(facts: Facts, tensor: Tensor) -> int | None:
    entry = entry_of(facts, tensor)
    return int(entry) if is_number(entry) else None  # type: ignore[arg-type]


# What a function needs of an input.
NEEDS: dict[str, Callable[[Facts, Tensor], Any]] = {
    "-": lambda facts, tensor: (),  # nothing
    "d": lambda facts, tensor: facts.dims(tensor),  # the lengths of its axes
    "v": lambda facts, tensor: facts.value(tensor),  # its value
    "n": lambda facts, tensor: numbers(facts.value(tensor)),  # its value, in plain numbers
    "s": shape_in,  # the shape that is its value
    "e": entry_of,  # its only entry
    "i": number_in,  # its only entry, a plain number
}


def lengths_of(needs: str, types: str) -> Callable[[Any], Any]:
    """Enter a function for these types of operations.

    Args:
        needs: For each input that the function gets a letter of `NEEDS`. If one of these is not
            known, the lengths are not known either. Capital letters mark those that may be unknown.
        types: The types, with spaces between them.
    """

    def enter(function: Any) -> Any:
        def lengths(op: Operation, facts: Facts) -> Lengths:
            given = []
            for letter, tensor in zip(needs, op.inputs, strict=False):
                given.append(NEEDS[letter.lower()](facts, tensor))
                if given[-1] is None and letter.islower():
                    return None
            found: Lengths = function(op, *given)
            return found

        LENGTHS.update(dict.fromkeys(types.split(), lengths))
        return function

    return enter


def lengths_by_axes(op: Operation, facts: Facts) -> Lengths:
    axes = AXES[op.type](op, facts)
    if axes is None:
        return None
    sizes = sizes_of(op, facts, axes)
    labels = [each for each in axes.out if each is not ...]
    found = [each.length if isinstance(each, New) else sizes[each] for each in labels]
    return [found] * len(op.outputs) if len(labels) == len(axes.out) else first_lengths(op, found)


LENGTHS.update(dict.fromkeys(AXES, lengths_by_axes))

# The first input has the lengths of the output.
SAME_AS_FIRST = (
    "EnsureShape LRN LRNGrad DrawBoundingBoxes DrawBoundingBoxesV2 StatelessShuffle RandomShuffle "
    "ReadVariableOp"
)
# The first input is the shape of the output.
SHAPED = (
    "AvgPoolGrad AvgPool3DGrad Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput Fill Empty "
    "StridedSliceGrad RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt "
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2 "
    "StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomUniform "
    "StatelessRandomNormal StatelessRandomUniformInt StatelessTruncatedNormal "
    "StatelessRandomBinomial StatelessRandomGammaV3 StatelessRandomGammaV2"
)


def first_lengths(op: Operation, dims: Sequence[Any]) -> Lengths:
    """These lengths of the first axes of all outputs, with unknown ones for the others."""
    return [padded(dims, tensor.shape.rank) for tensor in op.outputs]


def padded(dims: Sequence[Any], rank: int | None) -> Dims:
    return None if rank is None else [*dims, *[None] * (rank - len(dims))][:rank]


def first_axis(op: Operation, dims: Any) -> Lengths:
    return first_lengths(op, dims[:1]) if dims else None


# Types of operations, what a function needs of each input, and the function. Later lines replace
# earlier ones.
TABLE: list[tuple[str, str, Callable[..., Lengths]]] = [
    (" ".join(kind for kind, places in EXAMPLES.items() if 0 in places), "d", first_axis),
    ("FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient", "d", first_axis),
    ("CropAndResize", "-d", lambda op, _, dims: first_axis(op, dims)),
    (SAME_AS_FIRST, "d", lambda op, dims: [dims]),
    (
        "SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits",
        "d",
        lambda op, dims: [dims[:1], dims],
    ),
    (
        "SparseTensorDenseMatMul",
        "--sd",
        lambda op, _, __, a, b: [[a[op.get_attr("adjoint_a")], b[1 - op.get_attr("adjoint_b")]]],
    ),
    (
        "Tile",
        "dv",
        lambda op, dims, times: [
            [None if None in (dim, n) else dim * n for dim, n in zip(dims, times, strict=True)]
        ],
    ),
    (SHAPED, "s", lambda op, shape: [shape]),
    (
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter "
        "BroadcastTo",
        "-s",
        lambda op, _, shape: [shape],
    ),
    ("ScatterNd", "--s", lambda op, _, __, shape: [shape]),
    (
        "Conv2DBackpropInput",
        "s-D",
        # TensorFlow also takes only the height and the width.
        lambda op, shape, _, rows: [shape if len(shape) == 4 or not rows else padded(rows[:1], 4)],
    ),
]
for _types, _needs, _function in TABLE:
    lengths_of(_needs, _types)(_function)


@lengths_of("dD", "Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D AvgPool AvgPool3D")
def windows(op: Operation, dims: Any, kernel: Any = None) -> Lengths:
    """Convolutions and pooling, whose windows move along the axes of space."""
    is_pool = "Pool" in op.type
    if kernel is None and not is_pool:
        return None
    channels = 1 if op.get_attr("data_format").startswith(b"NC") else len(dims) - 1
    space = [axis for axis in range(1, len(dims)) if axis != channels]
    found = padded(dims[:1], len(dims)) or []
    strides, padding = op.get_attr("strides"), op.get_attr("padding")
    for place, axis in enumerate(space):
        size = op.get_attr("ksize")[axis] if is_pool else kernel[place]
        dilation = 1 if is_pool else op.get_attr("dilations")[axis]
        if isinstance(dims[axis], int) and isinstance(size, int) and padding != b"EXPLICIT":
            lost = (size - 1) * dilation if padding == b"VALID" else 0
            found[axis] = -((lost - dims[axis]) // strides[axis])
    if is_pool:
        found[channels] = dims[channels]
    elif op.type != "DepthwiseConv2dNative":
        found[channels] = kernel[-1]
    elif None not in kernel[-2:]:
        found[channels] = kernel[-1] * kernel[-2]
    return [found]


@lengths_of("Dv", "Reshape")
def reshape(op: Operation, dims: Any, value: Any) -> Lengths:
    found: list[AnySize | None] = list(value)
    open_axes = [place for place, entry in enumerate(found) if is_number(entry) and entry == -1]
    if open_axes:
        rest = [entry for place, entry in enumerate(found) if place != open_axes[0]]
        found[open_axes[0]] = None if dims is None else open_length(dims, rest)
    return [found]


def open_length(dims: Sequence[Any], rest: Sequence[Any]) -> AnySize | None:
    """The length of the axis that a reshape leaves open, given the others."""
    before, after = list(dims), list(rest)
    if None in before or None in after:
        # An unknown length may be on both sides.
        for entry in rest:
            if entry is not None and entry in before:
                before.remove(entry)
                after.remove(entry)
    if None in before or None in after:
        return None
    return quotient(product(before), product(after))


@lengths_of("dD", "CudnnRNNV3")
def cudnn_rnn(op: Operation, dims: Any, state: Any) -> Lengths:
    # An output for each step of each example. Nobody needs to know how much cuDNN reserves.
    unknown: Dims = None
    out = [*dims[:2], state[-1] if state else None]
    cell = state if op.get_attr("rnn_mode") == b"lstm" else []
    return [out, state, cell, unknown, unknown]


@lengths_of("dDDd", "CudnnRNNBackpropV3")
def cudnn_rnn_gradient(op: Operation, *dims: Any) -> Lengths:
    return list(dims)


def identity_n(op: Operation, facts: Facts) -> Lengths:
    return [facts.dims(tensor) for tensor in op.inputs]


LENGTHS["IdentityN"] = identity_n


def concat(op: Operation, facts: Facts) -> Lengths:
    axis = number_in(facts, op.inputs[-1])
    parts: list[Any] = [facts.dims(tensor) for tensor in op.inputs[:-1]]
    if axis is None or None in parts:
        return None
    found = [
        next((entry for entry in entries if entry is not None), None)
        for entries in zip(*parts, strict=True)
    ]
    along = [dims[axis] for dims in parts]
    found[axis] = None if None in along else sum(along)
    return [found]


LENGTHS["ConcatV2"] = concat


@lengths_of("id", "Split")
def split(op: Operation, axis: int, dims: Any) -> Lengths:
    found = list(dims)
    if found[axis] is not None:
        found[axis] = quotient(found[axis], len(op.outputs))
    return [found] * len(op.outputs)


@lengths_of("dsi", "SplitV")
def split_to_sizes(op: Operation, dims: Any, parts: Any, axis: int) -> Lengths:
    place = axis % len(dims)
    return [[*dims[:place], part, *dims[place + 1 :]] for part in parts]


@lengths_of("dVv", "Slice")
def slice_(op: Operation, dims: Any, begin: Any, length: Any) -> Lengths:
    found: list[AnySize | None] = []
    for place, entry in enumerate(length):
        if is_number(entry) and entry < 0:
            first = None if begin is None else begin[place]
            entry = None if dims[place] is None or first is None else dims[place] - first
        found.append(entry)
    return [found]


def is_between(size: Any, most: Any) -> bool:
    """Whether a size is between 0 and another in every batch."""
    return lower_bound(size) >= 0 and lower_bound(most - size) >= 0


def lower_bound(size: Any) -> int:
    """A lower bound of a size, as each name in it is at least 1; negative if there is none."""
    if is_number(size):
        return int(size)
    if any(coefficient < 0 for names, coefficient in size.terms if names):
        return -1
    return sum(coefficient for _, coefficient in size.terms)


def strided_slice(op: Operation, facts: Facts) -> Lengths:
    dims: Any = facts.dims(op.inputs[0])
    entries = None if dims is None else entries_of(op, facts, len(dims))
    if entries is None:
        return None
    return [
        [
            1 if entry.axis is None else taken(entry, dims[entry.axis])
            for entry in entries
            if not entry.shrinks
        ]
    ]


def taken(entry: Entry, dim: AnySize | None) -> AnySize | None:
    """The length that a slice takes of an axis of this length.

    TensorFlow allows bounds beyond the axis. Then the length is known only if all are numbers.
    """
    begin, end = entry.bounds(dim)
    if entry.takes_all or (begin == 0 and end == dim):
        return dim
    if isinstance(begin, int) and isinstance(end, int) and isinstance(dim, int):
        return max(0, end - begin)
    if begin is None or end is None or dim is None:
        return None
    is_inside = is_between(begin, end) and is_between(end, dim)
    return end - begin if is_inside else None


LENGTHS["StridedSlice"] = strided_slice


@lengths_of("dnv", "SpaceToBatchND BatchToSpaceND")
def space_and_batch(op: Operation, dims: Any, block: Any, edges: Any) -> Lengths:
    if None in dims or None in edges:
        return None
    to_batch, times, found = op.type == "SpaceToBatchND", int(np.prod(block)), list(dims)
    found[0] = dims[0] * times if to_batch else quotient(dims[0], times)
    for axis, (n, (before, after)) in enumerate(zip(block, edges, strict=True), 1):
        if to_batch:
            found[axis] = quotient(dims[axis] + before + after, int(n))
        else:
            found[axis] = dims[axis] * int(n) - before - after
    return [found]


@lengths_of("dv", "Pad PadV2 MirrorPad MirrorPadGrad")
def pad(op: Operation, dims: Any, pads: Any) -> Lengths:
    sign = -1 if op.type == "MirrorPadGrad" else 1
    return [
        [
            None if None in (dim, before, after) else dim + sign * (before + after)
            for dim, (before, after) in zip(dims, pads, strict=True)
        ]
    ]


@lengths_of("eee", "Range")
def range_(op: Operation, start: Any, limit: Any, delta: Any) -> Lengths:
    if lower_bound(limit - start) < 0 or lower_bound(delta) < 1:
        return None
    # None if the last step is shorter than the others.
    return [[quotient(limit - start, delta)]]
