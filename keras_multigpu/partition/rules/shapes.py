"""Operations that move entries, or count them."""

import math

import tensorflow as tf

from keras_multigpu.partition.layouts import REPLICATED, Block, Layout, Rows
from keras_multigpu.partition.plan import (
    Facts,
    Plan,
    only,
    rows_of,
    static_axes,
)
from keras_multigpu.partition.rules.blocks import (
    MANY,
    Blocks,
    as_blocks,
    between,
    cut,
    once,
    repeated,
)
from keras_multigpu.partition.rules.entering import rows_rule
from keras_multigpu.partition.rules.reductions import rank_of
from keras_multigpu.partition.site import Site, with_entry
from keras_multigpu.partition.sizes import AnySize, product, quotient


def regrouped(
    before: list[AnySize], after: list[AnySize], found: Rows, facts: Facts
) -> Rows | None:
    """The layout of rows after a reshape; None if examples would be split.

    What an example has must stay together: its rows and all that is in them. What comes before the
    axis of rows has to stay before it.
    """
    outer, inner = product(before[: found.axis]), product(before[found.axis + 1 :])
    # Where several axes would do, of which all but one have the length 1, the longest is meant.
    for place in sorted(range(len(after)), key=lambda n: (after[n] != before[found.axis], n)):
        outer_after, inner_after = product(after[:place]), product(after[place + 1 :])
        factors = [quotient(factor * inner, inner_after) for _, factor in found.blocks]
        if any(factor is None or factor == 0 for factor in factors):
            continue
        blocks = tuple(
            Block(block.batch, factor)
            for block, factor in zip(found.blocks, factors, strict=True)
            if factor is not None
        )
        rows: Rows | None = Rows(place, blocks)
        if outer != outer_after:
            # Axes before the rows become repetitions of them, or repetitions an axis.
            if not isinstance(outer, int) or not isinstance(outer_after, int):
                continue
            if outer_after and not outer % outer_after:
                rows = repeated(Rows(place, blocks), outer // outer_after)
            elif outer and not outer_after % outer:
                rows = once(Rows(place, blocks), outer_after // outer)
            else:
                rows = None
        if rows is not None and facts.length(rows.blocks) == after[place]:
            return rows
    return None


@rows_rule("Reshape")
def reshape(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, before, after = rows_of(ins, 0), facts.dims(op.inputs[0]), facts.dims(op.outputs[0])
    if found is None or before is None or after is None:
        return None
    place = found.axis
    unknown = [n for n, dim in enumerate(after) if dim is None]
    if None in before or unknown:
        # What is before the rows must stay as it is, and they too; then the rest has as many
        # entries as before.
        same = before[: place + 1] == after[: place + 1] and None not in after[: place + 1]
        if not same or len(unknown) > 1:
            return None
        rows: Rows | None = found
    else:
        whole = [dim for dim in before if dim is not None]
        rows = regrouped(whole, [dim for dim in after if dim is not None], found, facts)
    if rows is None:
        return None

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape = [
            site.local_length(rows.blocks)
            if n == rows.axis
            else dim
            if isinstance(dim, int)
            else site.number(dim)
            if dim is not None
            else rest(site, inputs[0])
            for n, dim in enumerate(after)
        ]
        return [tf.reshape(inputs[0], tf.stack(shape))]

    def rest(site: Site, value: tf.Tensor) -> tf.Tensor:
        """The length that is not known; not by -1, since there may be no rows."""
        entries = tf.reduce_prod(tf.shape(value)[place + 1 :])
        known = product([dim for dim in after[place + 1 :] if dim is not None])
        return entries // tf.maximum(site.number(known), 1)

    return Plan(only({0: found}, 2), (rows,), emit)


@rows_rule("ExpandDims")
def expand_dims(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins, 0), rank_of(facts, op.inputs[0])
    axes = static_axes(facts, op.inputs[1], None if rank is None else rank + 1)
    if found is None or axes is None:
        return None
    return Plan(only({0: found}, 2), (found.at(found.axis + (axes[0] <= found.axis)),))


@rows_rule("Squeeze")
def squeeze(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, dims = rows_of(ins), facts.dims(op.inputs[0])
    if found is None or dims is None:
        return None
    axes = {axis % len(dims) for axis in op.get_attr("squeeze_dims")}
    if not axes:
        # All of length 1 are dropped, and a batch may have one row.
        if not all(isinstance(dim, int) for dim in dims):
            return None
        axes = {axis for axis, dim in enumerate(dims) if dim == 1}
    if found.axis in axes:
        return None
    out = found.at(found.axis - len({axis for axis in axes if axis < found.axis}))
    return Plan(ins, (out,), lambda site, inputs: [tf.squeeze(inputs[0], sorted(axes))])


@rows_rule("Transpose", "ConjugateTranspose")
def transpose(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins, 0), rank_of(facts, op.inputs[0])
    order = static_axes(facts, op.inputs[1], rank)
    if order is None or found is None:
        return None
    return Plan(only({0: found}, 2), (found.at(order.index(found.axis)),))


@rows_rule("BroadcastTo")
def broadcast_to(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, before, after = rows_of(ins, 0), facts.dims(op.inputs[0]), facts.dims(op.outputs[0])
    if found is None or before is None or after is None:
        return None
    rows = found.at(found.axis + len(after) - len(before))
    # A single row, of all replicas together, may be broadcast to many.
    if after[rows.axis] != facts.length(found.blocks):
        return None
    return Plan(
        only({0: found}, 2),
        (rows,),
        lambda site, inputs: [tf.broadcast_to(inputs[0], site.local_shape(inputs[1], rows))],
    )


@rows_rule("EnsureShape")
def ensure_shape(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return Plan(ins, ins, lambda site, inputs: [tf.identity(inputs[0])])


@rows_rule("Tile")
def tile(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, times = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or times is None or not isinstance(times[found.axis], int):
        return None
    rows = repeated(found, times[found.axis])
    return Plan(only({0: found}, 2), (rows,)) if rows else None


@rows_rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, pads = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or pads is None:
        return None
    need = only({0: found}, len(ins))
    before, after = pads[found.axis]
    if before is None or after is None:
        return None
    if before == 0 and after == 0:
        return Plan(need, (found,))
    around = between(facts, before, found, after)
    if around is None or "Mirror" in op.type:
        return None
    first, rows = around
    last = rows.blocks[len(first) + len(found.blocks) :]

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        own = tf.stack([site.local_length(first), site.local_length(last)])
        return site.run([inputs[0], with_entry(inputs[1], found.axis, own), *inputs[2:]])

    return Plan(need, (rows,), emit)


@rows_rule("ConcatV2")
def concat(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    axes = static_axes(facts, op.inputs[-1], rank_of(facts, op.outputs[0]))
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
        # Of what is whole, each replica may take a share, if that is the same for each example.
        dims = facts.dims(tensor)
        share = None if dims is None else as_blocks(facts, dims[axis], found)
        if share is None:
            return None
        need.append(Rows(axis, share))
    blocks = tuple(block for rows in need for block in rows.blocks)
    return Plan((*need, REPLICATED), (Rows(axis, blocks),)) if len(blocks) <= MANY else None


@rows_rule("Pack")
def pack(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins), rank_of(facts, op.outputs[0])
    if found is None or rank is None:
        return None
    axis = op.get_attr("axis") % rank
    return Plan((found,) * len(ins), (found.at(found.axis + (axis <= found.axis)),))


@rows_rule("Unpack")
def unpack(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank = rows_of(ins), rank_of(facts, op.inputs[0])
    if found is None or rank is None:
        return None
    axis = op.get_attr("axis") % rank
    if axis == found.axis:
        return None
    return Plan(ins, (found.at(found.axis - (axis < found.axis)),) * len(op.outputs))


@rows_rule("Split", "SplitV")
def split(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    value, axis_at = (1, 0) if op.type == "Split" else (0, 2)
    found = rows_of(ins[value : value + 1])
    axes = static_axes(facts, op.inputs[axis_at], rank_of(facts, op.inputs[value]))
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
        if length is None:
            return None
        end = begin + length
        kept = cut(facts, found.blocks, begin, end)
        if kept is None or not kept[1]:
            return None
        parts.append(kept[1])
        begin = end

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(tf.split(inputs[value], [site.local_length(part) for part in parts], axis))

    return Plan(need, tuple(Rows(axis, part) for part in parts), emit)


@rows_rule("Slice")
def slice_(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
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
        if parts is None or not parts[1]:
            return None
        before, kept = parts
    out = Rows(axis, kept)

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        begin = with_entry(inputs[1], axis, site.local_length(before))
        return [tf.slice(inputs[0], begin, site.local_shape(inputs[2], out))]

    return Plan(only({0: found}, 3), (out,), emit)


@rows_rule("OneHot")
def one_hot(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, axis = rows_of(ins, 0), op.get_attr("axis")
    if found is None:
        return None
    moved = axis != -1 and axis <= found.axis
    return Plan(only({0: found}, 4), (found.at(found.axis + moved),))


@rows_rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """The places in a block of pixels become repetitions of the batch, or these become places."""
    found, block = rows_of(ins, 0), facts.value(op.inputs[1])
    if found is None or block is None or not all(isinstance(n, int) for n in block.ravel()):
        return None
    if found.axis:
        # The axes of space come right after the batch.
        return Plan(only({0: found}, 3), (found,)) if found.axis > block.size else None
    times = math.prod(block.ravel().tolist())
    rows = repeated(found, times) if op.type == "SpaceToBatchND" else once(found, times)
    return Plan(only({0: found}, 3), (rows,)) if rows else None


COUNTS = ("Shape", "ShapeN", "Size", "Rank")


@rows_rule(*COUNTS)
def counted(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan:
    """Counts the rows of all replicas; of a sum that is still to come only the shape matters."""

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        if op.type == "Rank":
            return site.run(inputs)
        dtype, found = op.outputs[0].dtype, []
        for tensor, layout in zip(inputs, ins, strict=True):
            whole = tf.shape(tensor, dtype)
            if isinstance(layout, Rows):
                length = site.number(facts.length(layout.blocks))
                whole = with_entry(whole, layout.axis, length)
            found.append(whole)
        return [tf.reduce_prod(found[0])] if op.type == "Size" else found

    return Plan(ins, (REPLICATED,) * len(op.outputs), emit)
