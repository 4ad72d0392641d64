"""What operations may do with an open sum, one that has not been taken yet.

An operation may pass it on if its result is the sum of its results for the parts. Not so a cast to
a type of fewer digits, nor anything that adds what is whole: each replica would add it.
"""

import tensorflow as tf

from keras_multigpu.partition.families import table
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout
from keras_multigpu.partition.plan import Plan

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
COMPLEX = (tf.complex64, tf.complex128)
SUMMED = (*FLOATS, *COMPLEX, tf.int32, tf.int64)
"""Types whose sums do not depend on the order, but for rounding."""

ALL, FIRST, SECOND, THIRD = slice(None), slice(0, 1), slice(1, 2), slice(2, 3)
# Which inputs are sums together, and the result is one; all others are whole.
LINEAR: dict[str, slice] = table(
    {
        "Identity StopGradient PreventGradient Snapshot Neg Real Imag Conj": FIRST,
        "Reshape Transpose ConjugateTranspose ExpandDims Squeeze BroadcastTo EnsureShape": FIRST,
        "Tile Pad MirrorPad MirrorPadGrad Slice StridedSlice ReverseV2 Roll": FIRST,
        "Unpack SplitV Sum BiasAddGrad Cumsum GatherV2 GatherNd UnsortedSegmentSum": FIRST,
        "MatrixDiagPartV3 MatrixBandPart SpaceToBatchND BatchToSpaceND DepthToSpace": FIRST,
        "SpaceToDepth": FIRST,
        "Add AddV2 AddN Sub Complex BiasAdd Pack": ALL,
        "ConcatV2": slice(0, -1),
        "Split ScatterNd": SECOND,
        "SelectV2 Select": slice(1, 3),
        "StridedSliceGrad": slice(4, 5),
    }
)
# Only of floats: in whole numbers a quotient is rounded.
LINEAR_IN_FLOATS = {"Mean": FIRST}

# Which input may be a sum when the other is whole. A part may be zero where the sum is not: if the
# other is infinite, missing, or zero in a denominator, the parts give NaN where the sum gives
# infinity. Both are numbers that no training survives, so that is accepted for these, which occur
# between gradients and their sums; not for products of matrices, where one such entry spoils all.
SCALED = {
    "Mul": (0, 1),
    "MulNoNan": (0,),
    "RealDiv": (0,),
    "DivNoNan": (0,),
    "RsqrtGrad": (1,),
}

# Of these only the shape counts.
SHAPES = ("ZerosLike", "OnesLike", "Shape", "ShapeN", "Size", "Rank")


def open_sum(op: tf.Operation, ins: tuple[Layout, ...]) -> Plan | None:
    """The plan of an operation that passes sums on; None if they have to be taken first."""
    kind = op.type
    if any(layout not in (PARTIAL, REPLICATED) for layout in ins):
        return None
    if kind in SHAPES:
        return Plan(ins, (REPLICATED,) * len(op.outputs))
    if any(tensor.dtype not in SUMMED for tensor in op.outputs):
        return None
    summed = {place for place, layout in enumerate(ins) if layout == PARTIAL}
    types = [op.inputs[place].dtype for place in summed]
    if any(dtype not in SUMMED for dtype in types):
        return None
    plan = Plan(ins, (PARTIAL,) * len(op.outputs))
    if kind == "Cast":
        return plan if widened(types[0], op.outputs[0].dtype) else None
    if kind in SCALED:
        (place,) = summed if len(summed) == 1 else (None,)
        fits = types[0] in (*FLOATS, *COMPLEX) or kind == "Mul"
        return plan if place in SCALED[kind] and fits else None
    if kind in ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"):
        whole = [tensor for place, tensor in enumerate(op.inputs) if place not in summed]
        return plan if len(summed) == 1 and all(finite(tensor) for tensor in whole) else None
    if kind in LINEAR_IN_FLOATS and types[0] not in FLOATS:
        return None
    places = LINEAR.get(kind, LINEAR_IN_FLOATS.get(kind))
    if places is None or summed != set(range(len(ins))[places]):
        return None
    return plan


def widened(before: tf.DType, after: tf.DType) -> bool:
    """Whether a cast keeps each digit."""
    if before not in FLOATS or after not in FLOATS:
        return False
    return before == after or before.size < after.size


def finite(tensor: tf.Tensor) -> bool:
    """Whether a factor is known to be finite."""
    value = tf.get_static_value(tensor)
    return value is not None and bool(tf.reduce_all(tf.math.is_finite(value)))
