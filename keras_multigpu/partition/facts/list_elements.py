"""What is known of the elements of lists of tensors, as loops keep them."""

from dataclasses import replace

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts.axes import entry_of
from keras_multigpu.partition.facts.facts import NOTHING, Elements, Facts
from keras_multigpu.partition.facts.families import LIST_WRITES
from keras_multigpu.partition.facts.lengths import shape_in
from keras_multigpu.partition.program import Operation


def note_elements(op: Operation, facts: Facts) -> None:
    """Note what is known of the list that an operation returns, or of what it reads from one."""
    if not any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs)):
        return
    before = facts.elements.get(op.inputs[0]) if op.inputs else None
    after = elements_after(op, facts, before)
    if after is not None and op.outputs[0].dtype == tf.variant:
        facts.elements[op.outputs[0]] = after
    if before is not None:
        note_read(op, facts, before)


def elements_after(op: Operation, facts: Facts, before: Elements | None) -> Elements | None:
    """What is known of the list that an operation returns, given the list that it takes."""
    if op.type == "TensorListFromTensor":
        dims, dtype = facts.dims(op.inputs[0]), op.inputs[0].dtype
        return None if dims is None else Elements(tuple(dims[1:]), None, dims[0], dtype)
    if op.type in ("TensorListReserve", "EmptyTensorList"):
        shape = shape_in(facts, op.inputs[0])
        known = None if shape is None or None in shape else tuple(shape)
        count = entry_of(facts, op.inputs[1]) if op.type == "TensorListReserve" else None
        return Elements(known, count=count, dtype=op.get_attr("element_dtype"))
    if before is None:
        return None
    if op.type in LIST_WRITES:
        item = op.inputs[LIST_WRITES[op.type]]
        dims, value = facts.dims(item), facts.value(item)
        written = Elements(
            None if dims is None else tuple(dims),
            None if value is None else (np.shape(value), tuple(np.ravel(value))),
        )
        count = before.count if op.type == "TensorListSetItem" else None
        return replace(before.joined(written), count=count, dtype=item.dtype)
    if op.type == "ZerosLike":
        return replace(before, value=None)
    return before if op.type in ("Identity", "TensorListPopBack", "TensorListResize") else None


def note_read(op: Operation, facts: Facts, elements: Elements) -> None:
    """Note what is known of the elements that an operation reads from a list, or of their shape."""
    reads = ("TensorListGetItem", "TensorListPopBack", "TensorListStack")
    if op.type in reads and elements.dims is not None:
        stacked = [elements.count] if op.type == "TensorListStack" else []
        facts.note(op.outputs[-1], [*stacked, *elements.dims])
    if op.type == "TensorListPopBack" and elements.value not in (None, NOTHING):
        shape, entries = elements.value
        array = np.empty(len(entries), object)
        array[:] = entries
        facts.note_value(op.outputs[1], array.reshape(shape))
    if op.type == "TensorListElementShape" and elements.dims is not None:
        facts.note_value(op.outputs[0], np.array(elements.dims, object))
