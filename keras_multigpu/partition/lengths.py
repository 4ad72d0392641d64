"""How long the axes of an operation's outputs are, where TensorFlow knows no number.

Operations that are not named here have outputs of unknown lengths, and so take whole tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.families import BROADCASTING, EXAMPLES, SAME_SHAPES, UNARY
from keras_multigpu.partition.sizes import AnySize, is_number, product, quotient
from keras_multigpu.partition.slices import Entry, entries_of
from keras_multigpu.partition.values import broadcast_dim, broadcast_dims, numbers

Dims = list[AnySize | None] | None
LENGTHS: dict[str, Callable[[tf.Operation, Any], Sequence[Dims] | None]] = {}
"""The lengths of an operation's outputs, by its type."""


def lengths_of(*types: str) -> Callable[[Any], Any]:
    """Enter what says it of these types: of several in one text, or of one each."""

    def enter(function: Any) -> Any:
        LENGTHS.update(dict.fromkeys(" ".join(types).split(), function))
        return function

    return enter


@lengths_of(
    "NthElement LogMatrixDeterminant ResourceGatherNd FakeQuantWithMinMaxVarsGradient "
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    *EXAMPLES,
)
def first_axis(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    """Only the first axis is that of an input: others of these types are below."""
    place = 1 if op.type == "ResourceGatherNd" else EXAMPLES.get(op.type, (0,))[0]
    dims, rank = facts.dims(op.inputs[place]), op.outputs[0].shape.rank
    if not dims or not rank:
        return None
    return [[dims[0], *[None] * (rank - 1)]] * len(op.outputs)


@lengths_of(
    "Softmax LogSoftmax Cumsum Cumprod CumulativeLogsumexp ReverseV2 ReverseSequence Roll Cross "
    "Cholesky CholeskyGrad MatrixBandPart MatrixInverse MatrixLogarithm MatrixSquareRoot "
    "MatrixSetDiagV3 FFT IFFT FFT2D IFFT2D FFT3D IFFT3D BiasAdd LRN LRNGrad EnsureShape "
    "FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel AdjustHue AdjustSaturation "
    "AdjustContrastv2 RGBToHSV HSVToRGB DrawBoundingBoxes DrawBoundingBoxesV2 TensorScatterAdd "
    "TensorScatterSub TensorScatterUpdate TensorScatterMax TensorScatterMin StatelessShuffle "
    "RandomShuffle ReadVariableOp",
    *UNARY,
    *SAME_SHAPES,
)
def as_first(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [facts.dims(op.inputs[0])]


@lengths_of("Bitcast")
def bitcast(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, rank = facts.dims(op.inputs[0]), op.outputs[0].shape.rank
    return None if dims is None or rank is None else [[*dims, None][:rank]]


@lengths_of("IdentityN")
def each_its_own(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [facts.dims(tensor) for tensor in op.inputs]


@lengths_of(*BROADCASTING)
def broadcast(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = [facts.dims(tensor) for tensor in op.inputs]
    return None if any(own is None for own in dims) else [broadcast_dims(dims)]


@lengths_of("Select")
def select(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [facts.dims(op.inputs[1])]


@lengths_of("Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D AvgPool AvgPool3D")
def windows(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    """What a window finds that moves over the axes of space."""
    dims, pooled = facts.dims(op.inputs[0]), "Pool" in op.type
    kernel: Any = None if pooled else facts.dims(op.inputs[1])
    if dims is None or (kernel is None and not pooled):
        return None
    channels = 1 if op.get_attr("data_format").startswith(b"NC") else len(dims) - 1
    space = [axis for axis in range(1, len(dims)) if axis != channels]
    found: list[AnySize | None] = [dims[0], *[None] * (len(dims) - 1)]
    strides, padding = op.get_attr("strides"), op.get_attr("padding")
    for place, axis in enumerate(space):
        size = op.get_attr("ksize")[axis] if pooled else kernel[place]
        wide = 1 if pooled else op.get_attr("dilations")[axis]
        if isinstance(dims[axis], int) and isinstance(size, int) and padding != b"EXPLICIT":
            lost = (size - 1) * wide if padding == b"VALID" else 0
            found[axis] = -((lost - dims[axis]) // strides[axis])
    if pooled:
        found[channels] = dims[channels]
    elif kernel[-1] is not None:
        found[channels] = kernel[-1]
        if op.type == "DepthwiseConv2dNative":
            found[channels] = None if kernel[-2] is None else kernel[-1] * kernel[-2]
    return [found]


@lengths_of("SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = facts.dims(op.inputs[0])
    return None if dims is None else [dims[:1], dims]


@lengths_of("BiasAddGrad")
def bias_gradient(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = facts.dims(op.inputs[0])
    if dims is None:
        return None
    return [[dims[1 if op.get_attr("data_format") == b"NCHW" else -1]]]


@lengths_of("LookupTableFindV2")
def lookup(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [facts.dims(op.inputs[1])]


@lengths_of("RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D Svd SelfAdjointEigV2 Qr Lu MatrixDeterminant")
def leading_axes(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = facts.dims(op.inputs[0])
    if dims is None:
        return None
    kept = len(dims) - (1 if op.type in ("RFFT", "IRFFT") else 2)
    found: list[Dims] = []
    for tensor in op.outputs:
        rank = tensor.shape.rank
        found.append(None if rank is None else [*dims[:kept], *[None] * (rank - kept)][:rank])
    return found


@lengths_of("TopKV2 TopK InTopKV2 InTopK")
def top(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    if op.type.startswith("In"):
        return [facts.dims(op.inputs[1])]
    dims = facts.dims(op.inputs[0])
    if dims is None:
        return None
    count = facts.value(op.inputs[1]) if op.type == "TopKV2" else None
    return [[*dims[:-1], None if count is None else count[()]]] * 2


@lengths_of("MatrixSolve MatrixTriangularSolve LowerBound UpperBound")
def solved(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [facts.dims(op.inputs[1])]


@lengths_of("MatMul")
def matmul(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    one, two = (facts.dims(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    return [[one[op.get_attr("transpose_a")], two[1 - op.get_attr("transpose_b")]]]


@lengths_of("SparseTensorDenseMatMul")
def sparse_matmul(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    one, two = facts.value(op.inputs[2]), facts.dims(op.inputs[3])
    if one is None or two is None:
        return None
    turned = op.get_attr("adjoint_a"), op.get_attr("adjoint_b")
    return [[one[1 if turned[0] else 0], two[0 if turned[1] else 1]]]


@lengths_of("BatchMatMul BatchMatMulV2 BatchMatMulV3")
def batch_matmul(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    one, two = (facts.dims(tensor) for tensor in op.inputs)
    if one is None or two is None:
        return None
    rows, columns = (
        one[-1 if op.get_attr("adj_x") else -2],
        two[-2 if op.get_attr("adj_y") else -1],
    )
    return [[*broadcast_dims([one[:-2], two[:-2]]), rows, columns]]


@lengths_of("Einsum")
def einsum(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    shapes = [facts.dims(tensor) for tensor in op.inputs]
    if any(dims is None for dims in shapes):
        return None
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


def shaped(facts: Any, tensor: tf.Tensor) -> Dims:
    """The dims that a tensor gives as a shape."""
    value = facts.value(tensor)
    if value is None or np.ndim(value) != 1:
        return None
    return [None if is_number(entry) and entry < 0 else entry for entry in value]


@lengths_of("Reshape")
def reshape(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    value, dims = facts.value(op.inputs[1]), facts.dims(op.inputs[0])
    if value is None:
        return None
    found: list[AnySize | None] = list(value)
    open_axes = [place for place, entry in enumerate(found) if is_number(entry) and entry == -1]
    if open_axes:
        rest = [entry for place, entry in enumerate(found) if place != open_axes[0]]
        found[open_axes[0]] = None
        if dims is not None and None not in dims and None not in rest:
            found[open_axes[0]] = quotient(product(dims), product(rest))  # type: ignore[arg-type]
        elif dims is not None:
            # What is unknown is on both sides.
            before, after = list(dims), list(rest)
            for entry in rest:
                if entry in before and entry is not None:
                    before.remove(entry)
                    after.remove(entry)
            if None not in before and None not in after:
                found[open_axes[0]] = quotient(product(before), product(after))  # type: ignore[arg-type]
    return [found]


@lengths_of("ExpandDims")
def expand(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, axis = facts.dims(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    if dims is None or axis is None:
        return None
    place = int(np.ravel(axis)[0]) % (len(dims) + 1)
    return [[*dims[:place], 1, *dims[place:]]]


@lengths_of("Squeeze")
def squeeze(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, axes = facts.dims(op.inputs[0]), op.get_attr("squeeze_dims")
    if dims is None or not axes:
        return None
    gone = {axis % len(dims) for axis in axes}
    return [[dim for place, dim in enumerate(dims) if place not in gone]]


@lengths_of("Transpose ConjugateTranspose")
def transpose(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, order = facts.dims(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    return None if dims is None or order is None else [[dims[int(place)] for place in order]]


@lengths_of("Pack")
def pack(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    found = [facts.dims(tensor) for tensor in op.inputs]
    if any(dims is None for dims in found):
        return None
    dims = [
        entries[0] if all(e == entries[0] for e in entries) else None
        for entries in zip(*found, strict=True)
    ]
    place = op.get_attr("axis") % (len(dims) + 1)
    return [[*dims[:place], len(op.inputs), *dims[place:]]]


@lengths_of("Unpack")
def unpack(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = facts.dims(op.inputs[0])
    if dims is None:
        return None
    axis = op.get_attr("axis") % len(dims)
    return [[*dims[:axis], *dims[axis + 1 :]]] * len(op.outputs)


@lengths_of("ConcatV2")
def concat(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    found = [facts.dims(tensor) for tensor in op.inputs[:-1]]
    axis = numbers(facts.value(op.inputs[-1]))
    if axis is None or any(dims is None for dims in found):
        return None
    place = int(axis) % len(found[0])
    result: list[AnySize | None] = []
    for at, entries in enumerate(zip(*found, strict=True)):
        if at == place:
            result.append(None if None in entries else sum(entries))
        else:
            known = [entry for entry in entries if entry is not None]
            result.append(known[0] if known else None)
    return [result]


@lengths_of("Split")
def split(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, axis = facts.dims(op.inputs[1]), numbers(facts.value(op.inputs[0]))
    if dims is None or axis is None:
        return None
    place, found = int(axis) % len(dims), list(dims)
    if dims[place] is not None:
        found[place] = quotient(dims[place], len(op.outputs))
    return [found] * len(op.outputs)


@lengths_of("SplitV")
def split_to_sizes(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, parts, axis = (
        facts.dims(op.inputs[0]),
        facts.value(op.inputs[1]),
        numbers(facts.value(op.inputs[2])),
    )
    if dims is None or parts is None or axis is None:
        return None
    place = int(axis) % len(dims)
    lengths = [None if is_number(part) and part < 0 else part for part in parts]
    return [[*dims[:place], length, *dims[place + 1 :]] for length in lengths]


@lengths_of("Slice")
def cut(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims = facts.dims(op.inputs[0])
    begin, length = (facts.value(tensor) for tensor in op.inputs[1:])
    if dims is None or length is None:
        return None
    found: list[AnySize | None] = []
    for place, entry in enumerate(length):
        if is_number(entry) and entry < 0:
            first = None if begin is None else begin[place]
            known = dims[place] is not None and first is not None
            found.append(dims[place] - first if known else None)
        else:
            found.append(entry)
    return [found]


def sure_between(size: Any, most: Any) -> bool:
    """Whether a size is surely between 0 and another: each name is 1 at least."""
    if is_number(size) and is_number(most):
        return 0 <= size <= most
    gap = most - size
    return smallest(size) >= 0 and smallest(gap) >= 0


def smallest(size: Any) -> int:
    """A lower bound of a size; below zero where nothing is sure."""
    if is_number(size):
        return int(size)
    if any(coefficient < 0 for names, coefficient in size.terms if names):
        return -1
    return sum(coefficient for _, coefficient in size.terms)


@lengths_of("StridedSlice")
def strided_slice(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
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
    """How much of an axis of this length a slice takes.

    Bounds beyond the axis, as TensorFlow allows, are known only where all are numbers.
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


@lengths_of("Tile")
def tile(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, times = facts.dims(op.inputs[0]), facts.value(op.inputs[1])
    if dims is None or times is None:
        return None
    pairs = zip(dims, times, strict=True)
    return [[None if dim is None or n is None else dim * n for dim, n in pairs]]


@lengths_of("MatrixDiagPartV3 MatrixDiagV3")
def diagonal(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, rank = facts.dims(op.inputs[0]), op.outputs[0].shape.rank
    if dims is None or rank is None:
        return None
    # What is before the matrices, before a diagonal or a band of them.
    one = op.type == "MatrixDiagV3" and op.inputs[1].shape.rank == 0
    front = dims[: -1 if one else -2]
    if one and [numbers(facts.value(tensor)) for tensor in op.inputs[1:4]] == [0, -1, -1]:
        return [[*front, dims[-1], dims[-1]]]
    return [[*front, *[None] * (rank - len(front))]]


@lengths_of("DenseBincount")
def bincount(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, size = facts.dims(op.inputs[0]), facts.value(op.inputs[1])
    return None if dims is None else [[*dims[:-1], None if size is None else size[()]]]


@lengths_of("SpaceToBatchND BatchToSpaceND")
def space_and_batch(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, block = facts.dims(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    edges = facts.value(op.inputs[2])
    if dims is None or block is None or edges is None or None in dims or None in edges:
        return None
    there = op.type == "SpaceToBatchND"
    times = int(np.prod(block))
    found = list(dims)
    found[0] = dims[0] * times if there else quotient(dims[0], times)
    for axis, (n, (before, after)) in enumerate(zip(block, edges, strict=True), 1):
        if there:
            found[axis] = quotient(dims[axis] + before + after, int(n))
        else:
            found[axis] = dims[axis] * int(n) - before - after
    return [found]


@lengths_of("Pad PadV2 MirrorPad MirrorPadGrad")
def pad(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, pads = facts.dims(op.inputs[0]), facts.value(op.inputs[1])
    if dims is None or pads is None:
        return None
    sign = -1 if op.type == "MirrorPadGrad" else 1
    return [
        [
            None if dim is None or None in (before, after) else dim + sign * (before + after)
            for dim, (before, after) in zip(dims, pads, strict=True)
        ]
    ]


@lengths_of("BroadcastTo")
def broadcast_to(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [shaped(facts, op.inputs[1])]


@lengths_of(
    "AvgPoolGrad AvgPool3DGrad Conv3DBackpropInputV2 StridedSliceGrad "
    "DepthwiseConv2dNativeBackpropInput "
    "Fill Empty RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt "
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2 "
    "StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomUniform "
    "StatelessRandomNormal StatelessRandomUniformInt StatelessTruncatedNormal "
    "StatelessRandomGammaV3 StatelessRandomGammaV2 StatelessRandomBinomial"
)
def made(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [shaped(facts, op.inputs[0])]


@lengths_of("Conv2DBackpropInput")
def before_a_convolution(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    found, rows = shaped(facts, op.inputs[0]), facts.dims(op.inputs[2])
    if found is None or len(found) == 4 or rows is None:
        return [found]
    # TensorFlow takes height and width alone as well.
    return [[rows[0], None, None, None]]


@lengths_of("ScatterNd")
def scatter(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    return [shaped(facts, op.inputs[2])]


@lengths_of("Range")
def ranged(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    start, limit, delta = (facts.value(tensor) for tensor in op.inputs)
    if start is None or limit is None or delta is None:
        return None
    if start[()] is None or limit[()] is None or delta[()] is None:
        return None
    length = limit[()] - start[()]
    if smallest(length) < 0 or smallest(delta[()]) < 1:
        return None
    # Where it does not divide, the last step is shorter.
    return [[quotient(length, delta[()])]]


@lengths_of("OneHot")
def one_hot(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, depth = facts.dims(op.inputs[0]), facts.value(op.inputs[1])
    if dims is None:
        return None
    axis = op.get_attr("axis") % (len(dims) + 1)
    return [[*dims[:axis], None if depth is None else depth[()], *dims[axis:]]]


@lengths_of("Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm")
def reduced(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, axes = facts.dims(op.inputs[0]), numbers(facts.value(op.inputs[1]))
    if dims is None or axes is None:
        return None
    over = {int(axis) % max(len(dims), 1) for axis in np.ravel(axes)}
    kept = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
    return [[1 if at in over else dim for at, dim in enumerate(dims) if kept or at not in over]]


@lengths_of("GatherV2 ResourceGather")
def gather(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    places = facts.dims(op.inputs[1])
    if places is None:
        return None
    of_variable = op.type == "ResourceGather"
    dims, axis = facts.dims(op.inputs[0]), None if of_variable else facts.value(op.inputs[2])
    axis = np.array(0) if of_variable else numbers(axis)
    if dims is None or axis is None:
        return None
    at, batch = int(axis) % len(dims), op.get_attr("batch_dims")
    batch = batch % len(places) if batch < 0 else batch
    return [[*dims[:at], *places[batch:], *dims[at + 1 :]]]


@lengths_of("GatherNd")
def gather_nd(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, places = (facts.dims(tensor) for tensor in op.inputs)
    if dims is None or not places or not is_number(places[-1]):
        return None
    return [[*places[:-1], *dims[int(places[-1]) :]]]


@lengths_of("UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd")
def segments(op: tf.Operation, facts: Any) -> Sequence[Dims] | None:
    dims, places, count = (
        facts.dims(op.inputs[0]),
        facts.dims(op.inputs[1]),
        facts.value(op.inputs[2]),
    )
    if dims is None or places is None:
        return None
    return [[None if count is None else count[()], *dims[len(places) :]]]


# Lists of tensors: what is known of their elements.


NOTHING = "nothing"
"""The value of the elements of a list to which nothing has been written."""


@dataclass(frozen=True)
class Elements:
    """What is known of all elements of a list.

    Args:
        dims: The lengths of their axes; None where these are not known.
        value: Their value, its shape and its entries, where all have the same; else None.
        count: How many there are; None where that is not known.
        dtype: Their type.
    """

    dims: tuple[Any, ...] | None = None
    value: Any = NOTHING
    count: Any = None
    dtype: tf.DType | None = None

    def joined(self, other: "Elements") -> "Elements":
        """What is known of a list that is the one or the other."""
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


WRITTEN = {"TensorListSetItem": 2, "TensorListPushBack": 1}


def elements_after(op: tf.Operation, facts: Any) -> None:
    """Note what is known of the elements of lists after an operation."""
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
        shape, count = shaped(facts, op.inputs[0]), facts.value(op.inputs[1])
        reserved = op.type == "TensorListReserve" and count is not None
        found = Elements(
            None if shape is None or None in shape else tuple(shape),
            count=count[()] if reserved and count is not None else None,
            dtype=op.get_attr("element_dtype"),
        )
    elif op.type in WRITTEN and have is not None:
        item = op.inputs[WRITTEN[op.type]]
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
    if op.type in READ and have.dims is not None:
        stacked = [have.count] if op.type == "TensorListStack" else []
        facts.note(op.outputs[-1], [*stacked, *have.dims])
    if op.type == "TensorListPopBack" and have.value not in (None, NOTHING):
        shape, entries = have.value
        array = np.empty(len(entries), object)
        array[:] = entries
        facts.note_value(op.outputs[1], array.reshape(shape))
    if op.type == "TensorListElementShape" and have.dims is not None:
        facts.note_value(op.outputs[0], np.array(have.dims, object))


READ = ("TensorListGetItem", "TensorListPopBack", "TensorListStack")
