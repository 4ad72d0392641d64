"""The rules: what operations do with inputs in rows, and with open sums.

    sums         what passes a sum on
    elementwise  rows of the result are those of the inputs
    reductions   along some axes; and what works for each entry of the others
    products     of matrices
    examples     one result for each entry of the first axis
    shapes       what moves entries, or counts them
    strided      slices as Python writes them
    places       what takes entries from places, or puts them there
    lists        of tensors

Importing this enters them all into `plan.RULES`.
"""

import importlib

import tensorflow as tf

from keras_multigpu.partition.layouts import PARTIAL, Rows
from keras_multigpu.partition.plan import RULES, Plan
from keras_multigpu.partition.rules import lists

for _name in ("elementwise", "reductions", "products", "examples", "shapes", "strided", "places"):
    importlib.import_module(f"{__name__}.{_name}")
lists.for_lists_too("Identity", "ZerosLike", "AddN")

FAILS_EMPTY = {
    "GatherNd",
    "MaxPool3DGradGrad",
    "MaxPoolWithArgmax",
    "MirrorPad",
    "MirrorPadGrad",
    "ScatterNd",
    "TensorScatterAdd",
    "TensorScatterMax",
    "TensorScatterMin",
    "TensorScatterSub",
    "TensorScatterUpdate",
}
"""Operations that fail, or are wrong, where a replica has no rows."""

FAILS_EMPTY_ON_CPU = {
    "AvgPool",
    "AvgPool3D",
    "AvgPool3DGrad",
    "AvgPoolGrad",
    "Conv2D",
    "Conv2DBackpropFilter",
    "Conv2DBackpropInput",
    "Conv3D",
    "Conv3DBackpropFilterV2",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "MaxPool",
    "MaxPool3D",
    "MaxPool3DGrad",
    "MaxPoolGrad",
}
"""The same where oneDNN has kernels, some for two of these together: they end the process.

The filter's gradient of a depthwise convolution fails without oneDNN.
"""


def skipped_empty(op: tf.Operation, plan: Plan, on_cpu: bool) -> bool:
    """Whether a replica without rows must skip an operation.

    Its results have no rows, or are zeros to add.
    """
    fails = op.type in FAILS_EMPTY or (on_cpu and op.type in FAILS_EMPTY_ON_CPU)
    rows = any(isinstance(layout, Rows) for layout in plan.need)
    return fails and rows and not plan.combine and PARTIAL not in plan.need


__all__ = ["FAILS_EMPTY", "FAILS_EMPTY_ON_CPU", "RULES", "skipped_empty"]
