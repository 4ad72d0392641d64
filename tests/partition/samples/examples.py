"""Samples of operations that give one result for each example."""

import tensorflow as tf

from samples.operands import B, add, add_open, between, floats, ints, weights

F32 = tf.float32
IMAGE = floats(B, 4, 4, 2)
SAME = dict(strides=[1, 1, 1, 1], padding="SAME")
VALID = dict(strides=[1, 2, 2, 1], padding="VALID")
KERNEL, DEPTH_KERNEL, KERNEL_3D = weights(2, 2, 2, 3), weights(2, 2, 2, 1), weights(2, 2, 2, 2, 3)
NOT_KNOWN = ("open", "static")
add("Conv2D", IMAGE, filter=KERNEL, **SAME, modes=NOT_KNOWN)
add_open("Conv2D", floats(1, B, 4, 2), filter=KERNEL, **VALID)
add_open("Conv", IMAGE, filter=KERNEL, **SAME)
add_open("DepthwiseConv2dNative", IMAGE, filter=DEPTH_KERNEL, **SAME)
add_open("Conv3D", floats(B, 2, 2, 2, 2), filter=KERNEL_3D, strides=[1] * 5, padding="SAME")
add_open(
    "Dilation2D",
    lambda op, x: op(input=x, filter=weights(2, 2, 2), rates=[1] * 4, **SAME),
    floats(B, 4, 4, 2, special=False),
)
add(
    "Conv2DBackpropInput",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 4, 4, 2]), filter=KERNEL, out_backprop=y, **SAME
    ),
    floats(B, 4, 4, 3),
)
add_open("Conv2DBackpropInput", floats(B, 4, 4, 3), input_sizes=[4, 4], filter=KERNEL, **SAME)
add(
    "Conv2DBackpropFilter",
    IMAGE,
    floats(B, 4, 4, 3, special=False),
    filter_sizes=[2, 2, 2, 3],
    **SAME,
    modes=NOT_KNOWN,
)
add_open(
    "Conv3DBackpropInputV2",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 2, 2, 2, 2]),
        filter=KERNEL_3D,
        out_backprop=y,
        strides=[1] * 5,
        padding="SAME",
    ),
    floats(B, 2, 2, 2, 3),
)
add_open(
    "Conv3DBackpropFilterV2",
    floats(B, 2, 2, 2, 2),
    floats(B, 2, 2, 2, 3, special=False),
    filter_sizes=[2, 2, 2, 2, 3],
    strides=[1] * 5,
    padding="SAME",
)
add(
    "DepthwiseConv2dNativeBackpropInput",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 4, 4, 2]), filter=DEPTH_KERNEL, out_backprop=y, **SAME
    ),
    floats(B, 4, 4, 2),
)
add_open(
    "DepthwiseConv2dNativeBackpropFilter",
    IMAGE,
    floats(B, 4, 4, 2, special=False),
    filter_sizes=[2, 2, 2, 1],
    **SAME,
)
add_open(
    "Dilation2DBackpropInput Dilation2DBackpropFilter",
    lambda op, x, y: op(input=x, filter=weights(2, 2, 2), out_backprop=y, rates=[1] * 4, **SAME),
    floats(B, 4, 4, 2, special=False),
    floats(B, 4, 4, 2, special=False),
)
POOL = dict(ksize=[1, 2, 2, 1], **VALID)
POOL_3D = dict(ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
add("MaxPool", IMAGE, **POOL, modes=NOT_KNOWN)
add_open("MaxPoolV2", IMAGE, **POOL)
add_open("AvgPool", IMAGE, **POOL)
add_open("AvgPool3D MaxPool3D", floats(B, 2, 2, 2, 2, dtype=F32), **POOL_3D)
for flag in (False, True):
    add_open(
        "MaxPoolWithArgmax", floats(B, 4, 4, 2, special=False), include_batch_in_index=flag, **POOL
    )
MAXED = floats(B, 2, 2, 2, special=False)
PLAIN_IMAGE = floats(B, 4, 4, 2, special=False)
add("MaxPoolGrad", PLAIN_IMAGE, MAXED, MAXED, **POOL, modes=NOT_KNOWN)
add_open("MaxPoolGradV2", PLAIN_IMAGE, MAXED, MAXED, **POOL)
add_open("MaxPoolGradGrad MaxPoolGradGradV2", PLAIN_IMAGE, MAXED, PLAIN_IMAGE, **POOL)
CUBE, CUBE_MAXED = (
    floats(B, 2, 2, 2, 2, dtype=F32, special=False),
    floats(B, 1, 1, 1, 2, dtype=F32, special=False),
)
add_open("MaxPool3DGrad", CUBE, CUBE_MAXED, CUBE_MAXED, **POOL_3D)
add_open("MaxPool3DGradGrad", CUBE, CUBE_MAXED, CUBE, **POOL_3D)
add_open(
    "MaxPoolGradWithArgmax",
    PLAIN_IMAGE,
    MAXED,
    ints(4, B, 2, 2, 2, dtype=tf.int64),
    include_batch_in_index=False,
    **POOL,
    wishes=False,
)
add(
    "AvgPoolGrad",
    lambda op, y: op(orig_input_shape=tf.stack([tf.shape(y)[0], 4, 4, 2]), grad=y, **POOL),
    floats(B, 2, 2, 2),
)
add_open(
    "AvgPool3DGrad",
    lambda op, y: op(orig_input_shape=tf.stack([tf.shape(y)[0], 2, 2, 2, 2]), grad=y, **POOL_3D),
    floats(B, 1, 1, 1, 2, dtype=F32),
)
add_open("LRN", floats(B, 2, 2, 2, dtype=F32))
LOCAL = floats(B, 2, 2, 2, dtype=F32, special=False)
add_open("LRNGrad", LOCAL, LOCAL, LOCAL)
add_open("SpaceToDepth DepthToSpace", floats(B, 4, 4, 4), block_size=2)
add_open("ExtractImagePatches", IMAGE, ksizes=[1, 2, 2, 1], rates=[1] * 4, **VALID)
add_open(
    "ExtractVolumePatches",
    floats(B, 2, 2, 2, 2),
    ksizes=[1, 2, 2, 2, 1],
    strides=[1, 2, 2, 2, 1],
    padding="VALID",
)
SMALL_IMAGE = floats(B, 2, 2, 2, dtype=F32)
add_open(
    "ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea",
    SMALL_IMAGE,
    size=[3, 3],
)
add_open("ResizeNearestNeighborGrad", floats(B, 3, 3, 2, dtype=F32), size=[2, 2])
add_open(
    "ResizeBilinearGrad ResizeBicubicGrad",
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
)
add_open(
    "ScaleAndTranslate",
    SMALL_IMAGE,
    size=[3, 3],
    scale=[1.5, 1.5],
    translation=[0.1, 0.1],
)
add_open(
    "ScaleAndTranslateGrad",
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
    scale=[1.5, 1.5],
    translation=[0.1, 0.1],
)
for count in (B, 1):
    add_open(
        "ImageProjectiveTransformV2",
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        output_shape=[2, 2],
        interpolation="BILINEAR",
    )
    add(
        "ImageProjectiveTransformV3",
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        output_shape=[2, 2],
        interpolation="BILINEAR",
        fill_value=0.0,
    )
add_open(
    "CropAndResize",
    lambda op, x, b: op(image=x, boxes=b, box_ind=tf.range(tf.shape(b)[0]) * 0, crop_size=[2, 2]),
    floats(2, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
)
add_open(
    "CropAndResize",
    floats(B, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
    ints(1, B),
    crop_size=[2, 2],
)
add_open(
    "DrawBoundingBoxes",
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
)
add_open(
    "DrawBoundingBoxesV2",
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
    colors=[[1.0, 0.0, 0.0]],
)
add("SparseSoftmaxCrossEntropyWithLogits", floats(B, 3), ints(3, B))
add("SoftmaxCrossEntropyWithLogits", floats(B, 3), floats(B, 3, special=False))
add("SoftmaxCrossEntropyWithLogits", floats(B, 3), floats(1, 3, special=False), modes=("static",))
QUANTIZED = floats(B, 2, dtype=F32, special=False)
add_open("FakeQuantWithMinMaxVarsGradient", QUANTIZED, QUANTIZED, min=-1.0, max=1.0, tolerance=1e-4)
add_open(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    QUANTIZED,
    QUANTIZED,
    min=[-1.0, -2.0],
    max=[1.0, 2.0],
    tolerance=1e-4,
)
