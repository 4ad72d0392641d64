"""`Axes`: which axes of an operation's inputs and results belong together, as labels in einsum.

    x @ y                      mk, kn -> mn
    tf.transpose(x)            01 -> 10
    tf.stack([x, y], axis=1)   01, 01 -> 0 new 1
    tf.nn.softmax(x)           01 -> 0 new

Along a labelled axis of its results, an operation does the same for every entry. So its `Axes` give
the lengths of its results (`lengths.py`), its rule (`rules/axes.py`), the rows of its inputs that a
replica needs for its rows of the results (`conversions.py`), and the arithmetic of a product
(`cost.py`).
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import (
    ALL,
    BOTH,
    BROADCASTING,
    FIRST,
    NONE,
    SAME_SHAPES,
    SECOND,
    UNARY,
    table,
)
from keras_multigpu.partition.facts.values import broadcast_dims, numbers
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.sizes import AnySize

Label = int | str
Labels = Sequence[Label | None]


class New(NamedTuple):
    """An axis of the results that corresponds to no axis of the inputs, entry by entry.

    Args:
        length: Its length; None if it is not known.
    """

    length: AnySize | None = None


class Axes(NamedTuple):
    """The axes of an operation.

    Args:
        inputs: The labels of the axes of each input, None for an axis without one. These may be
            left out at the end, and so may inputs without labels.
        out: The axes of each result. `...` at the end stands for any number of new ones.
    """

    inputs: Sequence[Labels]
    out: Sequence[Label | New | EllipsisType]

    def layouts(self, label: Label, rows: Rows, count: int) -> tuple[Layout, ...]:
        """The layouts of all inputs if these rows are those of the axis with this label.

        Args:
            count: How many inputs there are.
        """
        found: list[Layout] = [REPLICATED] * count
        for place, labels in enumerate(self.inputs):
            if label in labels:
                found[place] = rows.at(labels.index(label))
        return tuple(found)


AXES: dict[str, Callable[[Operation, Facts], Axes | None]] = {}
"""A function for each type of operation; it returns None if too little is known of the inputs."""


def axes_of(inputs: slice, *types: str) -> Callable[[Any], Any]:
    """Enter a function for these types of operations: `function(op, facts, *dims)`.

    Args:
        inputs: The inputs whose axes the function needs: it gets their lengths.
    """

    def enter(function: Any) -> Any:
        def axes(op: Operation, facts: Facts) -> Axes | None:
            dims = [facts.dims(tensor) for tensor in op.inputs[inputs]]
            found: Axes | None = None if None in dims else function(op, facts, *dims)
            return found

        AXES.update(dict.fromkeys(types, axes))
        return function

    return enter


def sizes_of(op: Operation, facts: Facts, axes: Axes) -> dict[Label, AnySize | None]:
    """The length of each labelled axis."""
    sizes: dict[Label, AnySize | None] = {}
    for tensor, labels in zip(op.inputs, axes.inputs, strict=False):
        for label, dim in zip(labels, facts.dims(tensor) or (), strict=False):
            if label is not None and sizes.get(label) is None:
                sizes[label] = dim
    return sizes


def entry_of(facts: Facts, tensor: Tensor) -> AnySize | None:
    """The only entry of a tensor; None if it is not known."""
    value = facts.value(tensor)
    return None if value is None else value.item()


def static_axes(facts: Facts, axes: Tensor, tensor: Tensor) -> list[int] | None:
    """Axes of a tensor, counted from the first; None if they are not known."""
    value, dims = numbers(facts.value(axes)), facts.dims(tensor)
    if value is None or dims is None:
        return None
    return [int(axis) % len(dims) for axis in np.ravel(value)] if dims else []


def channel_axis(op: Operation, rank: int) -> int:
    """The axis of the channels, by an operation's `data_format`."""
    return 1 if op.get_attr("data_format") == b"NCHW" else rank - 1


# Element by element.


