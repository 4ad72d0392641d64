"""Operations whose `Axes` are known: rows along an axis of the inputs stay rows in the results.

If the results lack the axis, each replica reduces its own rows, and its result is a part of a sum,
or of another reduction.
"""

from keras_multigpu.partition.facts.axes import AXES, FILTER_GRADIENTS, PRODUCTS, Axes, Label
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import UNARY, table
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.partition.rules.registration import rows_rule, rule
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.sizes import elements

# How the results of replicas become the whole where the axis of the rows is reduced.
REDUCED_BY: dict[str, str] = table(
    {
        " ".join((*PRODUCTS, *FILTER_GRADIENTS)): "Sum",
        "Sum BiasAddGrad L2Loss UnsortedSegmentSum DenseBincount Bincount": "Sum",
        "ScatterNd TensorScatterAdd TensorScatterSub": "Sum",
        "Max UnsortedSegmentMax TensorScatterMax": "Max",
        "Min UnsortedSegmentMin TensorScatterMin": "Min",
        "Prod UnsortedSegmentProd": "Prod",
        "All": "All",
        "Any": "Any",
    }
)


@rows_rule(*AXES)
def along_axis(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """Of the axes along which an input is in rows, take that for which the least is moved."""
    axes = AXES[op.type](op, facts)
    if axes is None:
        return None
    plans = [
        along_label(op, labels[layout.axis], layout, axes)
        for layout, labels in zip(ins, axes.inputs, strict=False)
        if isinstance(layout, Rows) and layout.axis < len(labels)
    ]

    def cost(plan: Plan) -> tuple[int, bool]:
        moved = sum(
            elements(facts.dims(tensor) or [])
            for tensor, given, wanted in zip(op.inputs, ins, plan.need, strict=True)
            if isinstance(given, Rows) and given != wanted
        )
        return moved, PARTIAL not in plan.out

    return min((plan for plan in plans if plan), key=cost, default=None)


def along_label(op: Operation, label: Label | None, rows: Rows, axes: Axes) -> Plan | None:
    """The plan of an operation with rows along the axis with this label."""
    if label is None or any(labels.count(label) > 1 for labels in (*axes.inputs, axes.out)):
        return None
    need, count = axes.layouts(label, rows, len(op.inputs)), len(op.outputs)
    if label in axes.out:
        return Plan(need, (rows.at(axes.out.index(label)),) * count)
    kind = REDUCED_BY.get(op.type)
    if kind == "Sum":
        return Plan(need, (PARTIAL,)) if op.outputs[0].dtype in SUMMED else None
    return None if kind is None else Plan(need, (REPLICATED,), combine=kind)


@rule("IdentityN")
def identities(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    return None if any(isinstance(layout, Items) for layout in ins) else Plan(ins, ins)


@rows_rule(*UNARY)
def unary(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    # Whatever is known of the shape.
    return Plan(ins, ins)
