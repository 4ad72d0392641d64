"""The lengths of the axes of an operation's outputs, where TensorFlow knows no number.

The outputs of operations that are not listed here have unknown lengths, so operations on these need
whole tensors.

It would not be enough to run TensorFlow's own shape functions for batches of two sizes: `x[:3]` may
have three rows both times, but has two for a batch of two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.families import (
    BROADCASTING,
    EXAMPLES,
    LIST_WRITES,
    SAME_SHAPES,
    UNARY,
    table,
)
from keras_multigpu.partition.sizes import AnySize, is_number, product, quotient
from keras_multigpu.partition.slices import Entry, entries_of
from keras_multigpu.partition.values import broadcast_dim, broadcast_dims, numbers

Dims = list[AnySize | None] | None
Lengths = Sequence[Dims] | None
LENGTHS: dict[str, Callable[[tf.Operation, Any], Lengths]] = {}
"""A function for each type of operation: the lengths of the axes of its outputs."""


def shape_in(facts: Any, tensor: tf.Tensor) -> Dims:
    value = facts.value(tensor)
    if value is None or np.ndim(value) != 1:
        return None
    return [None if is_number(entry) and entry < 0 else entry for entry in value]


def entry_in(facts: Any, tensor: tf.Tensor) -> AnySize | None:
    value = facts.value(tensor)
    return None if value is None else value.ravel()[0]


def number_in(facts: Any, tensor: tf.Tensor) -> int | None:
    entry = entry_in(facts, tensor)
    return int(entry) if is_number(entry) else None  # type: ignore[arg-type]


# What a function needs of an input.
NEEDS: dict[str, Callable[[Any, tf.Tensor], Any]] = {
    "-": lambda facts, tensor: (),  # nothing
    "d": lambda facts, tensor: facts.dims(tensor),  # the lengths of its axes
    "v": lambda facts, tensor: facts.value(tensor),  # its value
    "n": lambda facts, tensor: numbers(facts.value(tensor)),  # its value, in plain numbers
    "s": shape_in,  # the shape that is its value
    "e": entry_in,  # its only entry
    "i": number_in,  # its only entry, a plain number
}


def lengths_of(needs: str, types: str) -> Callable[[Any], Any]:
    """Enter a function for these types of operations.

    Args:
        needs: For each input a letter of `NEEDS`; with a star after it, for any number of inputs.
            If one of these is not known, the lengths are not known either. Capital letters mark
            those that may be unknown.
        types: The types, with spaces between them.
    """

    def enter(function: Any) -> Any:
        def lengths(op: tf.Operation, facts: Any) -> Lengths:
            letters = needs
            if "*" in needs:
                before, _, after = needs.partition("*")
                count = len(op.inputs) - len(before) - len(after) + 1
                letters = before[:-1] + before[-1] * count + after
            given = []
            for letter, tensor in zip(letters, op.inputs, strict=False):
                given.append(NEEDS[letter.lower()](facts, tensor))
                if given[-1] is None and letter.islower():
                    return None
            found: Lengths = function(op, *given)
            return found

        LENGTHS.update(dict.fromkeys(types.split(), lengths))
        return function

    return enter


SAME_AS: dict[str, int] = table(
    {
        "Softmax LogSoftmax Cumsum Cumprod CumulativeLogsumexp ReverseV2 ReverseSequence Roll": 0,
        "Cholesky CholeskyGrad MatrixBandPart MatrixInverse MatrixLogarithm MatrixSquareRoot": 0,
        "MatrixSetDiagV3 FFT IFFT FFT2D IFFT2D FFT3D IFFT3D BiasAdd LRN LRNGrad EnsureShape": 0,
        "FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel AdjustHue AdjustSaturation": 0,
        "AdjustContrastv2 RGBToHSV HSVToRGB DrawBoundingBoxes DrawBoundingBoxesV2 Cross": 0,
        "TensorScatterAdd TensorScatterSub TensorScatterUpdate TensorScatterMax": 0,
        "TensorScatterMin StatelessShuffle RandomShuffle ReadVariableOp": 0,
        " ".join([*UNARY, *SAME_SHAPES]): 0,
        "Select LookupTableFindV2 InTopK InTopKV2": 1,
        "MatrixSolve MatrixTriangularSolve LowerBound UpperBound": 1,
    }
)
"""The input with the lengths of the output."""
# The first input is the shape of the output.
SHAPED = (
    "AvgPoolGrad AvgPool3DGrad Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput Fill Empty "
    "StridedSliceGrad RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt "
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2 "
    "StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomUniform "
    "StatelessRandomNormal StatelessRandomUniformInt StatelessTruncatedNormal "
    "StatelessRandomBinomial StatelessRandomGammaV3 StatelessRandomGammaV2"
)


def first_lengths(op: tf.Operation, dims: Sequence[Any]) -> Lengths:
    """These lengths of the first axes of all outputs, with unknown ones for the others."""
    return [padded(dims, tensor.shape.rank) for tensor in op.outputs]


def padded(dims: Sequence[Any], rank: int | None) -> Dims:
    return None if rank is None else [*dims, *[None] * (rank - len(dims))][:rank]


def insert(dims: Sequence[Any], axis: int, dim: Any) -> list[Any]:
    """The lengths with a new axis at this place."""
    place = axis % (len(dims) + 1)
    return [*dims[:place], dim, *dims[place:]]


def first_axis(op: tf.Operation, dims: Any) -> Lengths:
    return first_lengths(op, dims[:1]) if dims else None


# Types of operations, what a function needs of each input, and the function. Later lines replace
# earlier ones.
TABLE: list[tuple[str, str, Callable[..., Lengths]]] = [
    (" ".join(kind for kind, places in EXAMPLES.items() if 0 in places), "d", first_axis),
    ("FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient", "d", first_axis),
    ("NthElement LogMatrixDeterminant", "d", first_axis),
    ("ResourceGatherNd CropAndResize", "-d", lambda op, _, dims: first_axis(op, dims)),
    (" ".join(SAME_AS), "D*", lambda op, *dims: [dims[SAME_AS[op.type]]]),
    ("IdentityN", "D*", lambda op, *dims: dims),
    ("Bitcast", "d", first_lengths),
    (" ".join(BROADCASTING), "d*", lambda op, *dims: [broadcast_dims([*dims])]),
    (
        "SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits",
        "d",
        lambda op, dims: [dims[:1], dims],
    ),
    (
        "BiasAddGrad",
        "d",
        lambda op, dims: [[dims[1 if op.get_attr("data_format") == b"NCHW" else -1]]],
    ),
    ("RFFT IRFFT", "d", lambda op, dims: first_lengths(op, dims[:-1])),
    (
        "RFFT2D RFFT3D IRFFT2D IRFFT3D Svd SelfAdjointEigV2 Qr Lu MatrixDeterminant",
        "d",
        lambda op, dims: first_lengths(op, dims[:-2]),
    ),
    ("TopKV2 TopK", "dE", lambda op, dims, count=None: [[*dims[:-1], count]] * 2),
    (
        "MatMul",
        "dd",
        lambda op, a, b: [[a[op.get_attr("transpose_a")], b[1 - op.get_attr("transpose_b")]]],
    ),
    (
        "SparseTensorDenseMatMul",
        "--sd",
        lambda op, _, __, a, b: [[a[op.get_attr("adjoint_a")], b[1 - op.get_attr("adjoint_b")]]],
    ),
    ("ExpandDims", "di", lambda op, dims, axis: [insert(dims, axis, 1)]),
    ("OneHot", "dE", lambda op, dims, depth: [insert(dims, op.get_attr("axis"), depth)]),
    (
        "Transpose ConjugateTranspose",
        "dn",
        lambda op, dims, order: [[dims[int(place)] for place in order]],
    ),
    (
        "Tile",
        "dv",
        lambda op, dims, times: [
            [None if None in (dim, n) else dim * n for dim, n in zip(dims, times, strict=True)]
        ],
    ),
    ("DenseBincount", "dE", lambda op, dims, size: [[*dims[:-1], size]]),
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
    (
        "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
        "ddE",
        lambda op, dims, places, count: [[count, *dims[len(places) :]]],
    ),
]
for _types, _needs, _function in TABLE:
    lengths_of(_needs, _types)(_function)


@lengths_of("dD", "Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D AvgPool AvgPool3D")
def windows(op: tf.Operation, dims: Any, kernel: Any = None) -> Lengths:
    """Convolutions and pooling, whose windows move along the axes of space."""
    pooled = "Pool" in op.type
    if kernel is None and not pooled:
        return None
    channels = 1 if op.get_attr("data_format").startswith(b"NC") else len(dims) - 1
    space = [axis for axis in range(1, len(dims)) if axis != channels]
    found = padded(dims[:1], len(dims)) or []
    strides, padding = op.get_attr("strides"), op.get_attr("padding")
    for place, axis in enumerate(space):
        size = op.get_attr("ksize")[axis] if pooled else kernel[place]
        wide = 1 if pooled else op.get_attr("dilations")[axis]
        if isinstance(dims[axis], int) and isinstance(size, int) and padding != b"EXPLICIT":
            lost = (size - 1) * wide if padding == b"VALID" else 0
            found[axis] = -((lost - dims[axis]) // strides[axis])
    if pooled:
        found[channels] = dims[channels]
    elif op.type != "DepthwiseConv2dNative":
        found[channels] = kernel[-1]
    elif None not in kernel[-2:]:
        found[channels] = kernel[-1] * kernel[-2]
    return [found]


@lengths_of("dd", "BatchMatMul BatchMatMulV2 BatchMatMulV3")
def batch_matmul(op: tf.Operation, one: Any, two: Any) -> Lengths:
    rows = one[-1 if op.get_attr("adj_x") else -2]
    columns = two[-2 if op.get_attr("adj_y") else -1]
    return [[*broadcast_dims([one[:-2], two[:-2]]), rows, columns]]


@lengths_of("d*", "Einsum")
def einsum(op: tf.Operation, *shapes: Any) -> Lengths:
    sizes, dotted = einsum_sizes(op, shapes)
    before, dots, after = op.get_attr("equation").decode().split("->")[1].strip().partition("...")
    middle = dotted if dots else []
    return [[*(sizes[each] for each in before), *middle, *(sizes[each] for each in after)]]


def einsum_sizes(op: tf.Operation, shapes: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The length of each labelled axis, and those of the axes that the dots stand for."""
    found: dict[str, list[Any]] = {}
    dotted: list[list[Any]] = [[]]
    terms = op.get_attr("equation").decode().replace(" ", "").split("->")[0].split(",")
    for term, dims in zip(terms, shapes, strict=True):
        before, _, after = term.partition("...")
        first, last = len(before), len(dims) - len(after)
        dotted.append(dims[first:last])
        for label, dim in zip([*before, *after], [*dims[:first], *dims[last:]], strict=True):
            found.setdefault(label, []).append(dim)
    return {label: broadcast_dim(dims) for label, dims in found.items()}, broadcast_dims(dotted)


