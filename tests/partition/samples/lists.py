"""Samples of operations on lists of tensors."""

import tensorflow as tf

from samples.operands import B, T, add, add_open, floats, lists

F64 = tf.float64
LIST, FEW = lists(3, B, 2), lists(3, 2)
add_open("Identity ZerosLike", LIST)
add_open("AddN", lambda op, x, y: op(inputs=[x, y]), LIST, LIST)
add(
    "TensorListFromTensor",
    lambda op, x: op(tensor=x, element_shape=tf.stack([tf.shape(x)[1], 2])),
    floats(3, B, 2),
)
add_open(
    "TensorListFromTensor", lambda op, x: op(tensor=x, element_shape=tf.constant(-1)), floats(T, B)
)
add_open("TensorListSetItem", LIST, floats(B, 2), index=1)
add_open("TensorListPushBack", LIST, floats(B, 2))
add_open(
    "TensorListPopBack",
    lambda op, x, y: op(input_handle=x, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
)
add_open(
    "TensorListGetItem",
    lambda op, x, y: op(input_handle=x, index=1, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
)
add_open(
    "TensorListStack",
    lambda op, x, y: op(input_handle=x, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
)
add_open(
    "TensorListGather",
    lambda op, x, y: op(
        input_handle=x, indices=[2, 0], element_shape=tf.shape(y), element_dtype=F64
    ),
    LIST,
    floats(B, 2),
)
add_open("TensorListScatterIntoExistingList", LIST, floats(2, B, 2), indices=[0, 2])
add_open(
    "TensorListConcatV2",
    lambda op, x, y: op(
        input_handle=x,
        element_shape=tf.stack([-1, tf.shape(y)[0]]),
        leading_dims=tf.constant([], tf.int64),
        element_dtype=F64,
    ),
    lists(3, 2, B),
    floats(B),
)
add_open(
    "TensorListSplit",
    lambda op, x: op(
        tensor=x,
        element_shape=tf.stack([-1, tf.shape(x)[1]]),
        lengths=tf.constant([1, 1, 1], tf.int64),
    ),
    floats(3, B),
)
add_open(
    "TensorListScatter",
    lambda op, x: op(tensor=x, indices=[1, 0], element_shape=tf.shape(x)[1:]),
    floats(2, B),
)
add_open(
    "TensorListScatterV2",
    lambda op, x: op(tensor=x, indices=[1, 0], element_shape=tf.shape(x)[1:], num_elements=2),
    floats(2, B),
)
add_open("TensorListLength", LIST)
add_open("TensorListElementShape", LIST, shape_type=tf.int32)
add_open("TensorListResize", LIST, size=2)
add_open("TensorListConcatLists", LIST, LIST, element_dtype=F64)
