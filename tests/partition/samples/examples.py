"""Samples of operations that give one result for each example."""

import tensorflow as tf

from samples.operands import B, add, add_open, between, floats, ints, weights

F32 = tf.float32
IMAGE = floats(B, 4, 4, 2)
SAME = dict(strides=[1, 1, 1, 1], padding="SAME")
VALID = dict(strides=[1, 2, 2, 1], padding="VALID")
KERNEL, DEPTH_KERNEL, KERNEL_3D = weights(2, 2, 2, 3), weights(2, 2, 2, 1), weights(2, 2, 2, 2, 3)
NOT_KNOWN = ("open", "static")
add("Conv2D", lambda op, x: op(input=x, filter=KERNEL, **SAME), IMAGE, modes=NOT_KNOWN)
add_open("Conv2D", lambda op, x: op(input=x, filter=KERNEL, **VALID), floats(1, B, 4, 2))
add_open("Conv", lambda op, x: op(input=x, filter=KERNEL, **SAME), IMAGE)
add_open("DepthwiseConv2dNative", lambda op, x: op(input=x, filter=DEPTH_KERNEL, **SAME), IMAGE)
add_open(
    "Conv3D",
    lambda op, x: op(input=x, filter=KERNEL_3D, strides=[1] * 5, padding="SAME"),
    floats(B, 2, 2, 2, 2),
)
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
add_open(
    "Conv2DBackpropInput",
    lambda op, y: op(input_sizes=[4, 4], filter=KERNEL, out_backprop=y, **SAME),
    floats(B, 4, 4, 3),
)
add(
    "Conv2DBackpropFilter",
    lambda op, x, y: op(input=x, filter_sizes=[2, 2, 2, 3], out_backprop=y, **SAME),
    IMAGE,
    floats(B, 4, 4, 3, special=False),
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
    lambda op, x, y: op(
        input=x, filter_sizes=[2, 2, 2, 2, 3], out_backprop=y, strides=[1] * 5, padding="SAME"
    ),
    floats(B, 2, 2, 2, 2),
    floats(B, 2, 2, 2, 3, special=False),
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
    lambda op, x, y: op(input=x, filter_sizes=[2, 2, 2, 1], out_backprop=y, **SAME),
    IMAGE,
    floats(B, 4, 4, 2, special=False),
)
add_open(
    "Dilation2DBackpropInput Dilation2DBackpropFilter",
    lambda op, x, y: op(input=x, filter=weights(2, 2, 2), out_backprop=y, rates=[1] * 4, **SAME),
    floats(B, 4, 4, 2, special=False),
    floats(B, 4, 4, 2, special=False),
)
POOL = dict(ksize=[1, 2, 2, 1], **VALID)
POOL_3D = dict(ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
add("MaxPool", lambda op, x: op(input=x, **POOL), IMAGE, modes=NOT_KNOWN)
add_open("MaxPoolV2", lambda op, x: op(input=x, **POOL), IMAGE)
add_open("AvgPool", lambda op, x: op(value=x, **POOL), IMAGE)
add_open(
    "AvgPool3D MaxPool3D",
    lambda op, x: op(input=x, **POOL_3D),
    floats(B, 2, 2, 2, 2, dtype=F32),
    tolerance=1e-5,
)
for flag in (False, True):
    add_open(
        "MaxPoolWithArgmax",
        lambda op, x, f=flag: op(input=x, include_batch_in_index=f, **POOL),
        floats(B, 4, 4, 2, special=False),
    )
MAXED = floats(B, 2, 2, 2, special=False)
PLAIN_IMAGE = floats(B, 4, 4, 2, special=False)
add(
    "MaxPoolGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    MAXED,
    modes=NOT_KNOWN,
)
add_open(
    "MaxPoolGradV2",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    MAXED,
)
add_open(
    "MaxPoolGradGrad MaxPoolGradGradV2",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    PLAIN_IMAGE,
)
CUBE, CUBE_MAXED = (
    floats(B, 2, 2, 2, 2, dtype=F32, special=False),
    floats(B, 1, 1, 1, 2, dtype=F32, special=False),
)
add_open(
    "MaxPool3DGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL_3D),
    CUBE,
    CUBE_MAXED,
    CUBE_MAXED,
    tolerance=1e-5,
)
add_open(
    "MaxPool3DGradGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL_3D),
    CUBE,
    CUBE_MAXED,
    CUBE,
    tolerance=1e-5,
)
add_open(
    "MaxPoolGradWithArgmax",
    lambda op, x, d, n: op(input=x, grad=d, argmax=n, include_batch_in_index=False, **POOL),
    PLAIN_IMAGE,
    MAXED,
    ints(4, B, 2, 2, 2, dtype=tf.int64),
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
    tolerance=1e-5,
)
add_open("LRN", lambda op, x: op(input=x), floats(B, 2, 2, 2, dtype=F32), tolerance=1e-5)
LOCAL = floats(B, 2, 2, 2, dtype=F32, special=False)
add_open(
    "LRNGrad",
    lambda op, x, y, z: op(input_grads=x, input_image=y, output_image=z),
    LOCAL,
    LOCAL,
    LOCAL,
    tolerance=1e-5,
)
add_open("SpaceToDepth DepthToSpace", lambda op, x: op(input=x, block_size=2), floats(B, 4, 4, 4))
add_open(
    "ExtractImagePatches",
    lambda op, x: op(images=x, ksizes=[1, 2, 2, 1], rates=[1] * 4, **VALID),
    IMAGE,
)
add_open(
    "ExtractVolumePatches",
    lambda op, x: op(input=x, ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID"),
    floats(B, 2, 2, 2, 2),
)
SMALL_IMAGE = floats(B, 2, 2, 2, dtype=F32)
add_open(
    "ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea",
    lambda op, x: op(images=x, size=[3, 3]),
    SMALL_IMAGE,
    tolerance=1e-5,
)
add_open(
    "ResizeNearestNeighborGrad",
    lambda op, y: op(grads=y, size=[2, 2]),
    floats(B, 3, 3, 2, dtype=F32),
    tolerance=1e-5,
)
add_open(
    "ResizeBilinearGrad ResizeBicubicGrad",
    lambda op, y, x: op(grads=y, original_image=x),
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
    tolerance=1e-5,
)
add_open(
    "ScaleAndTranslate",
    lambda op, x: op(images=x, size=[3, 3], scale=[1.5, 1.5], translation=[0.1, 0.1]),
    SMALL_IMAGE,
    tolerance=1e-5,
)
add_open(
    "ScaleAndTranslateGrad",
    lambda op, y, x: op(grads=y, original_image=x, scale=[1.5, 1.5], translation=[0.1, 0.1]),
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
    tolerance=1e-5,
)
for count in (B, 1):
    add_open(
        "ImageProjectiveTransformV2",
        lambda op, x, t: op(images=x, transforms=t, output_shape=[2, 2], interpolation="BILINEAR"),
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        tolerance=1e-5,
    )
    add(
        "ImageProjectiveTransformV3",
        lambda op, x, t: op(
            images=x, transforms=t, output_shape=[2, 2], interpolation="BILINEAR", fill_value=0.0
        ),
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        tolerance=1e-5,
    )
add_open(
    "CropAndResize",
    lambda op, x, b: op(image=x, boxes=b, box_ind=tf.range(tf.shape(b)[0]) * 0, crop_size=[2, 2]),
    floats(2, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
    tolerance=1e-5,
)
add_open(
    "CropAndResize",
    lambda op, x, b, n: op(image=x, boxes=b, box_ind=n, crop_size=[2, 2]),
    floats(B, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
    ints(1, B),
    tolerance=1e-5,
)
add_open(
    "DrawBoundingBoxes",
    lambda op, x, b: op(images=x, boxes=b),
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
    tolerance=1e-5,
)
add_open(
    "DrawBoundingBoxesV2",
    lambda op, x, b: op(images=x, boxes=b, colors=[[1.0, 0.0, 0.0]]),
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
    tolerance=1e-5,
)
add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    ints(3, B),
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    floats(B, 3, special=False),
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    floats(1, 3, special=False),
    modes=("static",),
)
QUANTIZED = floats(B, 2, dtype=F32, special=False)
add_open(
    "FakeQuantWithMinMaxVarsGradient",
    lambda op, y, x: op(gradients=y, inputs=x, min=-1.0, max=1.0),
    QUANTIZED,
    QUANTIZED,
    tolerance=1e-4,
)
add_open(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    lambda op, y, x: op(gradients=y, inputs=x, min=[-1.0, -2.0], max=[1.0, 2.0]),
    QUANTIZED,
    QUANTIZED,
    tolerance=1e-4,
)