@lengths_of("Dv", "Reshape")
def reshape(op: tf.Operation, dims: Any, value: Any) -> Lengths:
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


@lengths_of("d", "Squeeze")
def squeeze(op: tf.Operation, dims: Any) -> Lengths:
    gone = {axis % len(dims) for axis in op.get_attr("squeeze_dims")}
    return [[dim for place, dim in enumerate(dims) if place not in gone]] if gone else None


@lengths_of("d*", "Pack")
def pack(op: tf.Operation, *found: Any) -> Lengths:
    dims = [
        entries[0] if all(e == entries[0] for e in entries) else None
        for entries in zip(*found, strict=True)
    ]
    return [insert(dims, op.get_attr("axis"), len(found))]


@lengths_of("d", "Unpack")
def unpack(op: tf.Operation, dims: Any) -> Lengths:
    axis = op.get_attr("axis") % len(dims)
    return [[*dims[:axis], *dims[axis + 1 :]]] * len(op.outputs)


@lengths_of("d*i", "ConcatV2")
def concat(op: tf.Operation, *found: Any) -> Lengths:
    *parts, axis = found
    result = [
        next((entry for entry in entries if entry is not None), None)
        for entries in zip(*parts, strict=True)
    ]
    along = [dims[axis] for dims in parts]
    result[axis] = None if None in along else sum(along)
    return [result]


