"""Gathers and scatters: operations that take entries from places, or put them there.

A place is a number in the whole tensor. So where the rows' own axis is the one that places count,
the places have to be whole; or each replica scatters its rows into zeros of the whole shape, and
the result is the sum of these.
"""

import tensorflow as tf

from keras_multigpu.partition.axes import rank_of, static_axes
from keras_multigpu.partition.facts import GraphFacts, passed_on
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import Plan, only, rows_of, with_local_shape
from keras_multigpu.partition.rules.axes import along_axis
from keras_multigpu.partition.rules.registration import rows_rule
from keras_multigpu.partition.rules.sums import SUMMED


@rows_rule("GatherV2")
def gather(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    values = ins[0]
    if isinstance(values, Rows) and takes_all(op, values, facts):
        return Plan(only({0: values}, 3), (values,), lambda _, inputs: [inputs[0]])
    return along_axis(op, ins, facts)


def takes_all(op: tf.Operation, rows: Rows, facts: GraphFacts) -> bool:
    """Whether it gathers all rows in their order, as where a function is mapped."""
    if static_axes(facts, op.inputs[2], op.inputs[0]) != [rows.axis] or op.get_attr("batch_dims"):
        return False
    whole = facts.length(rows.blocks)
    source = passed_on(op.inputs[1]).op
    if source.type == "SelectV2":
        # If there is only one row, `vectorized_map` takes the first one instead, which is the same.
        several, ranged, first = source.inputs
        sizes = [facts.value(tensor) for tensor in several.op.inputs]
        if several.op.type != "Greater" or sizes != [whole, 1] or facts.value(first) != 0:
            return False
        source = passed_on(ranged).op
    if source.type != "Range" or facts.dims(source.outputs[0]) != [whole]:
        return False
    return [facts.value(source.inputs[place]) for place in (0, 2)] == [0, 1]


def scattered(
    facts: GraphFacts, places: tuple[tf.Tensor, Layout], entries: Layout
) -> tuple[Rows, int | None] | None:
    """The layout of entries that are scattered to places, which are vectors.

    Returns:
        The rows of the entries; and the axis of the result that they are rows of, None where each
        replica has other places.
    """
    dims = facts.dims(places[0])
    if dims is None:
        return None
    before = len(dims) - 1
    if isinstance(entries, Rows) and entries.axis < before:
        return entries, None
    if isinstance(places[1], Rows):
        return (places[1], None) if places[1].axis < before else None
    if not isinstance(entries, Rows) or not isinstance(dims[-1], int):
        return None
    return entries, dims[-1] + entries.axis - before


@rows_rule("ScatterNd")
def scatter_nd(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    spread = scattered(facts, (op.inputs[0], ins[0]), ins[1])
    if spread is None:
        return None
    found, axis = spread
    if axis is None:
        summed = op.outputs[0].dtype in SUMMED
        return Plan((found, found, REPLICATED), (PARTIAL,)) if summed else None
    rows = found.at(axis)
    emit = with_local_shape(op, 2, rows)
    return Plan((REPLICATED, found, REPLICATED), (rows,), emit)


# How the results of replicas, each of its own places, become the whole: None for a sum.
SCATTERED = {
    "TensorScatterAdd": None,
    "TensorScatterSub": None,
    "TensorScatterMax": "Max",
    "TensorScatterMin": "Min",
    # It depends on the order: of two updates of one place the later one stays.
    "TensorScatterUpdate": "",
}


@rows_rule(*SCATTERED)
def tensor_scatter(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    dims, target = facts.dims(op.inputs[1]), ins[0]
    if dims is None or not isinstance(dims[-1], int):
        return None
    if isinstance(target, Rows) and target.axis >= dims[-1]:
        entries = target.at(len(dims) - 1 + target.axis - dims[-1])
        return Plan((target, REPLICATED, entries), (target,))
    spread = scattered(facts, (op.inputs[1], ins[1]), ins[2])
    if spread is None:
        return None
    found, axis = spread
    if axis is not None:
        return Plan((found.at(axis), REPLICATED, found), (found.at(axis),))
    combine = SCATTERED[op.type]
    if combine:
        return Plan((REPLICATED, found, found), (REPLICATED,), combine=combine)
    if combine == "" or op.outputs[0].dtype not in SUMMED:
        return None
    return Plan((PARTIAL, found, found), (PARTIAL,))


@rows_rule("DenseBincount", "Bincount")
def bincount(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    found, rank = rows_of(ins, 0, 2), rank_of(facts, op.inputs[0])
    weights = facts.dims(op.inputs[2])
    if found is None or rank is None or weights is None or None in weights:
        return None
    need = only({0: found} if weights == [0] else {0: found, 2: found}, 3)
    if rank == 2 and found.axis == 0:
        return Plan(need, (found,))
    if op.type == "DenseBincount" and op.get_attr("binary_output"):
        return Plan(need, (REPLICATED,), combine="Max")
    return Plan(need, (PARTIAL,))
