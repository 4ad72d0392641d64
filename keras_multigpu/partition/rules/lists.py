"""Lists of tensors, as loops keep them: how the elements lie is known once one is written.

An operation is given the shape of whole elements, which becomes that of a replica's.
"""

import functools

import tensorflow as tf

from keras_multigpu.partition.layouts import REPLICATED, Items, Layout, Rows, joined
from keras_multigpu.partition.plan import RULES, Emit, Facts, Plan, Rule, only, rule
from keras_multigpu.partition.site import Site, with_entry


def element_of(layout: Layout) -> Layout:
    """The layout of the elements that are read from a list."""
    found = layout.element if isinstance(layout, Items) else None
    return REPLICATED if found is None else found


def shape_at(place: int, element: Layout) -> Emit:
    """The operation itself, with a replica's shape of an element at this place."""

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape = inputs[place]
        if isinstance(element, Rows):
            # A scalar means that nothing is known of the shape.
            shape = site.local_shape(shape, element) if shape.shape.rank == 1 else anything(shape)
        return site.run([*inputs[:place], shape, *inputs[place + 1 :]])

    return emit


def anything(shape: tf.Tensor) -> tf.Tensor:
    return tf.constant(-1, shape.dtype)


@rule("TensorListFromTensor", "TensorListSplit", "TensorListScatter", "TensorListScatterV2")
def list_of_tensor(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """A tensor is cut along its first axis."""
    place = 2 if "Scatter" in op.type else 1
    if isinstance(ins[0], Rows):
        if ins[0].axis == 0:
            return None
        # What is split keeps the axis, of another length.
        element: Layout = ins[0] if op.type == "TensorListSplit" else ins[0].at(ins[0].axis - 1)
    else:
        element = ins[0]
    return Plan(only({0: ins[0]}, len(ins)), (Items(element),), shape_at(place, element))


@rule("TensorListSetItem", "TensorListPushBack", "TensorListScatterIntoExistingList")
def list_write(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    place = 2 if op.type == "TensorListSetItem" else 1
    value = ins[place]
    stacked = op.type == "TensorListScatterIntoExistingList"
    if stacked and isinstance(value, Rows):
        if value.axis == 0:
            return None
        value = value.at(value.axis - 1)
    element = ins[0].element if isinstance(ins[0], Items) else REPLICATED
    if element is None:
        element = value
    need = element.at(element.axis + 1) if stacked and isinstance(element, Rows) else element
    return Plan(only({0: Items(element), place: need}, len(ins)), (Items(element),))


@rule(
    "TensorListGetItem",
    "TensorListPopBack",
    "TensorListStack",
    "TensorListGather",
    "TensorListConcatV2",
)
def list_read(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    element = value = element_of(ins[0])
    place = 2 if op.type in ("TensorListGetItem", "TensorListGather") else 1
    if isinstance(element, Rows):
        if op.type == "TensorListConcatV2" and element.axis == 0:
            return None
        if op.type in ("TensorListStack", "TensorListGather"):
            value = element.at(element.axis + 1)
    results: tuple[Layout, ...] = (value,)
    if op.type == "TensorListPopBack":
        results = (Items(element), value)
    if op.type == "TensorListConcatV2":
        # How long each element was along the first axis.
        results = (value, REPLICATED)
    return Plan(only({0: Items(element)}, len(ins)), results, shape_at(place, element))


@rule("TensorListLength")
def list_length(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(ins, (REPLICATED,))


@rule("TensorListResize")
def list_resize(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(only({0: ins[0]}, 2), (ins[0],))


@rule("TensorListElementShape")
def list_element_shape(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    element = element_of(ins[0])

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        (shape,) = site.run(inputs)
        if not isinstance(element, Rows):
            return [shape]
        length = site.number(facts.length(element.blocks))
        # A list of anything has a scalar, -1, as the shape of elements.
        return [
            tf.cond(
                tf.rank(shape) > 0,
                lambda: with_entry(tf.reshape(shape, [-1]), element.axis, length),
                lambda: shape,
            )
        ]

    return Plan(ins, (REPLICATED,), emit)


@rule("TensorListConcatLists")
def list_concat(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    both = joined(*ins)
    return Plan((both, both), (both,))


def for_lists_too(*types: str) -> None:
    """Let these operations on tensors work on lists as well."""
    for kind in types:
        RULES[kind] = either(RULES[kind])


def either(of_tensors: Rule) -> Rule:
    def rule(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
        if not any(isinstance(layout, Items) for layout in ins):
            return of_tensors(op, ins, facts)
        lists = functools.reduce(joined, ins)
        return Plan((lists,) * len(ins), (lists,)) if isinstance(lists, Items) else None

    return rule