@lengths_of("id", "Split")
def split(op: tf.Operation, axis: int, dims: Any) -> Lengths:
    found = list(dims)
    if found[axis] is not None:
        found[axis] = quotient(found[axis], len(op.outputs))
    return [found] * len(op.outputs)


@lengths_of("dsi", "SplitV")
def split_to_sizes(op: tf.Operation, dims: Any, parts: Any, axis: int) -> Lengths:
    place = axis % len(dims)
    return [[*dims[:place], part, *dims[place + 1 :]] for part in parts]


@lengths_of("dVv", "Slice")
def cut(op: tf.Operation, dims: Any, begin: Any, length: Any) -> Lengths:
    found: list[AnySize | None] = []
    for place, entry in enumerate(length):
        if is_number(entry) and entry < 0:
            first = None if begin is None else begin[place]
            entry = None if dims[place] is None or first is None else dims[place] - first
        found.append(entry)
    return [found]


def sure_between(size: Any, most: Any) -> bool:
    """Whether a size is surely between 0 and another."""
    return smallest(size) >= 0 and smallest(most - size) >= 0


def smallest(size: Any) -> int:
    """A lower bound of a size, as each name in it is at least 1; negative if there is none."""
    if is_number(size):
        return int(size)
    if any(coefficient < 0 for names, coefficient in size.terms if names):
        return -1
    return sum(coefficient for _, coefficient in size.terms)


