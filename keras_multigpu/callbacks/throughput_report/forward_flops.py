"""Counts the operations of a model's forward pass, from its graph.

Matrix products and convolutions count, with two operations (one multiplication, one addition) for
each term of each sum; everything else is negligible. TensorFlow's own counter,
`tf.compat.v1.profiler`, leaves out BatchMatMul, Einsum and Conv3D, and so most of a transformer.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, model_internals

TRAINING = 3
"""How many forward passes a training step costs: the gradients of inputs and of weights each cost
as much as the forward pass."""

LOOPS = {"While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall", "XlaLaunch"}
"""Operations that contain others, which are not counted."""


def forward_flops(model: keras.Model, x: Any) -> int | None:
    """The operations of a forward pass for one example; None if they cannot be counted."""
    specs = keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec([1, *leaf.shape[1:]], leaf.dtype), x
    )
    with graph_internals.single_device():
        traced = tf.function(
            lambda inputs: model_internals.called(model, inputs, training=False), autograph=False
        ).get_concrete_function(specs)
    total = 0
    for operation in traced.graph.get_operations():
        if operation.type in LOOPS:
            return None
        if operation.type in RULES:
            count = RULES[operation.type](operation)
            if count is None:
                return None
            total += 2 * count
    return total


def size(shape: Any) -> int | None:
    """The number of elements; None if unknown. A first axis of unknown size has one example."""
    if shape.rank is None:
        return None
    first, rest = shape.as_list()[:1], shape.as_list()[1:]
    return times(*(1 if number is None else number for number in first), *rest)


def times(*numbers: int | None) -> int | None:
    return None if None in numbers else int(np.prod([n for n in numbers if n is not None]))


def product(operation: Any) -> int | None:
    """Each element of the result is a sum over the inner dimension."""
    turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    inner = operation.inputs[0].shape[-2 if turned else -1]
    return times(size(operation.outputs[0].shape), inner)


def einsum(operation: Any) -> int | None:
    """Each element of the result is a sum over the labels that it lacks."""
    if len(operation.inputs) < 2:
        return 0
    terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
    sizes: dict[str, int | None] = {}
    for term, tensor in zip(terms.split(","), operation.inputs, strict=True):
        before, _, after = term.partition("...")
        for position, label in enumerate(before):
            sizes[label] = tensor.shape[position]
        for position, label in enumerate(reversed(after), 1):
            sizes[label] = tensor.shape[-position]
    summed = [number for label, number in sizes.items() if label not in result]
    return times(size(operation.outputs[0].shape), *summed)


def convolution(operation: Any) -> int | None:
    """Each element of the result is a sum over window and input channels of its group."""
    return times(size(operation.outputs[0].shape), size(operation.inputs[1].shape[:-1]))


def depthwise(operation: Any) -> int | None:
    """Each element of the result is a sum over the window."""
    return times(size(operation.outputs[0].shape), size(operation.inputs[1].shape[:2]))


def transposed(operation: Any) -> int | None:
    """Each element of the input contributes to a window of all output channels."""
    return times(size(operation.inputs[2].shape), size(operation.inputs[1].shape[:-1]))


RULES: dict[str, Callable[[Any], int | None]] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), product),
    "Einsum": einsum,
    "Conv2D": convolution,
    "Conv3D": convolution,
    "DepthwiseConv2dNative": depthwise,
    "Conv2DBackpropInput": transposed,
    "Conv3DBackpropInputV2": transposed,
}
"""How many multiplications an operation of each type takes."""
