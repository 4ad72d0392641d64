"""Operations that take entries from places, or put them there.

A place is a number in the whole tensor. So where rows are taken from or put to places along the
rows' own axis, the tensor with the places has to be whole; or each replica puts its rows into zeros
of the whole shape, and the sum of these is the result.
"""

import tensorflow as tf

from keras_multigpu.partition.facts import passed_on
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import Facts, Plan, only, rows_of, static_axes
from keras_multigpu.partition.rules.entering import rows_rule
from keras_multigpu.partition.rules.reductions import rank_of
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.site import Site


@rows_rule("GatherV2", "ResourceGather")
def gather(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    values, places = ins[:2]
    width = rank_of(facts, op.inputs[1])
    if width is None:
        return None
    shared = op.get_attr("batch_dims")
    shared += width if shared < 0 else 0
    axis = 0
    if op.type == "GatherV2":
        axes = static_axes(facts, op.inputs[2], rank_of(facts, op.inputs[0]))
        if axes is None:
            return None
        (axis,) = axes
    elif isinstance(values, Rows):
        return None
    count = len(ins)
    if isinstance(values, Rows) and values.axis == axis and takes_all(op.inputs[1], values, facts):
        return Plan(only({0: values}, count), (values,), lambda site, inputs: [inputs[0]])
    if isinstance(values, Rows) and values.axis != axis:
        # `shared` axes are those of examples in both, one place list for each.
        if values.axis < shared:
            return Plan(only({0: values, 1: values}, count), (values,))
        moved = values.axis if values.axis < axis else values.axis - 1 + width - shared
        return Plan(only({0: values}, count), (values.at(moved),))
    if isinstance(places, Rows):
        if places.axis < shared:
            return Plan(only({0: places, 1: places}, count), (places,))
        return Plan(only({1: places}, count), (places.at(axis + places.axis - shared),))
    return None


def takes_all(places: tf.Tensor, rows: Rows, facts: Facts) -> bool:
    """Whether places are those of all rows, one after another, as where a function is mapped."""
    whole = facts.length(rows.blocks)
    source = passed_on(places).op
    if source.type == "SelectV2":
        # `vectorized_map` takes the first row for all where there is one, which is the same.
        several, ranged, first = source.inputs
        sizes = [facts.value(tensor) for tensor in several.op.inputs]
        if several.op.type != "Greater" or sizes != [whole, 1] or facts.value(first) != 0:
            return False
        source = passed_on(ranged).op
    if source.type != "Range" or facts.dims(source.outputs[0]) != [whole]:
        return False
    return [facts.value(source.inputs[place]) for place in (0, 2)] == [0, 1]


@rows_rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    values, places = ins
    dims = facts.dims(op.inputs[1])
    if dims is None:
        return None
    if isinstance(places, Rows):
        # The last axis of the places is one place.
        return Plan((REPLICATED, places), (places,)) if places.axis < len(dims) - 1 else None
    if not isinstance(values, Rows) or not isinstance(dims[-1], int) or values.axis < dims[-1]:
        return None
    moved = len(dims) - 1 + values.axis - dims[-1]
    return Plan((values, REPLICATED), (values.at(moved),))


def spread(
    facts: Facts, places: tuple[tf.Tensor, Layout], entries: tuple[tf.Tensor, Layout]
) -> tuple[Rows, bool, int] | None:
    """The layout of entries that are scattered to places given as vectors.

    Returns:
        The rows of the entries; whether each replica has other places; and where those are axes of
        what is put, which axis of the whole.
    """
    dims = facts.dims(places[0])
    if dims is None:
        return None
    before = len(dims) - 1
    found = rows_of([entries[1]])
    if found is None or found.axis >= before:
        own = found
        if isinstance(places[1], Rows):
            own = places[1]
            if own.axis >= before:
                return None
            return own, True, 0
        if own is None or not isinstance(dims[-1], int):
            return None
        return own, False, dims[-1] + own.axis - before
    return found, True, 0


@rows_rule("ScatterNd")
def scatter_nd(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    spreading = spread(facts, (op.inputs[0], ins[0]), (op.inputs[1], ins[1]))
    if spreading is None:
        return None
    found, by_rows, axis = spreading
    if by_rows:
        if op.outputs[0].dtype not in SUMMED:
            return None
        return Plan((found, found, REPLICATED), (PARTIAL,))
    rows = found.at(axis)

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return site.run([*inputs[:2], site.local_shape(inputs[2], rows)])

    return Plan((REPLICATED, found, REPLICATED), (rows,), emit)


# How the whole is made of what replicas have.
SCATTERED = {
    "TensorScatterAdd": None,
    "TensorScatterSub": None,
    "TensorScatterMax": "Max",
    "TensorScatterMin": "Min",
    "TensorScatterUpdate": "",
}


@rows_rule(*SCATTERED)
def tensor_scatter(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    depth = facts.dims(op.inputs[1])
    if depth is None or not isinstance(depth[-1], int):
        return None
    before = len(depth) - 1
    target = ins[0]
    if isinstance(target, Rows) and target.axis >= depth[-1]:
        entries = target.at(before + target.axis - depth[-1])
        return Plan((target, REPLICATED, entries), (target,))
    spreading = spread(facts, (op.inputs[1], ins[1]), (op.inputs[2], ins[2]))
    if spreading is None:
        return None
    found, by_rows, axis = spreading
    if not by_rows:
        return Plan((found.at(axis), REPLICATED, found), (found.at(axis),))
    combine = SCATTERED[op.type]
    if combine:
        return Plan((REPLICATED, found, found), (REPLICATED,), combine=combine)
    if combine == "" or op.outputs[0].dtype not in SUMMED:
        # Of two updates of one place the later one stays.
        return None
    return Plan((PARTIAL, found, found), (PARTIAL,))


# Sums and other reductions of the rows that have the same number.
SEGMENTS = {
    "UnsortedSegmentSum": None,
    "UnsortedSegmentMax": "Max",
    "UnsortedSegmentMin": "Min",
    "UnsortedSegmentProd": "Prod",
}


@rows_rule(*SEGMENTS)
def segments(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    width, combine = rank_of(facts, op.inputs[1]), SEGMENTS[op.type]
    found = rows_of(ins, 0) or rows_of(ins, 1)
    if width is None or found is None:
        return None
    if found.axis >= width:
        return Plan(only({0: found}, 3), (found.at(found.axis - width + 1),))
    need = only({0: found, 1: found}, 3)
    if combine:
        return Plan(need, (REPLICATED,), combine=combine)
    return Plan(need, (PARTIAL,)) if op.outputs[0].dtype in SUMMED else None


@rows_rule("DenseBincount", "Bincount")
def bincount(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found, rank, weights = (
        rows_of(ins, 0, 2),
        rank_of(facts, op.inputs[0]),
        facts.dims(op.inputs[2]),
    )
    if found is None or rank is None or weights is None or None in weights:
        return None
    need = only({0: found}, 3) if weights == [0] else only({0: found, 2: found}, 3)
    if rank == 2 and found.axis == 0:
        return Plan(need, (found,))
    if op.type == "DenseBincount" and op.get_attr("binary_output"):
        # Whether there are any.
        return Plan(need, (REPLICATED,), combine="Max")
    return Plan(need, (PARTIAL,))
