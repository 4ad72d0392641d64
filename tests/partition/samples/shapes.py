"""Samples of operations on shapes."""

import tensorflow as tf

from samples.examples import NOT_KNOWN
from samples.operands import B, C, T, add, add_open, complexes, floats, ints, texts

for before, after in (
    ((B, 6), lambda n, t: [n, 2, 3]),
    ((B, 6), lambda n, t: [-1, 3]),
    ((B, T, 2), lambda n, t: [n * t, 2]),
    ((B, T, 2), lambda n, t: [n, -1]),
    ((B * T, 2), lambda n, t: [-1, t, 2]),
    ((B, 4), lambda n, t: [-1]),
    ((4 * B,), lambda n, t: [-1, 4]),
    ((4 * B,), lambda n, t: [4, -1]),
    ((2 * B, 3), lambda n, t: [2, -1, 3]),
    ((2, B, 3), lambda n, t: [-1, 3]),
    ((T, B, 3), lambda n, t: [-1, 3]),
    ((B, 4), lambda n, t: [4, n]),
    ((B, 1, 3), lambda n, t: [1, n, 3]),
    ((B, 4, 3), lambda n, t: [-1, 6]),
    ((4 * B, 6), lambda n, t: [-1, 8]),
    ((2, 3, B), lambda n, t: [6, n]),
    ((6, B), lambda n, t: [2, 3, n]),
    ((B, 1), lambda n, t: [n]),
    ((B, 2), lambda n, t: [2, -1]),
    ((B, T), lambda n, t: [n, t, 1]),
    ((2 * B * T, 2), lambda n, t: [-1, t, 2]),
):
    place = next((i for i, d in enumerate(before) if "time" in getattr(d, "names", ())), None)

    def reshaped(op, x, y, after=after, before=before):
        return op(tensor=x, shape=tf.stack(after(tf.shape(y)[0], tf.shape(y)[1])))

    add("Reshape", reshaped, floats(*before), floats(B, T))
add_open("Reshape", floats(6, 2), shape=[4, 3])
for axis in (0, 1, 2, -1):
    add("ExpandDims", floats(T, B), axis=axis)
add("Squeeze", floats(B, 1, 2), axis=[1])
add("Squeeze", floats(1, B, 2, 1), axis=[-1, 0])
add("Squeeze", floats(B, 2))
add("Squeeze", floats(B, 1, 2))
for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
    add("Transpose", floats(B, T, 2), perm=order)
add_open("ConjugateTranspose", complexes(B, 2), perm=[1, 0])
add(
    "BroadcastTo",
    lambda op, x, y: op(input=x, shape=tf.stack([2, tf.shape(y)[0], 3])),
    floats(B, 1),
    floats(B),
)
add_open(
    "BroadcastTo",
    lambda op, x, y: op(input=x, shape=tf.stack([tf.shape(y)[0], 3])),
    floats(1, 3),
    floats(B),
)
add("EnsureShape", floats(B, 2), shape=[None, 2])
for times in ([1, 2], [2, 1], [1, 1], [3, 2]):
    add("Tile", floats(B, 2), multiples=times)
    add_open("Tile", floats(2, 2 * B), multiples=times)
add("Tile", lambda op, x: op(input=x, multiples=tf.stack([1, tf.shape(x)[1]])), floats(B, T))
add("Tile", lambda op, x: op(input=x, multiples=tf.stack([tf.shape(x)[0], 1])), floats(B, 2))
for pads in ([[0, 0], [1, 2]], [[1, 0], [0, 0]], [[0, 1], [1, 0]]):
    add("Pad", floats(B, 2), paddings=pads)
    add(
        "PadV2",
        lambda op, x, p=pads: op(input=x, paddings=p, constant_values=tf.constant(7.0, tf.float64)),
        floats(B, 2),
    )
add(
    "Pad",
    lambda op, x: op(
        input=x, paddings=tf.stack([tf.stack([0, tf.shape(x)[0]]), tf.constant([1, 0])])
    ),
    floats(B, 2),
)
add(
    "PadV2",
    lambda op, x: op(
        input=x,
        paddings=tf.stack([tf.stack([2 * tf.shape(x)[0], 0]), tf.constant([1, 0])]),
        constant_values=tf.constant(1.0, tf.float64),
    ),
    floats(2 * B, 2),
)
for mode in ("REFLECT", "SYMMETRIC"):
    add_open("MirrorPad", floats(B, 3), paddings=[[0, 0], [1, 1]], mode=mode)
    add_open("MirrorPadGrad", floats(B, 5), paddings=[[0, 0], [1, 1]], mode=mode)
add("MirrorPad", floats(B, 3), paddings=[[1, 1], [0, 0]], mode="SYMMETRIC", modes=("static",))
for axis in (0, 1, -1):
    add("ConcatV2", lambda op, x, y, a=axis: op(values=[x, y], axis=a), floats(B, 2), floats(B, 2))
add("ConcatV2", lambda op, x, y: op(values=[x, y], axis=0), floats(B, 2), floats(C, 2))
add("ConcatV2", lambda op, x, y: op(values=[x, y], axis=0), floats(B, 2), floats(2, 2))
add_open("ConcatV2", lambda op, x, y: op(values=[x, y, x], axis=1), floats(3, B), floats(3, 2 * B))
for axis in (0, 1, -1):
    add("Pack", lambda op, x, y, a=axis: op(values=[x, y], axis=a), floats(B, 2), floats(B, 2))
    add_open("Unpack", floats(2, 2, 2) if axis == 0 else floats(B, 2, 2), num=2, axis=axis)
