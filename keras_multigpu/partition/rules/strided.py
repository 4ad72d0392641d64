"""Slices as Python writes them, `x[:, 1:, None]`, and their gradients."""

import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.slices import MASKS, entries_of
from keras_multigpu.partition.layouts import PARTIAL, Layout, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica, nothing, with_entry
from keras_multigpu.partition.rules.blocks import Blocks, cut, padded
from keras_multigpu.partition.rules.plan import Emit, Plan, only, rows_of
from keras_multigpu.partition.rules.registration import rows_rule
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.sizes import AnySize


def masked(
    op: Operation,
    replica: Replica,
    inputs: list[tf.Tensor],
    entry: int,
    before: Blocks | None,
    kept: Blocks,
) -> dict[str, object]:
    """The arguments of a slice one entry of which takes these rows; all, if `before` is None."""
    masks = {name: op.get_attr(name) for name in MASKS}
    begin, end = inputs[1:3]
    if before is None:
        masks |= {name: masks[name] | 1 << entry for name in MASKS[:2]}
    else:
        masks |= {name: masks[name] & ~(1 << entry) for name in MASKS[:2]}
        first = replica.local_length(before)
        begin = with_entry(begin, entry, first)
        end = with_entry(end, entry, first + replica.local_length(kept))
    return {"begin": begin, "end": end, "strides": inputs[3], **masks}


@rows_rule("StridedSlice")
def strided_slice(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, dims = rows_of(ins, 0), facts.dims(op.inputs[0])
    entries = None if dims is None else entries_of(op, facts, len(dims))
    if found is None or entries is None:
        return None
    out = [each.axis for each in entries if not each.shrinks]
    need = only({0: found}, 4)
    entry = next(each for each in entries if each.axis == found.axis)
    named = entry.place
    if named is None:
        return Plan(need, (found.at(out.index(found.axis)),))
    length = facts.length(found.blocks)
    begin, end = entry.bounds(length)
    if begin is None:
        return None
    # Every batch has a first and a last row.
    for place, first, behind in ((0, 0, 1), (-1, length - 1, length)):
        if begin == first and (entry.shrinks or end == behind) and op.outputs[0].dtype in SUMMED:
            return Plan(need, (PARTIAL,), one_row(op, found, place, length, named))
    if entry.shrinks or end is None:
        return None
    parts = cut(facts, found.blocks, begin, end)
    if parts is None:
        return None
    before = None if parts[1] == found.blocks else parts[0]

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        arguments = masked(op, replica, inputs, named, before, parts[1])
        return [tf.raw_ops.StridedSlice(input=inputs[0], **arguments)]

    return Plan(need, (Rows(out.index(found.axis), parts[1]),), emit)


def one_row(op: Operation, found: Rows, place: int, length: AnySize, entry: int) -> Emit:
    """The slice of the first row of all (0) or the last one (-1): zeros on all replicas but one."""

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        axis, value = found.axis, inputs[0]
        first, own = replica.ranges(found.blocks)[place]
        here = tf.equal(first, 0)
        if place == -1:
            here = tf.equal(first + own, replica.scalar(length))
        at = tf.maximum(tf.shape(value)[axis] - 1, 0) if place == -1 else 0
        index = [slice(None)] * axis + [slice(at, at + 1)]
        # The sum of no rows is zero.
        row = tf.reduce_sum(value[tuple(index)], axis, keepdims=True)
        row = tf.where(here, row, nothing(row.dtype))
        begin, end = (with_entry(inputs[1 + n], entry, tf.constant(n)) for n in (0, 1))
        return replica.run(op, [row, begin, end, inputs[3]])

    return emit


@rows_rule("StridedSliceGrad")
def strided_slice_gradient(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, shape = rows_of(ins[4:]), facts.dims(op.inputs[0])
    rank = shape[0] if shape else None
    entries = entries_of(op, facts, rank) if isinstance(rank, int) else None
    if found is None or entries is None:
        return None
    entry = [each for each in entries if not each.shrinks][found.axis]
    axis = entry.axis
    if axis is None:
        return None
    need = only({4: found}, 5)
    before: Blocks | None = None
    rows, length = found.at(axis), facts.length(found.blocks)
    if entry.place is not None:
        whole = facts.value(op.inputs[0])
        total = None if whole is None else whole[axis]
        begin, end = entry.bounds(total)
        if entry.stride != 1:
            return None
        if not entry.takes_all and total != length:
            # The gradient is zero outside the slice.
            if begin is None or total is None or end != begin + length:
                return None
            around = padded(facts, begin, rows, total - begin - length)
            if around is None:
                return None
            before, rows = around

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        arguments: dict[str, object] = {name: op.get_attr(name) for name in MASKS}
        arguments |= dict(zip(("begin", "end", "strides"), inputs[1:4], strict=True))
        if entry.place is not None:
            arguments = masked(op, replica, inputs, entry.place, before, found.blocks)
        shape = replica.local_shape(inputs[0], rows)
        return [tf.raw_ops.StridedSliceGrad(shape=shape, dy=inputs[4], **arguments)]

    return Plan(need, (rows,), emit)
