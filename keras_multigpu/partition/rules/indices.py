"""Gathers, scatters and counts: operations that take entries by their index, or put them there.

An index is that in the whole tensor. So along an indexed axis no tensor may be in rows. But each
replica can scatter its own rows into zeros of the whole shape: the result is the sum of these.
"""

from dataclasses import replace

from keras_multigpu.partition.facts.axes import static_axes
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.program import Operation, passed_on
from keras_multigpu.partition.rules.axes import along_axis
from keras_multigpu.partition.rules.plan import Plan, only, with_local_shape
from keras_multigpu.partition.rules.registration import rows_rule


@rows_rule("GatherV2")
def gather(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    values = ins[0]
    if isinstance(values, Rows) and takes_all(op, values, facts):
        return Plan(only({0: values}, 3), (values,), lambda _, inputs: [inputs[0]])
    return along_axis(op, ins, facts)


def takes_all(op: Operation, rows: Rows, facts: Facts) -> bool:
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


@rows_rule("ScatterNd")
def scatter_nd(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    plan = along_axis(op, ins, facts)
    return plan and replace(plan, emit=with_local_shape(op, 2, plan.out[0]))


@rows_rule("TensorScatterAdd", "TensorScatterSub")
def tensor_scatter(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    plan = along_axis(op, ins, facts)
    if plan is not None and plan.out == (PARTIAL,):
        # The tensor that is added to is a term of the sum, too.
        return replace(plan, need=(PARTIAL, *plan.need[1:]))
    return plan


@rows_rule("DenseBincount")
def bincount(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    plan = along_axis(op, ins, facts)
    if plan is not None and plan.out == (PARTIAL,) and op.get_attr("binary_output"):
        return replace(plan, out=(REPLICATED,), combine="Max")
    return plan
