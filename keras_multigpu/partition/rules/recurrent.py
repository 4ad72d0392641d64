"""cuDNN's LSTM and GRU, which Keras uses on GPUs: each example has a state of its own.

What the kernel reserves for the gradient has no known shape. It is in rows as far as its replica is
concerned; nothing else can use it, since rows of an unknown rank cannot be gathered.
"""

from collections.abc import Sequence
from typing import TypeGuard

import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.program import CUDNN_RNNS, Operation, has_effect
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.rules.plan import Plan, rows_of
from keras_multigpu.partition.rules.registration import rows_rule

INPUTS = ("input", "input_h", "input_c", "params", "sequence_lengths")
OUTPUTS = ("output", "output_h", "output_c")
RESERVED = ("reserve_space", "host_reserved")
GIVEN_BACK = tuple(f"{name}_backprop" for name in OUTPUTS)
GRADIENTS = ("input_backprop", "input_h_backprop", "input_c_backprop", "params_backprop")


@rows_rule(*CUDNN_RNNS)
def cudnn_rnn(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """Rows along the axis of the examples stay rows; gradients of the weights are summed."""
    axis = 1 if op.get_attr("time_major") else 0
    found = rows_of(ins)
    dims = facts.dims(op.inputs[0])
    if found is None or dims is None or has_effect(op):
        return None
    if dims[axis] != facts.length(found.blocks):
        return None
    rows, is_gradient = found.at(axis), op.type == "CudnnRNNBackpropV3"
    names = (*INPUTS, *OUTPUTS, *GIVEN_BACK, *RESERVED) if is_gradient else INPUTS
    made = GRADIENTS if is_gradient else (*OUTPUTS, *RESERVED)
    need, out = layouts(names, rows, op), layouts(made, rows, op)
    if any(isinstance(have, Rows) and have != want for have, want in zip(ins, need, strict=True)):
        return None
    if is_gradient and set(ins[-2:]) != {rows}:
        return None  # The kernel before it had all rows.

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        # The kernel fails without rows. Adding none, and leaving none out, copies nothing.
        length = replica.local_length(rows.blocks)
        given = [
            padded(name, tensor, layout.axis, 1 - length) if has_rows(layout, name) else tensor
            for name, layout, tensor in zip(names, need, inputs, strict=True)
        ]
        return [
            first_rows(tensor, axis, length) if has_rows(layout, name) else tensor
            for name, layout, tensor in zip(made, out, replica.run(op, given), strict=True)
        ]

    return Plan(need, out, emit)


def layouts(names: Sequence[str], rows: Rows, op: Operation) -> tuple[Layout, ...]:
    """The layouts of inputs or results with these names."""
    fixed: dict[str, Layout] = {
        "params": REPLICATED,
        "params_backprop": PARTIAL,
        "sequence_lengths": rows.at(0),
    }
    if op.get_attr("rnn_mode") != b"lstm":
        # Others than an LSTM have no cell: a scalar without meaning stands for it.
        fixed |= {name: REPLICATED for name in names if "_c" in name}
    return tuple(fixed.get(name, rows) for name in names)


def has_rows(layout: Layout, name: str) -> TypeGuard[Rows]:
    return isinstance(layout, Rows) and name not in RESERVED


def padded(name: str, tensor: tf.Tensor, axis: int, missing: tf.Tensor) -> tf.Tensor:
    """An input with the rows added that are missing, whose gradients are zero."""
    missing, axes = tf.maximum(missing, 0), range(len(tensor.shape))
    pads = [[0, missing if place == axis else 0] for place in axes]
    # A sequence has at least one step.
    return tf.pad(tensor, pads, constant_values=int(name == "sequence_lengths"))


def first_rows(tensor: tf.Tensor, axis: int, length: tf.Tensor) -> tf.Tensor:
    return tensor[:length] if axis == 0 else tensor[:, :length]
