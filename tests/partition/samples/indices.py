"""Samples of gathers, scatters and counts."""

import numpy as np
import tensorflow as tf

from samples.operands import B, T, add, add_open, floats, ints

add("GatherV2", floats(4, 2), ints(4, B, 2), axis=0)
add("GatherV2", floats(B, 3), ints(3, 2), axis=1)
add("GatherV2", floats(B, 3), ints(1, B), axis=0)
add("GatherV2", floats(B, 3), ints(1, B), axis=0)
add("GatherV2", lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[0]), axis=0), floats(B, 3))
add(
    "GatherV2",
    lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[1]), axis=1),
    floats(2, B, 3),
)
add(
    "GatherV2", lambda op, x: op(params=x, indices=tf.range(2), axis=0), floats(B, 3), one_row=False
)
add(
    "GatherV2",
    lambda op, x: op(
        params=x,
        indices=tf.where(tf.shape(x)[0] > 1, tf.range(tf.shape(x)[0]), 0),
        axis=0,
    ),
    floats(B, 3),
)
add("GatherV2", floats(B, 3, 2), ints(3, B, 2), axis=1, batch_dims=1)
add_open("GatherV2", floats(2, 3, B), ints(3, 2, T), axis=-2, batch_dims=1)
add_open("GatherV2", floats(2, 3), ints(3, 2, B), axis=1, batch_dims=-1)
add_open("GatherV2", floats(2, B, 3), ints(3, 2, 2), axis=2, batch_dims=1)
add_open("GatherV2", floats(2, 3), ints(3, B), axis=1)
add_open(
    "GatherV2",
    lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[0]), axis=1, batch_dims=1),
    floats(B, B),
)
VARIABLE = tf.Variable(np.arange(12.0).reshape(6, 2))
add_open("ResourceGather", ints(6, B, 2), resource=VARIABLE.handle, dtype=tf.float64)
add_open("ResourceGatherNd", ints(2, B, 2), resource=VARIABLE.handle, dtype=tf.float64)
add("GatherNd", floats(3, 3, 2), ints(3, B, 2))
add("GatherNd", floats(3, B), ints(3, 2, 1))
add_open(
    "GatherNd", lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[0])[:, None]), floats(B, 2)
)
add("ScatterNd", ints(4, B, 1), floats(B, 2), shape=[4, 2])
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=tf.stack([4, tf.shape(x)[1]])),
    ints(4, 3, 1),
    floats(3, B),
)
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=tf.stack([tf.shape(x)[0], 2])),
    ints(1, B, 1),
    floats(B, 2),
)
add_open("ScatterNd", ints(3, T, B, 2), floats(T, B), shape=[3, 3])
add_open(
    "TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin TensorScatterUpdate",
    floats(3, 2, special=False),
    ints(3, B, 1),
    floats(B, 2),
)
add_open(
    "TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin TensorScatterUpdate",
    floats(3, B, special=False),
    ints(3, 2, 1),
    floats(2, B),
)
SEGMENTED = "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd"
add_open(SEGMENTED, floats(B, 2), ints(4, B, low=-1), num_segments=4)
add_open(SEGMENTED, floats(2, T, B), ints(4, 2, T), num_segments=4)
add(
    "UnsortedSegmentSum",
    lambda op, x, n: op(data=x, segment_ids=n, num_segments=tf.shape(x)[0]),
    floats(B, 2),
    ints(1, B),
)
add(
    "DenseBincount",
    lambda op, x: op(input=x, size=4, weights=tf.constant([], tf.float32)),
    ints(5, B),
)
add(
    "DenseBincount",
    lambda op, x: op(input=x, size=4, weights=tf.constant([], tf.float32)),
    ints(5, B, 3),
)
for flag in (False, True):
    add_open(
        "DenseBincount",
        lambda op, x, f=flag: op(
            input=x, size=4, weights=tf.constant([], tf.float64), binary_output=f
        ),
        ints(5, 2, B),
    )
    add_open(
        "DenseBincount",
        lambda op, x, f=flag: op(
            input=x, size=4, weights=tf.constant([], tf.float64), binary_output=f
        ),
        ints(5, B),
    )
add_open("DenseBincount", ints(5, B), floats(B, special=False), size=4)
add_open("DenseBincount", ints(5, B, 3), floats(B, 3, special=False), size=4)
add_open(
    "Bincount", lambda op, x: op(arr=x, size=4, weights=tf.constant([], tf.float64)), ints(5, B)
)
add_open(
    "Bincount", lambda op, x: op(arr=x, size=4, weights=tf.constant([], tf.float64)), ints(5, B, 3)
)
add_open("Bincount", ints(5, B), floats(B, special=False), size=4)
