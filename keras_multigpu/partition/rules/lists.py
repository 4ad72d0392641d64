"""Lists of tensors, as loops keep them. The first write decides the layout of the elements.

Operations take the shape of whole elements, which becomes that of a replica's part.
"""

import functools

import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import REPLICATED, Items, Layout, Rows, joined, stacked
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica, with_entry
from keras_multigpu.partition.rules.plan import Plan, Rule, only, with_local_shape
from keras_multigpu.partition.rules.registration import rule


def element_of(layout: Layout) -> Layout:
    """The layout of the elements that are read from a list."""
    found = layout.element if isinstance(layout, Items) else None
    return REPLICATED if found is None else found


@rule("TensorListFromTensor", "TensorListSplit", "TensorListScatter", "TensorListScatterV2")
def list_of_tensor(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """The tensor is split along its first axis."""
    place = 2 if "Scatter" in op.type else 1
    if isinstance(ins[0], Rows):
        if ins[0].axis == 0:
            return None
        # `TensorListSplit` keeps that axis, with other lengths.
        is_split = op.type == "TensorListSplit"
        element: Layout = ins[0] if is_split else ins[0].at(ins[0].axis - 1)
    else:
        element = ins[0]
    return Plan(
        only({0: ins[0]}, len(ins)), (Items(element),), with_local_shape(op, place, element)
    )


@rule("TensorListSetItem", "TensorListPushBack", "TensorListScatterIntoExistingList")
def list_write(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    place = 2 if op.type == "TensorListSetItem" else 1
    value = ins[place]
    is_stacked = op.type == "TensorListScatterIntoExistingList"
    if is_stacked and isinstance(value, Rows):
        if value.axis == 0:
            return None
        value = value.at(value.axis - 1)
    element = ins[0].element if isinstance(ins[0], Items) else REPLICATED
    if element is None:
        element = value
    need = stacked(element) if is_stacked else element
    return Plan(only({0: Items(element), place: need}, len(ins)), (Items(element),))


@rule(
    "TensorListGetItem",
    "TensorListPopBack",
    "TensorListStack",
    "TensorListGather",
    "TensorListConcatV2",
)
def list_read(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    element = element_of(ins[0])
    place = 2 if op.type in ("TensorListGetItem", "TensorListGather") else 1
    results: tuple[Layout, ...] = (element,)
    if op.type in ("TensorListStack", "TensorListGather"):
        results = (stacked(element),)
    if op.type == "TensorListPopBack":
        results = (Items(element), element)
    if op.type == "TensorListConcatV2":
        if isinstance(element, Rows) and element.axis == 0:
            return None
        # The second result has the lengths of the elements.
        results = (element, REPLICATED)
    return Plan(only({0: Items(element)}, len(ins)), results, with_local_shape(op, place, element))


@rule("TensorListLength")
def list_length(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(ins, (REPLICATED,))


@rule("TensorListResize")
def list_resize(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(only({0: ins[0]}, 2), (ins[0],))


@rule("TensorListElementShape")
def list_element_shape(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    element = element_of(ins[0])

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        (shape,) = replica.run(op, inputs)
        if not isinstance(element, Rows):
            return [shape]
        length = replica.scalar(facts.length(element.blocks))
        # If elements may have any shape, this is the scalar -1.
        return [
            tf.cond(
                tf.rank(shape) > 0,
                lambda: with_entry(tf.reshape(shape, [-1]), element.axis, length),
                lambda: shape,
            )
        ]

    return Plan(ins, (REPLICATED,), emit)


@rule("TensorListConcatLists")
def list_concat(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    both = joined(*ins)
    return Plan((both, both), (both,))


def also_for_lists(of_tensors: Rule) -> Rule:
    """The rule of an operation on tensors that takes lists as well."""

    def either(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
        if not any(isinstance(layout, Items) for layout in ins):
            return of_tensors(op, ins, facts)
        lists = functools.reduce(joined, ins)
        return Plan((lists,) * len(ins), (lists,)) if isinstance(lists, Items) else None

    return either
