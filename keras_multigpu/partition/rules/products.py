"""Products of matrices: the rows stay rows if the result has their axis, else it is an open sum."""

import string

import tensorflow as tf

from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, Rows
from keras_multigpu.partition.plan import Plan
from keras_multigpu.partition.rules.elementwise import elements
from keras_multigpu.partition.rules.registration import rows_rule
from keras_multigpu.partition.rules.sums import SUMMED
from keras_multigpu.partition.sizes import AnySize
from keras_multigpu.partition.values import broadcast_dims

Labels = list[str | None]
Dims = list[AnySize | None]


def contraction(
    op: tf.Operation, ins: tuple[Layout, ...], labels: list[Labels], out: Labels, facts: GraphFacts
) -> Plan | None:
    """The plan of a sum of products.

    Args:
        labels: For each input, a label for each axis, as in `tf.einsum`: None for an axis of one
            entry that is broadcast, and with a question mark if its length is not known.
        out: The labels of the result.
    """
    plans = []
    for layout, own in zip(ins, labels, strict=True):
        label = own[layout.axis] if isinstance(layout, Rows) else None
        if label is None or any(each.count(label) > 1 for each in [*labels, out]):
            continue
        # Another input may have these rows, or one entry for all of them.
        if any(f"?{label.lstrip('?')}" in each for each in labels):
            continue
        assert isinstance(layout, Rows)
        need = tuple(
            layout.at(each.index(label)) if label in each else REPLICATED for each in labels
        )
        if label not in out and op.outputs[0].dtype not in SUMMED:
            continue
        result = layout.at(out.index(label)) if label in out else PARTIAL
        moved = sum(
            elements(facts.dims(tensor) or [])
            for tensor, given, wanted in zip(op.inputs, ins, need, strict=True)
            if isinstance(given, Rows) and given != wanted
        )
        plans.append((moved, result != PARTIAL, Plan(need, (result,))))
    return min(plans, key=lambda plan: plan[:2])[2] if plans else None


@rows_rule("MatMul")
def matmul(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    one = "km" if op.get_attr("transpose_a") else "mk"
    two = "nk" if op.get_attr("transpose_b") else "kn"
    return contraction(op, ins, [list(one), list(two)], list("mn"), facts)


@rows_rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    dims = [facts.dims(tensor) for tensor in (*op.inputs, op.outputs[0])]
    if dims[0] is None or dims[1] is None or dims[2] is None:
        return None
    before = list(string.ascii_uppercase[: len(dims[2]) - 2])
    labels = [broadcast(own[:-2], before, dims[2][:-2]) for own in (dims[0], dims[1])]
    one = "km" if op.get_attr("adj_x") else "mk"
    two = "nk" if op.get_attr("adj_y") else "kn"
    return contraction(op, ins, [[*labels[0], *one], [*labels[1], *two]], [*before, *"mn"], facts)


def broadcast(own: Dims, labels: list[str], out: Dims) -> Labels:
    """The labels of the axes of a tensor that is broadcast to `out`."""
    first = len(out) - len(own)
    return [
        label if dim is not None and dim == whole else None if dim == 1 else f"?{label}"
        for dim, label, whole in zip(own, labels[first:], out[first:], strict=True)
    ]


@rows_rule("Einsum")
def einsum(op: tf.Operation, ins: tuple[Layout, ...], facts: GraphFacts) -> Plan | None:
    left, right = op.get_attr("equation").decode().replace(" ", "").split("->")
    terms, dims = left.split(","), [facts.dims(tensor) for tensor in op.inputs]
    shapes = [own for own in dims if own is not None]
    if len(shapes) < len(terms):
        return None
    # The axes that the dots stand for are broadcast.
    middles = []
    for own, term in zip(shapes, terms, strict=True):
        first = term.find("...")
        count = len(own) - len(term) + 3
        middles.append(own[first : first + count] if first >= 0 else [])
    widest = broadcast_dims(middles)
    spare = [each for each in string.ascii_letters if each not in left][: len(widest)]
    labels: list[Labels] = []
    for middle, term in zip(middles, terms, strict=True):
        before, dots, after = term.partition("...")
        labels.append([*before, *(broadcast(middle, spare, widest) if dots else []), *after])
    before, dots, after = right.partition("...")
    return contraction(op, ins, labels, [*before, *(spare if dots else []), *after], facts)
