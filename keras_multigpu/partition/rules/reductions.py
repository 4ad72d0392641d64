"""Operations along some axes: reductions, and those that treat each entry of the others alike."""

import math

import tensorflow as tf

from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.families import table
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import Emit, Plan, only, rank_of, rows_of, static_axes
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules.elementwise import channel_axis
from keras_multigpu.partition.rules.registration import axis_rule, rows_rule
from keras_multigpu.partition.rules.sums import FLOATS, SUMMED

COMBINED = ("Max", "Min", "Prod", "All", "Any")


@rows_rule("Sum", "Mean", "EuclideanNorm", *COMBINED)
def reduction(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    found = rows_of(ins, 0)
    axes = static_axes(facts, op.inputs[1], op.inputs[0])
    if axes is None or found is None:
        return None

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        # For a batch of one row TensorFlow may compute other axes than the known ones: those of the
        # sum that gives a gradient the shape of what was broadcast.
        is_one = op.inputs[1].shape.rank == 0
        return replica.run(
            op, [inputs[0], tf.constant(axes[0] if is_one else axes, inputs[1].dtype)]
        )

    need, dtype = only({0: found}, 2), op.outputs[0].dtype
    if found.axis not in axes:
        gone = 0 if op.get_attr("keep_dims") else len({a for a in axes if a < found.axis})
        return Plan(need, (found.at(found.axis - gone),), emit)
    if op.type in COMBINED:
        return Plan(need, (REPLICATED,), emit, combine=op.type)
    if op.type == "Sum" and dtype in SUMMED:
        return Plan(need, (PARTIAL,), emit)
    if op.type == "Mean" and dtype in FLOATS:
        return Plan(need, (PARTIAL,), part_of_mean(op, found, sorted(set(axes)), facts))
    return None


def part_of_mean(op: tf.Operation, found: Rows, axes: list[int], facts: GraphFacts) -> Emit:
    """The sum of a replica's rows, divided by the number of entries of all replicas."""
    dims = facts.dims(op.inputs[0]) or [None] * (max(axes) + 1)
    lengths = [facts.length(found.blocks) if axis == found.axis else dims[axis] for axis in axes]

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        value = inputs[0]
        # Like TensorFlow, sum small floats in larger ones.
        wide = value.dtype if value.dtype.size > 2 else tf.float32
        sum_ = tf.reduce_sum(tf.cast(value, wide), axes, keepdims=op.get_attr("keep_dims"))
        # The product of several lengths may be larger than an int32.
        count = float(math.prod(length for length in lengths if isinstance(length, int)))
        for axis, length in zip(axes, lengths, strict=True):
            if not isinstance(length, int):
                entries = tf.shape(value)[axis] if length is None else replica.scalar(length)
                count *= tf.cast(entries, tf.float64)
        return [tf.cast(sum_ / tf.cast(count, wide), value.dtype)]

    return emit


@rows_rule("BiasAddGrad")
def bias_gradient(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    found, channels = rows_of(ins), channel_axis(op)
    if found is None or channels is None:
        return None
    return Plan(ins, (found.at(0) if found.axis == channels else PARTIAL,))


@rows_rule("L2Loss")
def l2_loss(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    return Plan(ins, (PARTIAL,))


@axis_rule("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def along_axes(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    axes = static_axes(facts, op.inputs[-1], op.inputs[0])
    if axes is None or axis in axes:
        return None
    return axis - (op.type in ("ArgMax", "ArgMin") and axes[0] < axis)


# How many of the last axes belong together.
LAST_AXES: dict[str, int] = table(
    {
        "Softmax LogSoftmax TopKV2 NthElement FFT IFFT RFFT IRFFT RGBToHSV HSVToRGB": 1,
        "AdjustHue AdjustSaturation FakeQuantWithMinMaxVarsPerChannel": 1,
        "MatrixBandPart MatrixDiagPartV3 Cholesky MatrixInverse MatrixDeterminant": 2,
        "LogMatrixDeterminant MatrixLogarithm MatrixSquareRoot": 2,
        "SelfAdjointEigV2 Svd Qr Lu FFT2D IFFT2D RFFT2D IRFFT2D": 2,
        "FFT3D IFFT3D RFFT3D IRFFT3D AdjustContrastv2": 3,
    }
)
# The same where two inputs share the other axes.
LAST_AXES_OF_BOTH: dict[str, int] = table(
    {"InTopK InTopKV2 Cross": 1, "CholeskyGrad MatrixSolve": 2}
)


@axis_rule(*LAST_AXES_OF_BOTH, shared_by=(0, 1))
@axis_rule(*LAST_AXES)
def last_axes(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    rank = rank_of(facts, op.inputs[0])
    count = {**LAST_AXES, **LAST_AXES_OF_BOTH}[op.type]
    return None if rank is None or axis >= rank - count else axis


@axis_rule("MatrixSetDiagV3", shared_by=(0, 1))
@axis_rule("MatrixDiagV3")
def diagonal(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    """One diagonal, or a band of them, for each entry of the axes before."""
    rank = rank_of(facts, op.outputs[0])
    # The first axis of a band says which diagonal.
    return None if rank is None or axis >= rank - 2 else axis


@rows_rule("MatrixTriangularSolve", "LowerBound", "UpperBound")
def looked_up(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    """Each entry of the second input is solved for, or looked up, in the first."""
    matrices = op.type == "MatrixTriangularSolve"
    used, searched = (facts.dims(tensor) for tensor in op.inputs)
    found = rows_of(ins, 1) or rows_of(ins, 0)
    if found is None or used is None or searched is None or len(used) != len(searched):
        return None
    axis = found.axis
    if axis >= len(used) - (2 if matrices else 1):
        # Columns of a matrix, or values that are looked up.
        can_split = isinstance(ins[1], Rows) and axis == len(used) - 1
        return Plan((REPLICATED, found), (found,)) if can_split else None
    if used[axis] == facts.length(found.blocks):
        return Plan((found, found), (found,)) if searched[axis] == used[axis] else None
    # One matrix, or one sorted sequence, for all.
    return Plan((REPLICATED, found), (found,)) if used[axis] == 1 else None


@rows_rule("ReverseSequence")
def reverse_sequence(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    found, examples = rows_of(ins, 0), op.get_attr("batch_dim")
    if found is None:
        found = rows_of(ins)
        found = found and found.at(examples)
    if found is None or found.axis == op.get_attr("seq_dim"):
        return None
    lengths = found.at(0) if found.axis == examples else REPLICATED
    return Plan((found, lengths), (found,))
