"""The rules: what operations do with inputs in rows, and with open sums.

    plan          what a rule gives
    registration  how a function becomes a rule
    sums          which operations pass an open sum on
    axes          operations whose `Axes` are known: element by element, products, and most others
    reductions    along some axes
    examples      one result for each entry of the first axis
    shapes        operations that move entries, or count them; `blocks` cuts and joins rows
    strided       slices as Python writes them
    indices       gathers and scatters
    lists         of tensors
    recurrent     cuDNN's LSTM and GRU
    randomness    draws of random numbers
    moments       a mean and its variance, with one sum for both

Importing this package enters them all into `plan.RULES`.
"""

from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.rules import (  # noqa: F401
    axes,
    examples,
    indices,
    lists,
    recurrent,
    reductions,
    shapes,
    strided,
)
from keras_multigpu.partition.rules.plan import RULES, Plan

for _kind in ("Identity", "ZerosLike", "AddN"):
    RULES[_kind] = lists.also_for_lists(RULES[_kind])

# Operations whose kernels fail, or are wrong, without rows.
FAILS_EMPTY = set(
    "GatherNd MaxPool3DGradGrad MaxPoolWithArgmax MirrorPad MirrorPadGrad ScatterNd "
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub "
    "TensorScatterUpdate".split()
)
# The same on a CPU, where oneDNN's kernels, some for two of these together, end the process. The
# gradient of the filter of a depthwise convolution fails without oneDNN.
FAILS_EMPTY_ON_CPU = set(
    "AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad Conv2D Conv2DBackpropFilter Conv2DBackpropInput "
    "Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput MaxPool MaxPool3D "
    "MaxPool3DGrad MaxPoolGrad".split()
)


def fails_empty(op: Operation, plan: Plan, on_cpu: bool) -> bool:
    """Whether an operation's kernel must have some rows; zeros are then as good as none."""
    fails = op.type in FAILS_EMPTY or (on_cpu and op.type in FAILS_EMPTY_ON_CPU)
    # To a maximum or a minimum they are not.
    return fails and not plan.combine
