"""What operations may do with an open sum: a value that replicas have in parts, not yet added.

An operation may pass it on if its result is the sum of its results for the parts. A cast to a type
of fewer digits may not, nor may adding a whole value, which each replica would add.
"""

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts.axes import PRODUCTS
from keras_multigpu.partition.facts.families import ALL, FIRST, SECOND, table
from keras_multigpu.partition.facts.values import COUNTS
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.rules.plan import Plan

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
COMPLEX = (tf.complex64, tf.complex128)
SUMMED = (*FLOATS, *COMPLEX, tf.int32, tf.int64)
"""Types whose sums do not depend on the order, except for rounding."""

# The inputs that are open sums, together. The others are whole, and the result is an open sum.
LINEAR: dict[str, slice] = table(
    {
        "Identity StopGradient PreventGradient Snapshot Neg Real Imag Conj": FIRST,
        "Reshape Transpose ConjugateTranspose ExpandDims Squeeze BroadcastTo EnsureShape": FIRST,
        "Tile Pad MirrorPad MirrorPadGrad Slice StridedSlice ReverseV2 Roll": FIRST,
        "Unpack SplitV Sum BiasAddGrad Cumsum GatherV2 GatherNd UnsortedSegmentSum": FIRST,
        "MatrixDiagPartV3 MatrixBandPart SpaceToBatchND BatchToSpaceND DepthToSpace": FIRST,
        "SpaceToDepth Mean": FIRST,
        "Add AddV2 AddN Sub Complex BiasAdd Pack": ALL,
        "ConcatV2": slice(0, -1),
        "Split ScatterNd": SECOND,
        "SelectV2 Select": slice(1, 3),
        "StridedSliceGrad": slice(4, 5),
    }
)

# The input that may be an open sum while the other is whole. If the whole one is infinite, NaN or
# a denominator of zero, a part that is zero gives NaN where the sum would give infinity. No
# training survives either, so these, which occur between gradients and their sums, accept that.
# In a product of matrices one such entry spoils all the others, see `is_finite_but`.
SCALED = {
    "Mul": (0, 1),
    "MulNoNan": (0,),
    "RealDiv": (0,),
    "DivNoNan": (0,),
    "RsqrtGrad": (1,),
}

# These need only the shape.
SHAPES = ("ZerosLike", "OnesLike", *COUNTS)


def open_sum(op: Operation, ins: tuple[Layout, ...]) -> Plan | None:
    """The plan of an operation that passes open sums on; None if they have to be taken first."""
    kind = op.type
    if any(layout not in (PARTIAL, REPLICATED) for layout in ins):
        return None
    if kind in SHAPES:
        return Plan(ins, (REPLICATED,) * len(op.outputs))
    summed = {place for place, layout in enumerate(ins) if layout == PARTIAL}
    types = [op.inputs[place].dtype for place in summed]
    if any(dtype not in SUMMED for dtype in (*types, *(t.dtype for t in op.outputs))):
        return None
    if kind == "Cast":
        fits = keeps_digits(types[0], op.outputs[0].dtype)
    elif kind in SCALED:
        floats = types[0] in (*FLOATS, *COMPLEX)
        fits = len(summed) == 1 and summed <= {*SCALED[kind]} and (floats or kind == "Mul")
    elif kind in PRODUCTS:
        fits = len(summed) == 1 and is_finite_but(summed.pop(), op)
    elif kind == "Mean" and types[0] not in FLOATS:
        # The mean of integers is rounded.
        fits = False
    else:
        fits = kind in LINEAR and summed == set(range(len(ins))[LINEAR[kind]])
    return Plan(ins, (PARTIAL,) * len(op.outputs)) if fits else None


def keeps_digits(before: tf.DType, after: tf.DType) -> bool:
    """Whether a cast from one type to another keeps every digit."""
    return {before, after} <= {*FLOATS} and (before == after or before.size < after.size)


def is_finite_but(place: int, op: Operation) -> bool:
    """Whether all inputs of a product but one are finite: constants, or weights.

    With infinite weights the loss is not a number either. The gradients of LoRA's two narrow
    kernels are products of theirs and that of the wide kernel beside them.
    """
    return all(
        at == place or comes_from_variable(tensor) or is_finite(tensor)
        for at, tensor in enumerate(op.inputs)
    )


def comes_from_variable(tensor: Tensor) -> bool:
    """Whether a tensor is the value of a variable, perhaps in another type or shape."""
    while tensor.op.type in ("Identity", "Cast", "Reshape", "Transpose"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "ReadVariableOp"


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor is known to be finite."""
    value = tensor.constant
    # Plans are made inside the trace of the local graph, where TensorFlow's answer has no value.
    return value is not None and bool(np.isfinite(value).all())