add("Unpack", floats(2, B), num=2, axis=0)
add("Split", floats(2 * B, 2), axis=0, num_split=2)
add("Split", floats(2 * B, 2), axis=1, num_split=2)
add_open("Split", floats(4 * B), axis=0, num_split=2)
add(
    "SplitV",
    lambda op, x, y: op(
        value=x, size_splits=tf.stack([tf.shape(y)[0], tf.shape(y)[0]]), axis=0, num_split=2
    ),
    floats(2 * B, 2),
    floats(B),
)
add("SplitV", floats(B, 3), size_splits=[1, 2], axis=1, num_split=2)
add_open("SplitV", floats(B, 3), size_splits=[2, -1], axis=-1, num_split=2)
for begin, size in (([0, 1], [-1, 1]), ([1, 0], [-1, 2]), ([0, 0], [1, 2])):
    add(
        "Slice",
        floats(B, 2),
        begin=begin,
        size=size,
        modes=("open", "unknown") if begin[0] else ("open", "static", "unknown"),
    )
for first in (0, 1):
    add(
        "Slice",
        lambda op, x, y, f=first: op(
            input=x, begin=tf.stack([f * tf.shape(y)[0], 0]), size=tf.stack([tf.shape(y)[0], 2])
        ),
        floats(2 * B, 2),
        floats(B),
    )
add("OneHot", ints(3, B), depth=3, on_value=1.0, off_value=0.0)
for axis in (0, 1, -1):
    add_open("OneHot", ints(3, B, 2), depth=3, on_value=1.0, off_value=0.0, axis=axis)
add("SpaceToBatchND", floats(B, 4, 2), block_shape=[2], paddings=[[0, 0]])
add_open("SpaceToBatchND", floats(2, 4, B), block_shape=[2], paddings=[[0, 0]])
add("BatchToSpaceND", floats(2 * B, 2, 2), block_shape=[2], crops=[[0, 0]])
add("Shape Size Rank", floats(T, B))
add_open("ShapeN", lambda op, x, y: op(input=[x, y]), floats(T, B), floats(2 * B))
# Slices as Python writes them, x[...].
for index in (
    lambda x: x[:, 1],
    lambda x: x[..., None],
    lambda x: x[:, None],
    lambda x: x[None],
    lambda x: x[:1],
    lambda x: x[::2],
    lambda x: x[-1],
    lambda x: x[1:],
    lambda x: x[..., 0],
    lambda x: x[:, ::-1],
    lambda x: x[None, ..., None, 0],
):
    add("StridedSlice", index, floats(B, 2, 2), modes=NOT_KNOWN)
for index in (
    lambda x: x[0],
    lambda x: x[-1:],
    lambda x: x[0, ..., 1],
    lambda x: x[None, :1, 1:],
):
    add("StridedSlice", index, floats(B, 2, 2))
add("StridedSlice", lambda x: x[:, -1], ints(9, 2, 2 * B))
add("StridedSlice", lambda x: x[5], floats(B, 2), modes=("static",))
add_open("StridedSlice", lambda x: x[0], texts(B, 2))
add_open("StridedSlice", lambda x: x[::-1], floats(B, 2))
add_open("StridedSlice", lambda x: x[:-1], floats(B, 2))
for index in (
    lambda x, n: x[:n],
    lambda x, n: x[n:],
    lambda x, n: x[0:n, ..., 1:],
    lambda x, n: x[: n - 1],
    lambda x, n: x[n // 2 :],
    lambda x, n: x[: 2 * n],
):
    add(
        "StridedSlice",
        lambda x, y, i=index: i(x, tf.shape(y)[0]),
        floats(2 * B, 2, 2),
        floats(B),
        modes=NOT_KNOWN,
    )
add("StridedSlice", lambda x, y: x[:, tf.shape(y)[0] :], floats(2, 2 * B), floats(B))


def strided_gradient(name, index, rows, cols, dy):
    def made(op, y, n):
        count = tf.shape(n)[0]
        return op(shape=tf.stack([count * rows, cols]), strides=[1, 1], dy=y, **index(count))

    add("StridedSliceGrad", made, floats(*dy), floats(B))


strided_gradient(
    "column", lambda n: dict(begin=[0, 1], end=[0, 2], begin_mask=1, end_mask=1), 1, 3, (B, 1)
)
strided_gradient(
    "one column",
    lambda n: dict(begin=[0, 0], end=[0, 1], begin_mask=1, end_mask=1, shrink_axis_mask=2),
    1,
    3,
    (B,),
)
strided_gradient("first half", lambda n: dict(begin=[0, 0], end=tf.stack([n, 2])), 2, 2, (B, 2))
strided_gradient(
    "second half",
    lambda n: dict(begin=tf.stack([n, 0]), end=[0, 0], begin_mask=2, end_mask=3),
    2,
    2,
    (B, 2),
)
strided_gradient("dots", lambda n: dict(begin=[0, 0], end=[0, 1], ellipsis_mask=1), 1, 3, (B, 1))
strided_gradient("all", lambda n: dict(begin=[0, 0], end=tf.stack([n, 2])), 1, 2, (B, 2))
strided_gradient(
    "backwards",
    lambda n: dict(begin=[0, 0], end=[0, 0], begin_mask=3, end_mask=3),
    2,
    2,
    (2 * B, 2),
)
strided_gradient(
    "new axis",
    lambda n: dict(begin=[0, 0], end=[0, 0], new_axis_mask=1, begin_mask=2, end_mask=2),
    1,
    2,
    (1, B, 2),
)