@axes_of(FIRST, *UNARY, *SAME_SHAPES)
def elementwise(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes = range(len(dims))
    return Axes([axes] * len(op.inputs), axes)


@axes_of(ALL, *BROADCASTING)
def broadcasting(op: Operation, facts: Facts, *dims: Any) -> Axes:
    return broadcast(dims)


def broadcast(shapes: Sequence[Any]) -> Axes:
    """The axes of tensors of these shapes, and of those to which they are broadcast."""
    whole = broadcast_dims([*shapes])
    padded = [[1] * (len(whole) - len(dims)) + list(dims) for dims in shapes]
    # Otherwise the length of an input's axis may turn out to be 1.
    clear = [
        dim is not None and all(own in (1, dim) for own in each)
        for dim, each in zip(whole, zip(*padded, strict=True), strict=True)
    ]
    inputs = [
        [
            axis if clear[axis] and own[axis] == whole[axis] else None
            for axis in range(len(whole) - len(dims), len(whole))
        ]
        for dims, own in zip(shapes, padded, strict=True)
    ]
    out = [axis if clear[axis] else New(dim) for axis, dim in enumerate(whole)]
    return Axes(inputs, out)


@axes_of(BOTH, "Select")
def select(op: Operation, facts: Facts, condition: Any, dims: Any) -> Axes:
    # The condition is a scalar, or has one entry for each of the first axis, or for each of all.
    axes = range(len(dims))
    return Axes([axes[: len(condition)], axes, axes], axes)


@axes_of(FIRST, "Bitcast")
def bitcast(op: Operation, facts: Facts, dims: Any) -> Axes:
    # The bytes of a larger type come from the last axis.
    larger = op.outputs[0].dtype.size > op.inputs[0].dtype.size
    axes = range(len(dims) - larger)
    return Axes([axes], [*axes, ...])


@axes_of(SECOND, "LookupTableFindV2")
def table_lookup(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    # Otherwise the keys or values of the table are vectors.
    is_scalar = op.inputs[2].shape.rank == 0
    return Axes([(), range(len(dims))], range(len(dims))) if is_scalar else None


@axes_of(FIRST, "BiasAdd")
def bias_add(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes = range(len(dims))
    return Axes([axes, [channel_axis(op, len(dims))]], axes)


# Axes that move, come and go.


@axes_of(FIRST, "Transpose", "ConjugateTranspose")
def transposed(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    order = static_axes(facts, op.inputs[1], op.inputs[0])
    return None if order is None else Axes([range(len(dims))], order)


def inserted(axes: Sequence[Any], at: int, new: New) -> list[Any]:
    place = at % (len(axes) + 1)
    return [*axes[:place], new, *axes[place:]]


@axes_of(FIRST, "ExpandDims")
def expanded(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    at, axes = entry_of(facts, op.inputs[1]), range(len(dims))
    return Axes([axes], inserted(axes, at, New(1))) if isinstance(at, int) else None


@axes_of(FIRST, "OneHot")
def one_hot(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes, depth = range(len(dims)), New(entry_of(facts, op.inputs[1]))
    return Axes([axes], inserted(axes, op.get_attr("axis"), depth))


@axes_of(FIRST, "Pack")
def packed(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes, count = range(len(dims)), len(op.inputs)
    return Axes([axes] * count, inserted(axes, op.get_attr("axis"), New(count)))


def without(axes: Sequence[int], gone: Any) -> list[int]:
    return [axis for axis in axes if axis not in gone]


@axes_of(FIRST, "Unpack")
def unpacked(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes = range(len(dims))
    return Axes([axes], without(axes, [op.get_attr("axis") % len(dims)]))


@axes_of(FIRST, "Squeeze")
def squeezed(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    axes, gone = range(len(dims)), {axis % len(dims) for axis in op.get_attr("squeeze_dims")}
    if not gone:
        # All of length 1 are dropped, and a batch may have one row.
        if not all(isinstance(dim, int) for dim in dims):
            return None
        gone = {axis for axis in axes if dims[axis] == 1}
    return Axes([axes], without(axes, gone))


@axes_of(BOTH, "GatherV2")
def gathered(op: Operation, facts: Facts, values: Any, indices: Any) -> Axes | None:
    found = static_axes(facts, op.inputs[2], op.inputs[0])
    if found is None:
        return None
    (axis,), axes = found, range(len(values))
    # The first axes, of both, which are those of examples: each has its own indices.
    shared = op.get_attr("batch_dims")
    shared += len(indices) if shared < 0 else 0
    own = index_labels(indices[shared:])
    return Axes([axes, [*axes[:shared], *own]], [*axes[:axis], *own, *axes[axis + 1 :]])


def index_labels(dims: Sequence[Any]) -> list[Label]:
    return [f"index {n}" for n in range(len(dims))]


@axes_of(SECOND, "ResourceGather", "GatherNd", "ResourceGatherNd")
def gathered_first(op: Operation, facts: Facts, indices: Any) -> Axes | None:
    """Gathers along the first axis, or along as many as each row of the indices has numbers."""
    depth: AnySize | None = 1
    if op.type != "ResourceGather":
        *indices, depth = indices
    elif op.get_attr("batch_dims"):
        return None
    own, values = index_labels(indices), facts.dims(op.inputs[0])
    if values is None or not isinstance(depth, int):
        return Axes([(), own], [*own, ...])
    axes = range(len(values))
    return Axes([axes, own], [*own, *axes[depth:]])


@axes_of(BOTH, "ScatterNd")
def scattered(op: Operation, facts: Facts, indices: Any, updates: Any) -> Axes:
    *indices, depth = indices
    own = index_labels(indices)
    if not isinstance(depth, int):
        return Axes([own, own], [...])
    rest = range(len(updates) - len(own))
    return Axes([own, [*own, *rest]], [*[New()] * depth, *rest])


TENSOR_SCATTERS = tuple(f"TensorScatter{kind}" for kind in ("Add", "Sub", "Max", "Min", "Update"))


@axes_of(BOTH, *TENSOR_SCATTERS)
def tensor_scattered(op: Operation, facts: Facts, dims: Any, indices: Any) -> Axes:
    *indices, depth = indices
    own, depth = index_labels(indices), depth if isinstance(depth, int) else len(dims)
    rest = range(depth, len(dims))
    into = [*[None] * depth, *rest]
    return Axes([into, own, [*own, *rest]], [*map(New, dims[:depth]), *rest])


# Sums of products.

PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")


def equation_of(op: Operation) -> str:
    """The equation of `tf.einsum` that gives the same product."""
    if op.type == "Einsum":
        return str(op.get_attr("equation").decode().replace(" ", ""))
    dots = "" if op.type == "MatMul" else "..."
    first, second = ("adj_x", "adj_y") if dots else ("transpose_a", "transpose_b")
    one, two = "km" if op.get_attr(first) else "mk", "nk" if op.get_attr(second) else "kn"
    return f"{dots}{one},{dots}{two}->{dots}mn"


@axes_of(ALL, *PRODUCTS)
def product(op: Operation, facts: Facts, *dims: Any) -> Axes:
    left, right = equation_of(op).split("->")
    terms = [term.partition("...") for term in left.split(",")]
    # The axes that the dots stand for are broadcast.
    dotted = broadcast(
        [
            own[len(before) : len(own) - len(after)]
            for own, (before, _, after) in zip(dims, terms, strict=True)
        ]
    )
    inputs = [
        [*before, *middle, *after]
        for (before, _, after), middle in zip(terms, dotted.inputs, strict=True)
    ]
    before, dots, after = right.partition("...")
    return Axes(inputs, [*before, *(dotted.out if dots else ()), *after])


FILTER_GRADIENTS = (
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
    "Dilation2DBackpropFilter",
)


@axes_of(NONE, *FILTER_GRADIENTS)
def filter_gradient(op: Operation, facts: Facts) -> Axes:
    # The examples are the first axis of the images and of the gradients.
    return Axes([[0], (), [0]], [...])


# Along some axes.

REDUCTIONS = ("Sum", "Mean", "EuclideanNorm", "Max", "Min", "Prod", "All", "Any")


@axes_of(FIRST, "ArgMax", "ArgMin", *REDUCTIONS)
def reduced(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    over, axes = static_axes(facts, op.inputs[1], op.inputs[0]), range(len(dims))
    if over is None:
        return None
    if op.type in REDUCTIONS and op.get_attr("keep_dims"):
        return Axes([axes], [New(1) if axis in over else axis for axis in axes])
    return Axes([axes], without(axes, over))


@axes_of(FIRST, "BiasAddGrad")
def bias_gradient(op: Operation, facts: Facts, dims: Any) -> Axes:
    return Axes([range(len(dims))], [channel_axis(op, len(dims))])


@axes_of(FIRST, "L2Loss")
def l2_loss(op: Operation, facts: Facts, dims: Any) -> Axes:
    return Axes([range(len(dims))], [])


SEGMENTS = ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")


@axes_of(BOTH, *SEGMENTS)
def segments(op: Operation, facts: Facts, values: Any, segment_ids: Any) -> Axes:
    axes, shared = range(len(values)), len(segment_ids)
    return Axes([axes, axes[:shared]], [New(entry_of(facts, op.inputs[2])), *axes[shared:]])


@axes_of(slice(0, 3, 2), "DenseBincount", "Bincount")
def counted(op: Operation, facts: Facts, dims: Any, weights: Any) -> Axes | None:
    if None in weights:
        return None
    axes, first = range(len(dims)), range(len(dims) - 1 if op.type == "DenseBincount" else 0)
    size = New(entry_of(facts, op.inputs[1]))
    return Axes([axes, (), axes if weights != [0] else ()], [*first, size])


@axes_of(FIRST, "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def along(op: Operation, facts: Facts, dims: Any) -> Axes:
    over, axes = static_axes(facts, op.inputs[-1], op.inputs[0]), range(len(dims))
    is_free = [over is not None and axis not in over for axis in axes]
    return Axes([axes], [axis if is_free[axis] else New(dims[axis]) for axis in axes])


@axes_of(FIRST, "ReverseSequence")
def reverse_sequence(op: Operation, facts: Facts, dims: Any) -> Axes:
    axes, reversed_ = range(len(dims)), op.get_attr("seq_dim")
    out = [New(dims[axis]) if axis == reversed_ else axis for axis in axes]
    return Axes([axes, [op.get_attr("batch_dim")]], out)


# How many of the last axes belong together, and the input with the lengths that these have in the
# results; None if there is none.
LAST_AXES: dict[str, tuple[int, int | None]] = table(
    {
        "FakeQuantWithMinMaxVars": (0, 0),
        "Softmax LogSoftmax FFT IFFT RGBToHSV HSVToRGB AdjustHue AdjustSaturation": (1, 0),
        "FakeQuantWithMinMaxVarsPerChannel": (1, 0),
        "NthElement RFFT IRFFT": (1, None),
        "MatrixBandPart Cholesky MatrixInverse MatrixLogarithm MatrixSquareRoot": (2, 0),
        "FFT2D IFFT2D": (2, 0),
        "MatrixDiagPartV3 MatrixDeterminant LogMatrixDeterminant SelfAdjointEigV2": (2, None),
        "Svd Qr Lu RFFT2D IRFFT2D": (2, None),
        "FFT3D IFFT3D AdjustContrastv2": (3, 0),
        "RFFT3D IRFFT3D": (3, None),
    }
)
# The same for operations on two inputs that share the other axes.
LAST_AXES_OF_BOTH: dict[str, tuple[int, int]] = table(
    {
        "InTopK InTopKV2": (1, 1),
        "Cross": (1, 0),
        "CholeskyGrad MatrixSetDiagV3": (2, 0),
        "MatrixSolve": (2, 1),
    }
)


@axes_of(BOTH, *LAST_AXES_OF_BOTH)
@axes_of(FIRST, *LAST_AXES)
def last_axes(op: Operation, facts: Facts, *dims: Any) -> Axes:
    count, like = {**LAST_AXES, **LAST_AXES_OF_BOTH}[op.type]
    first = range(len(dims[0]) - count)
    last = [...] if like is None else [New(dim) for dim in dims[like][len(first) :]]
    return Axes([first] * len(dims), [*first, *last])


@axes_of(FIRST, "TopKV2")
def top(op: Operation, facts: Facts, dims: Any) -> Axes:
    first = range(len(dims) - 1)
    return Axes([first], [*first, New(entry_of(facts, op.inputs[1]))])


@axes_of(FIRST, "MatrixDiagV3")
def diagonal(op: Operation, facts: Facts, dims: Any) -> Axes | None:
    """One diagonal, or a band of them, for each entry of the first axes."""
    sizes = [facts.value(tensor) for tensor in op.inputs[1:4]]
    if op.inputs[1].shape.rank == 0 and sizes == [0, -1, -1]:
        first = range(len(dims) - 1)
        return Axes([first], [*first, New(dims[-1]), New(dims[-1])])
    # The first axis of a band says which diagonal.
    rank = op.outputs[0].shape.rank
    return None if rank is None else Axes([range(rank - 2)], [*range(rank - 2), ...])


@axes_of(BOTH, "MatrixTriangularSolve", "LowerBound", "UpperBound")
def searched(op: Operation, facts: Facts, one: Any, two: Any) -> Axes:
    """Each column of the second input is solved for, or each entry looked up, in the first."""
    last = 2 if op.type == "MatrixTriangularSolve" else 1
    first = broadcast([one[:-last], two[:-last]])
    rows = two[-last:-1]
    inputs = [first.inputs[0], [*first.inputs[1], *(None for _ in rows), "column"]]
    return Axes(inputs, [*first.out, *map(New, rows), "column"])
