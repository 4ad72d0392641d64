"""Slices as Python writes them, `x[:, 1:, None]`, and their gradients."""

import tensorflow as tf

from keras_multigpu.partition.layouts import PARTIAL, Layout, Rows
from keras_multigpu.partition.plan import Emit, Facts, Plan, attribute, only, rows_of
from keras_multigpu.partition.rules.blocks import Blocks, between, cut
from keras_multigpu.partition.rules.entering import rows_rule
from keras_multigpu.partition.rules.reductions import rank_of
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.site import Site, with_entry
from keras_multigpu.partition.sizes import AnySize

MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def axes_of(op: tf.Operation, rank: int, count: int) -> tuple[dict[int, int], list[int | None]]:
    """Which entry of the slice is for which axis of the input, and of which axes the result has.

    Args:
        rank: That of the input.
        count: How many entries the slice has.
    """
    _, _, dots, new, shrunk = (attribute(op, name) for name in MASKS)
    named = sum(1 for n in range(count) if not (dots | new) >> n & 1)
    entries: dict[int, int] = {}
    out: list[int | None] = []
    axis = 0
    for n in range(count):
        if dots >> n & 1:
            out += range(axis, axis + rank - named)
            axis += rank - named
        elif new >> n & 1:
            out.append(None)
        else:
            entries[axis] = n
            if not shrunk >> n & 1:
                out.append(axis)
            axis += 1
    return entries, [*out, *range(axis, rank)]


def bound(
    op: tf.Operation, facts: Facts, which: str, entry: int, length: AnySize | None
) -> AnySize | None:
    """Where an entry of the slice begins or ends; None if that is not known."""
    if attribute(op, f"{which}_mask") >> entry & 1:
        return 0 if which == "begin" else length
    value = facts.value(op.inputs[1 if which == "begin" else 2])
    found = None if value is None else value[entry]
    if not isinstance(found, int) or length is None:
        return found
    if isinstance(length, int):
        return slice(found, None).indices(length)[0]
    return length + found if found < 0 else found


def steps_by_one(op: tf.Operation, facts: Facts, entry: int) -> bool:
    strides = facts.value(op.inputs[3])
    return strides is not None and strides[entry] == 1


def masked(
    op: tf.Operation,
    site: Site,
    inputs: list[tf.Tensor],
    entry: int,
    before: Blocks | None,
    kept: Blocks,
) -> dict[str, object]:
    """The arguments of a slice whose entry takes these rows; without `before`, all there are."""
    masks = {name: attribute(op, name) for name in MASKS}
    begin, end = inputs[1:3]
    if before is None:
        masks |= {name: masks[name] | 1 << entry for name in MASKS[:2]}
    else:
        masks |= {name: masks[name] & ~(1 << entry) for name in MASKS[:2]}
        first = site.local_length(before)
        begin = with_entry(begin, entry, first)
        end = with_entry(end, entry, first + site.local_length(kept))
    return {"begin": begin, "end": end, "strides": inputs[3], **masks}


@rows_rule("StridedSlice")
def strided_slice(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank, count = rows_of(ins, 0), rank_of(facts, op.inputs[0]), op.inputs[1].shape[0]
    if found is None or rank is None or count is None:
        return None
    entries, out = axes_of(op, rank, count)
    need = only({0: found}, 4)
    if found.axis not in entries:
        return Plan(need, (found.at(out.index(found.axis)),))
    entry, length = entries[found.axis], facts.length(found.blocks)
    if not steps_by_one(op, facts, entry):
        return None
    begin, end = (bound(op, facts, which, entry, length) for which in ("begin", "end"))
    if begin is None:
        return None
    shrunk = found.axis not in out
    # No batch is without a first row and a last one.
    for place, first, behind in ((0, 0, 1), (-1, length - 1, length)):
        if begin == first and (shrunk or end == behind) and op.outputs[0].dtype in SUMMED:
            return Plan(need, (PARTIAL,), one_row(found, place, length, entry))
    if shrunk or end is None:
        return None
    parts = cut(facts, found.blocks, begin, end)
    if parts is None or not parts[1]:
        return None
    before: Blocks | None = parts[0]
    if parts[1] == found.blocks:
        before = None

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        arguments = masked(op, site, inputs, entry, before, parts[1])
        return [tf.raw_ops.StridedSlice(input=inputs[0], **arguments)]

    return Plan(need, (Rows(out.index(found.axis), parts[1]),), emit)


def one_row(found: Rows, place: int, length: AnySize, entry: int) -> Emit:
    """The slice of the first row of all (0) or the last one (-1), which one of the replicas has."""

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        axis, value = found.axis, inputs[0]
        first, own = site.numbers.ranges(found.blocks)[place]
        here = tf.equal(first, 0)
        if place == -1:
            here = tf.equal(first + own, site.number(length))
        at = tf.maximum(tf.shape(value)[axis] - 1, 0) if place == -1 else 0
        index = [slice(None)] * axis + [slice(at, at + 1)]
        # Of no rows the sum is zero.
        row = tf.reduce_sum(value[tuple(index)], axis, keepdims=True)
        row = tf.where(tf.logical_and(here, own > 0), row, tf.zeros_like(row))
        begin, end = (with_entry(inputs[1 + n], entry, tf.constant(n)) for n in (0, 1))
        return site.run([row, begin, end, inputs[3]])

    return emit


@rows_rule("StridedSliceGrad")
def strided_slice_gradient(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, shape, count = rows_of(ins[4:]), facts.dims(op.inputs[0]), op.inputs[1].shape[0]
    rank = shape[0] if shape else None
    if found is None or not isinstance(rank, int) or count is None:
        return None
    entries, out = axes_of(op, rank, count)
    axis = out[found.axis]
    if axis is None:
        return None
    need = only({4: found}, 5)
    entry, before, rows = entries.get(axis), None, found.at(axis)
    length = facts.length(found.blocks)
    if entry is not None:
        whole = facts.value(op.inputs[0])
        total = None if whole is None else whole[axis]
        begin, end = (bound(op, facts, which, entry, total) for which in ("begin", "end"))
        both = all(attribute(op, name) >> entry & 1 for name in MASKS[:2])
        if not steps_by_one(op, facts, entry):
            return None
        if not both and total != length:
            # What was not in the slice has no gradient.
            if begin is None or total is None or end != begin + length:
                return None
            around = between(facts, begin, found.at(axis), total - begin - length)
            if around is None:
                return None
            before, rows = around

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        arguments: dict[str, object] = {name: attribute(op, name) for name in MASKS}
        arguments |= dict(zip(("begin", "end", "strides"), inputs[1:4], strict=True))
        if entry is not None:
            arguments = masked(op, site, inputs, entry, before, found.blocks)
        shape = site.local_shape(inputs[0], rows)
        return [tf.raw_ops.StridedSliceGrad(shape=shape, dy=inputs[4], **arguments)]

    return Plan(need, (rows,), emit)
