"""Operations that move entries, or count them."""

import math
from dataclasses import replace

import tensorflow as tf

from keras_multigpu.partition.facts.axes import AXES, static_axes
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.values import COUNTS
from keras_multigpu.partition.layouts import REPLICATED, Block, Layout, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica, with_entry
from keras_multigpu.partition.rules.axes import along_axis
from keras_multigpu.partition.rules.blocks import (
    MOST_BLOCKS,
    Blocks,
    as_blocks,
    cut,
    padded,
    repeat,
    undo_repeat,
)
from keras_multigpu.partition.rules.plan import Plan, only, rows_of, with_local_shape
from keras_multigpu.partition.rules.registration import rows_rule, rule
from keras_multigpu.partition.sizes import AnySize, product, quotient


def rows_after_reshape(
    before: list[AnySize], after: list[AnySize], found: Rows, facts: Facts
) -> Rows | None:
    """The layout of rows after a reshape; None if that would split examples.

    All rows of an example, and all that is in them, must stay together. What comes before the axis
    of the rows has to stay before it.
    """
    outer, inner = product(before[: found.axis]), product(before[found.axis + 1 :])
    # If several axes would do, and all but one of these have the length 1, take the longest.
    for place in sorted(range(len(after)), key=lambda n: (after[n] != before[found.axis], n)):
        outer_after, inner_after = product(after[:place]), product(after[place + 1 :])
        factors = [quotient(factor * inner, inner_after) for _, factor in found.blocks]
        blocks = tuple(
            Block(block.batch, factor)
            for block, factor in zip(found.blocks, factors, strict=True)
            if factor
        )
        if len(blocks) < len(factors):
            continue
        rows: Rows | None = Rows(place, blocks)
        if outer != outer_after:
            # Axes before the rows become repetitions of them, or the reverse.
            if not isinstance(outer, int) or not isinstance(outer_after, int):
                continue
            if outer_after and not outer % outer_after:
                rows = repeat(Rows(place, blocks), outer // outer_after)
            elif outer and not outer_after % outer:
                rows = undo_repeat(Rows(place, blocks), outer_after // outer)
            else:
                rows = None
        if rows is not None and facts.length(rows.blocks) == after[place]:
            return rows
    return None


@rows_rule("Reshape")
def reshape(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, before, after = rows_of(ins, 0), facts.dims(op.inputs[0]), facts.dims(op.outputs[0])
    if found is None or before is None or after is None:
        return None
    known_before = [dim for dim in before if dim is not None]
    known_after = [dim for dim in after if dim is not None]
    behind = found.axis + 1
    rows: Rows | None
    if len(known_before) == len(before) and len(known_after) == len(after):
        rows = rows_after_reshape(known_before, known_after, found, facts)
    else:
        # The axes up to the rows must not change. Then the others have as many entries as before.
        same = before[:behind] == after[:behind] and None not in after[:behind]
        rows = found if same and len(after) - len(known_after) <= 1 else None
    if rows is None:
        return None

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape = [
            replica.local_length(rows.blocks)
            if axis == rows.axis
            else rest(replica, inputs[0])
            if dim is None
            else replica.scalar(dim)
            for axis, dim in enumerate(after)
        ]
        return [tf.reshape(inputs[0], tf.stack(shape))]

    def rest(replica: Replica, value: tf.Tensor) -> tf.Tensor:
        """The unknown length. With -1 a reshape would fail for a replica without rows."""
        entries = tf.reduce_prod(tf.shape(value)[behind:])
        known = product([dim for dim in after[behind:] if dim is not None])
        return entries // tf.maximum(replica.scalar(known), 1)

    return Plan(only({0: found}, 2), (rows,), emit)


@rows_rule("Squeeze")
def squeeze(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    plan, axes = along_axis(op, ins, facts), AXES[op.type](op, facts)
    if plan is None or axes is None:
        return None
    gone = [axis for axis in axes.inputs[0] if axis not in axes.out]

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        # Never without axes: that would drop the rows of a replica with one row.
        return [tf.squeeze(inputs[0], gone) if gone else inputs[0]]

    return replace(plan, emit=emit)


@rows_rule("BroadcastTo")
def broadcast_to(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, before, after = rows_of(ins, 0), facts.dims(op.inputs[0]), facts.dims(op.outputs[0])
    if found is None or before is None or after is None:
        return None
    rows = found.at(found.axis + len(after) - len(before))
    # A batch of one row may be broadcast to many.
    if after[rows.axis] != facts.length(found.blocks):
        return None
    return Plan(only({0: found}, 2), (rows,), with_local_shape(op, 1, rows))


@rows_rule("EnsureShape")
def ensure_shape(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(ins, ins, lambda _, inputs: [tf.identity(inputs[0])])


@rows_rule("Tile")
def tile(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, times = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or times is None or not isinstance(times[found.axis], int):
        return None
    rows = repeat(found, times[found.axis])
    return Plan(only({0: found}, 2), (rows,)) if rows else None


@rows_rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, pads = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or pads is None or None in pads[found.axis].tolist():
        return None
    need = only({0: found}, len(ins))
    before, after = pads[found.axis]
    if before == 0 and after == 0:
        return Plan(need, (found,))
    around = None if "Mirror" in op.type else padded(facts, before, found, after)
    if around is None:
        return None
    first, rows = around
    last = rows.blocks[len(first) + len(found.blocks) :]

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        own = tf.stack([replica.local_length(first), replica.local_length(last)])
        return replica.run(op, [inputs[0], with_entry(inputs[1], found.axis, own), *inputs[2:]])

    return Plan(need, (rows,), emit)


@rows_rule("ConcatV2")
def concat(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    axes = static_axes(facts, op.inputs[-1], op.outputs[0])
    found = rows_of(ins[:-1])
    if axes is None or found is None:
        return None
    (axis,) = axes
    if axis != found.axis:
        return Plan((*(found,) * (len(ins) - 1), REPLICATED), (found,))
    need: list[Rows] = []
    for tensor, layout in zip(op.inputs[:-1], ins[:-1], strict=True):
        if isinstance(layout, Rows) and layout.axis == axis:
            need.append(layout)
            continue
        # A replica takes its share of a whole tensor with as many entries for each example.
        dims = facts.dims(tensor)
        share = None if dims is None else as_blocks(facts, dims[axis], found)
        if share is None:
            return None
        need.append(Rows(axis, share))
    blocks = tuple(block for rows in need for block in rows.blocks)
    is_short = len(blocks) <= MOST_BLOCKS
    return Plan((*need, REPLICATED), (Rows(axis, blocks),)) if is_short else None


@rows_rule("Split", "SplitV")
def split(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    value, axis_at = (1, 0) if op.type == "Split" else (0, 2)
    found = rows_of(ins, value)
    axes = static_axes(facts, op.inputs[axis_at], op.inputs[value])
    if found is None or axes is None:
        return None
    need = only({value: found}, len(ins))
    (axis,) = axes
    if axis != found.axis:
        return Plan(need, (found,) * len(op.outputs))
    parts: list[Blocks] = []
    begin: AnySize = 0
    for tensor in op.outputs:
        dims = facts.dims(tensor)
        length = None if dims is None else dims[axis]
        kept = None if length is None else cut(facts, found.blocks, begin, begin + length)
        if length is None or kept is None:
            return None
        parts.append(kept[1])
        begin = begin + length

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(tf.split(inputs[value], [replica.local_length(part) for part in parts], axis))

    return Plan(need, tuple(Rows(axis, part) for part in parts), emit)


@rows_rule("Slice")
def slice_(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, begins, after = rows_of(ins, 0), facts.value(op.inputs[1]), facts.dims(op.outputs[0])
    if found is None or after is None or after[found.axis] is None:
        return None
    axis, length = found.axis, after[found.axis]
    before: Blocks = ()
    kept = found.blocks
    if length != facts.length(found.blocks):
        if begins is None or begins[axis] is None:
            return None
        parts = cut(facts, found.blocks, begins[axis], begins[axis] + length)
        if parts is None:
            return None
        before, kept = parts
    out = Rows(axis, kept)

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        begin = with_entry(inputs[1], axis, replica.local_length(before))
        return [tf.slice(inputs[0], begin, replica.local_shape(inputs[2], out))]

    return Plan(only({0: found}, 3), (out,), emit)


@rows_rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """The places in a block of pixels become repetitions of the batch, or the reverse."""
    found, block = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or block is None or not all(isinstance(n, int) for n in block.ravel()):
        return None
    rows: Rows | None = found
    if found.axis:
        # The axes of space come right after the batch.
        rows = found if found.axis > block.size else None
    else:
        times = math.prod(block.ravel().tolist())
        rows = (repeat if op.type == "SpaceToBatchND" else undo_repeat)(found, times)
    return Plan(only({0: found}, 3), (rows,)) if rows else None


@rule(*COUNTS)
def counted(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan:
    """Counts the rows of all replicas. Of an open sum only the shape matters."""

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        if op.type == "Rank":
            return replica.run(op, inputs)
        dtype, found = op.outputs[0].dtype, []
        for tensor, layout in zip(inputs, ins, strict=True):
            whole = tf.shape(tensor, dtype)
            if isinstance(layout, Rows):
                length = replica.scalar(facts.length(layout.blocks))
                whole = with_entry(whole, layout.axis, length)
            found.append(whole)
        return [tf.reduce_prod(found[0])] if op.type == "Size" else found

    return Plan(ins, (REPLICATED,) * len(op.outputs), emit)