def strided_slice(op: tf.Operation, facts: Any) -> Lengths:
    dims = facts.dims(op.inputs[0])
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
    sure = sure_between(begin, dim) and sure_between(end, dim) and sure_between(begin, end)
    return end - begin if sure else None


LENGTHS["StridedSlice"] = strided_slice


@lengths_of("dNNN", "MatrixDiagPartV3 MatrixDiagV3")
def diagonal(op: tf.Operation, dims: Any, *sizes: Any) -> Lengths:
    # The axes before those of the matrices, or of the diagonals.
    one = op.type == "MatrixDiagV3" and op.inputs[1].shape.rank == 0
    front = dims[: -1 if one else -2]
    if one and list(sizes) == [0, -1, -1]:
        return [[*front, dims[-1], dims[-1]]]
    return first_lengths(op, front)


@lengths_of("dnv", "SpaceToBatchND BatchToSpaceND")
def space_and_batch(op: tf.Operation, dims: Any, block: Any, edges: Any) -> Lengths:
    if None in dims or None in edges:
        return None
    there, times, found = op.type == "SpaceToBatchND", int(np.prod(block)), list(dims)
    found[0] = dims[0] * times if there else quotient(dims[0], times)
    for axis, (n, (before, after)) in enumerate(zip(block, edges, strict=True), 1):
        if there:
            found[axis] = quotient(dims[axis] + before + after, int(n))
        else:
            found[axis] = dims[axis] * int(n) - before - after
    return [found]


@lengths_of("dv", "Pad PadV2 MirrorPad MirrorPadGrad")
def pad(op: tf.Operation, dims: Any, pads: Any) -> Lengths:
    sign = -1 if op.type == "MirrorPadGrad" else 1
    return [
        [
            None if None in (dim, before, after) else dim + sign * (before + after)
            for dim, (before, after) in zip(dims, pads, strict=True)
        ]
    ]


@lengths_of("eee", "Range")
def ranged(op: tf.Operation, start: Any, limit: Any, delta: Any) -> Lengths:
    if smallest(limit - start) < 0 or smallest(delta) < 1:
        return None
    # None if the last step is shorter than the others.
    return [[quotient(limit - start, delta)]]


@lengths_of("dn", "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm")
def reduced(op: tf.Operation, dims: Any, axes: Any) -> Lengths:
    over = {int(axis) % max(len(dims), 1) for axis in np.ravel(axes)}
    kept = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
    return [[1 if at in over else dim for at, dim in enumerate(dims) if kept or at not in over]]


