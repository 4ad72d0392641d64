"""Operations that work element by element: the rows of the result are those of the inputs."""

import collections

import tensorflow as tf

from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.families import BROADCASTING, SAME_SHAPES, UNARY
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import Plan, rows_of
from keras_multigpu.partition.rules.registration import axis_rule, rows_rule, rule
from keras_multigpu.partition.sizes import AnySize, product, value_of
from keras_multigpu.partition.values import broadcast_dims


@rows_rule(*UNARY)
def unary(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    return Plan(ins, ins)


rule("IdentityN")(unary)


@rows_rule(*BROADCASTING, *SAME_SHAPES)
def elementwise(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    dims = [facts.dims(tensor) for tensor in op.inputs]
    shapes = [own for own in dims if own is not None]
    if len(shapes) < len(dims):
        return None
    out = broadcast_dims(shapes)
    found = rows_of_largest(ins, shapes, out, facts)
    if found is None:
        return None
    length = facts.length(found.blocks)
    need: list[Layout] = []
    for own in shapes:
        place = found.axis - (len(out) - len(own))
        if place >= 0 and own[place] == length:
            need.append(found.at(place))
        elif place < 0 or own[place] == 1:
            need.append(REPLICATED)
        else:
            return None
    return Plan(tuple(need), (found,) * len(op.outputs))


def rows_of_largest(
    ins: tuple[Layout, ...],
    shapes: list[list[AnySize | None]],
    out: list[AnySize | None],
    facts: GraphFacts,
) -> Rows | None:
    """The layout of the result: that of the largest input in rows, so that little is moved."""
    best: tuple[int, Rows | None] = 0, None
    for own, layout in zip(shapes, ins, strict=True):
        if isinstance(layout, Rows):
            axis = layout.axis + len(out) - len(own)
            # A batch of one row may be broadcast to many.
            if out[axis] == facts.length(layout.blocks) and elements(own) > best[0]:
                best = elements(own), layout.at(axis)
    return best[1]


def elements(dims: list[AnySize | None]) -> int:
    """Roughly how many elements a tensor has; unknown sizes count as 32."""
    guess: dict[str, int] = collections.defaultdict(lambda: 32)
    return max(1, value_of(product([32 if dim is None else dim for dim in dims]), guess))


@rows_rule("Select")
def select(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    condition, rank = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    found = rows_of(ins, 1, 2) or rows_of(ins)
    if condition is None or rank is None or found is None:
        return None
    # The condition is a scalar, or has one entry for each of the first axis.
    has_rows = condition == rank or (condition == 1 and found.axis == 0)
    return Plan((found if has_rows else REPLICATED, found, found), (found,))


@axis_rule("Bitcast")
def bitcast(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    rank = op.inputs[0].shape.rank
    larger = op.outputs[0].dtype.size > op.inputs[0].dtype.size
    # The bytes of a larger type come from the last axis.
    return None if rank is None or (larger and axis == rank - 1) else axis


@rows_rule("BiasAdd")
def bias_add(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    found, channels = rows_of(ins), channel_axis(op)
    if found is None or channels is None:
        return None
    if not isinstance(ins[0], Rows):
        found = found.at(channels)
    return Plan((found, found.at(0) if found.axis == channels else REPLICATED), (found,))


@axis_rule("FakeQuantWithMinMaxVars")
def fake_quantized(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    return axis


@axis_rule("LookupTableFindV2", shared_by=(1,))
def lookup(op: tf.Operation, axis: int, facts: GraphFacts) -> int | None:
    # Otherwise the keys or values of the table are vectors.
    return axis if op.inputs[2].shape.rank == 0 else None


def channel_axis(op: tf.Operation) -> int | None:
    """The axis of the channels, by an operation's `data_format`."""
    rank = op.inputs[0].shape.rank
    if rank is None:
        return None
    return 1 if op.get_attr("data_format") == b"NCHW" else rank - 1
