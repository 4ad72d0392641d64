"""Operations along some axes: reductions, and what works for each entry of the others.

The known axes may differ from those that an operation gets when the step runs: for the sum that
turns a gradient into the shape of what was broadcast, TensorFlow names other axes if a batch has
one row. So the axes that a rule assumes are written into the replicas' operations.
"""

import math

import tensorflow as tf

from keras_multigpu.partition.families import table
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import (
    Emit,
    Facts,
    Plan,
    only,
    rows_of,
    static_axes,
)
from keras_multigpu.partition.rules.elementwise import channel_axis
from keras_multigpu.partition.rules.entering import rows_rule
from keras_multigpu.partition.rules.sums import FLOATS, SUMMED
from keras_multigpu.partition.site import Site

COMBINED = ("Max", "Min", "Prod", "All", "Any")


def rank_of(facts: Facts, tensor: tf.Tensor) -> int | None:
    dims = facts.dims(tensor)
    return tensor.shape.rank if dims is None else len(dims)


@rows_rule("Sum", "Mean", "EuclideanNorm", *COMBINED)
def reduction(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins, 0), rank_of(facts, op.inputs[0])
    axes = static_axes(facts, op.inputs[1], rank)
    if axes is None or found is None:
        return None
    need = only({0: found}, 2)
    if found.axis not in axes:
        gone = 0 if op.get_attr("keep_dims") else len({a for a in axes if a < found.axis})
        return Plan(need, (found.at(found.axis - gone),), along(axes))
    dtype = op.outputs[0].dtype
    if op.type in COMBINED:
        return Plan(need, (REPLICATED,), along(axes), combine=op.type)
    if op.type == "Sum" and dtype in SUMMED:
        return Plan(need, (PARTIAL,), along(axes))
    if op.type == "Mean" and dtype in FLOATS:
        return Plan(need, (PARTIAL,), share_of_mean(op, found, sorted(set(axes)), facts))
    return None


def along(axes: list[int]) -> Emit:
    """The operation itself, along these axes."""

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        one = site.op.inputs[1].shape.rank == 0
        return site.run([inputs[0], tf.constant(axes[0] if one else axes, inputs[1].dtype)])

    return emit


def share_of_mean(op: tf.Operation, found: Rows, axes: list[int], facts: Facts) -> Emit:
    """The sum of a replica's rows, divided by how many entries all replicas have."""
    dims = facts.dims(op.inputs[0]) or [None] * (max(axes) + 1)
    lengths = [facts.length(found.blocks) if axis == found.axis else dims[axis] for axis in axes]

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        value = inputs[0]
        # As TensorFlow does: sums of small floats are made in larger ones.
        wide = value.dtype if value.dtype.size > 2 else tf.float32
        sum_ = tf.reduce_sum(tf.cast(value, wide), axes, keepdims=op.get_attr("keep_dims"))
        # The product of several lengths may be larger than an int32.
        count = float(math.prod(length for length in lengths if isinstance(length, int)))
        for axis, length in zip(axes, lengths, strict=True):
            if not isinstance(length, int):
                entries = tf.shape(value)[axis] if length is None else site.number(length)
                count *= tf.cast(entries, tf.float64)
        return [tf.cast(sum_ / tf.cast(count, wide), value.dtype)]

    return emit


@rows_rule("BiasAddGrad")
def bias_gradient(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, channels = rows_of(ins), channel_axis(op)
    if found is None or channels is None:
        return None
    return Plan(ins, (found.at(0) if found.axis == channels else PARTIAL,))


@rows_rule("L2Loss")
def l2_loss(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(ins, (PARTIAL,))


@rows_rule("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2")
def along_axes(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins, 0), rank_of(facts, op.inputs[0])
    axes = static_axes(facts, op.inputs[1], rank)
    if axes is None or found is None or found.axis in axes:
        return None
    gone = op.type in ("ArgMax", "ArgMin") and axes[0] < found.axis
    return Plan(only({0: found}, 2), (found.at(found.axis - gone),), along(axes))


@rows_rule("Roll")
def roll(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins, 0), rank_of(facts, op.inputs[0])
    axes = static_axes(facts, op.inputs[2], rank)
    if axes is None or found is None or found.axis in axes:
        return None
    return Plan(only({0: found}, 3), (found,))


# How many of the last axes belong together, and which inputs share the other axes.
LAST_AXES: dict[str, tuple[int, tuple[int, ...]]] = table(
    {
        "Softmax LogSoftmax TopKV2 NthElement FFT IFFT RFFT IRFFT RGBToHSV HSVToRGB": (1, (0,)),
        "AdjustHue AdjustSaturation FakeQuantWithMinMaxVarsPerChannel": (1, (0,)),
        "InTopK InTopKV2 Cross": (1, (0, 1)),
        "MatrixBandPart MatrixDiagPartV3 Cholesky MatrixInverse MatrixDeterminant": (2, (0,)),
        "LogMatrixDeterminant MatrixLogarithm MatrixSquareRoot": (2, (0,)),
        "SelfAdjointEigV2 Svd Qr Lu FFT2D IFFT2D RFFT2D IRFFT2D": (2, (0,)),
        "CholeskyGrad MatrixSolve": (2, (0, 1)),
        "FFT3D IFFT3D RFFT3D IRFFT3D AdjustContrastv2": (3, (0,)),
    }
)


@rows_rule(*LAST_AXES)
def last_axes(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    spared, places = LAST_AXES[op.type]
    found, rank = rows_of(ins, *places), rank_of(facts, op.inputs[0])
    if found is None or rank is None or found.axis >= rank - spared:
        return None
    return Plan(only(dict.fromkeys(places, found), len(ins)), (found,) * len(op.outputs))


@rows_rule("MatrixTriangularSolve", "LowerBound", "UpperBound")
def looked_up(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """Each entry of the second input is solved for, or looked up, in the first."""
    matrices = op.type == "MatrixTriangularSolve"
    dims = [facts.dims(tensor) for tensor in op.inputs]
    found, used = rows_of(ins, 1) or rows_of(ins, 0), dims[0]
    if found is None or used is None or dims[1] is None or len(used) != len(dims[1]):
        return None
    if found.axis >= len(used) - (2 if matrices else 1):
        # Of a matrix, columns; the places that are looked for.
        last = isinstance(ins[1], Rows) and found.axis == len(used) - 1
        return Plan((REPLICATED, found), (found,)) if last else None
    if used[found.axis] != facts.length(found.blocks):
        # One for all.
        return Plan((REPLICATED, found), (found,)) if used[found.axis] == 1 else None
    if dims[1][found.axis] != used[found.axis]:
        return None
    return Plan((found, found), (found,))


@rows_rule("MatrixDiagV3", "MatrixSetDiagV3")
def diagonal(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """One diagonal, or a band of them, for each entry of the axes before."""
    places = (0,) if op.type == "MatrixDiagV3" else (0, 1)
    found, rank = rows_of(ins, *places), rank_of(facts, op.outputs[0])
    # The first axis of a band says which diagonal.
    if found is None or rank is None or found.axis >= rank - 2:
        return None
    return Plan(only(dict.fromkeys(places, found), len(ins)), (found,))


@rows_rule("ReverseSequence")
def reverse_sequence(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, examples = rows_of(ins, 0), op.get_attr("batch_dim")
    if found is None:
        found = rows_of(ins)
        found = found and found.at(examples)
    if found is None or found.axis == op.get_attr("seq_dim"):
        return None
    lengths = found.at(0) if found.axis == examples else REPLICATED
    return Plan((found, lengths), (found,))