@lengths_of("ddi", "GatherV2")
@lengths_of("dd", "ResourceGather")
def gather(op: tf.Operation, dims: Any, places: Any, axis: int = 0) -> Lengths:
    at, batch = axis % len(dims), op.get_attr("batch_dims")
    batch = batch % len(places) if batch < 0 else batch
    return [[*dims[:at], *places[batch:], *dims[at + 1 :]]]


@lengths_of("dd", "GatherNd")
def gather_nd(op: tf.Operation, dims: Any, places: Any) -> Lengths:
    if not places or not is_number(places[-1]):
        return None
    return [[*places[:-1], *dims[int(places[-1]) :]]]


NOTHING = "nothing"
"""The value of the elements of a list before the first is written."""


@dataclass(frozen=True)
class Elements:
    """What is known of all elements of a list of tensors.

    Args:
        dims: The lengths of their axes; None if these are not known.
        value: The shape and the entries of their value if all have the same; otherwise None.
        count: How many there are; None if that is not known.
        dtype: Their type.
    """

    dims: tuple[Any, ...] | None = None
    value: Any = NOTHING
    count: Any = None
    dtype: tf.DType | None = None

    def joined(self, other: "Elements") -> "Elements":
        """What is known of a list that is either of two."""
        count = self.count if self.count == other.count else None
        for one, two in ((self, other), (other, self)):
            if one.value == NOTHING:
                dims = one.dims if two.dims is None else two.dims
                return Elements(dims, two.value, count, one.dtype or two.dtype)
        pairs = zip(self.dims or (), other.dims or (), strict=False)
        alike = self.dims is not None and len(self.dims) == len(other.dims or ())
        dims = tuple(a if a == b else None for a, b in pairs) if alike else None
        value = self.value if self.value == other.value else None
        return Elements(dims, value, count, self.dtype or other.dtype)


def elements_after(op: tf.Operation, facts: Any) -> None:
    """Note what is known of the elements of the lists that an operation returns."""
    if not any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs)):
        return
    have = facts.elements.get(op.inputs[0].name) if op.inputs else None
    found: Elements | None = None
    if op.type == "TensorListFromTensor":
        dims = facts.dims(op.inputs[0])
        found = (
            None if dims is None else Elements(tuple(dims[1:]), None, dims[0], op.inputs[0].dtype)
        )
    elif op.type in ("TensorListReserve", "EmptyTensorList"):
        shape, count = shape_in(facts, op.inputs[0]), facts.value(op.inputs[1])
        reserved = op.type == "TensorListReserve" and count is not None
        found = Elements(
            None if shape is None or None in shape else tuple(shape),
            count=count[()] if reserved and count is not None else None,
            dtype=op.get_attr("element_dtype"),
        )
    elif op.type in LIST_WRITES and have is not None:
        item = op.inputs[LIST_WRITES[op.type]]
        dims, value = facts.dims(item), facts.value(item)
        count = have.count if op.type == "TensorListSetItem" else None
        found = have.joined(
            Elements(
                None if dims is None else tuple(dims),
                None if value is None else (np.shape(value), tuple(np.ravel(value))),
                have.count,
            )
        )
        found = Elements(found.dims, found.value, count, item.dtype)
    elif op.type in ("Identity", "TensorListPopBack", "TensorListResize", "ZerosLike"):
        found = have
        if have is not None and op.type == "ZerosLike":
            found = Elements(have.dims, None, have.count, have.dtype)
    if found is not None and op.outputs[0].dtype == tf.variant:
        facts.elements[op.outputs[0].name] = found
    if have is None:
        return
    reads = ("TensorListGetItem", "TensorListPopBack", "TensorListStack")
    if op.type in reads and have.dims is not None:
        stacked = [have.count] if op.type == "TensorListStack" else []
        facts.note(op.outputs[-1], [*stacked, *have.dims])
    if op.type == "TensorListPopBack" and have.value not in (None, NOTHING):
        shape, entries = have.value
        array = np.empty(len(entries), object)
        array[:] = entries
        facts.note_value(op.outputs[1], array.reshape(shape))
    if op.type == "TensorListElementShape" and have.dims is not None:
        facts.note_value(op.outputs[0], np.array(have.dims, object))
