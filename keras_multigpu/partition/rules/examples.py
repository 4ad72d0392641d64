"""Operations with a result for each example, where examples are the first axis."""

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import EXAMPLES
from keras_multigpu.partition.layouts import PARTIAL, Layout
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.rules.plan import Plan, only, rows_of, with_local_shape
from keras_multigpu.partition.rules.registration import rows_rule

# Their first input is a shape that begins with the number of examples.
SHAPED = {
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
}


@rows_rule(*EXAMPLES)
def each_example(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    places = EXAMPLES[op.type]
    found = rows_of(ins, *places)
    if found is None or found.axis:
        return None
    if "Argmax" in op.type and op.get_attr("include_batch_in_index"):
        return None
    length = facts.length(found.blocks)
    need: dict[int, Layout] = {}
    for place in places:
        dims = facts.dims(op.inputs[place])
        if ins[place] == found or (dims is not None and dims[0] == length):
            need[place] = found
        elif dims is None or dims[0] != 1:
            return None
    # A shape of two entries is only the height and the width.
    is_shaped = op.type in SHAPED and op.inputs[0].shape.as_list() != [2]
    out = (found,) * len(op.outputs)
    emit = with_local_shape(op, 0, found) if is_shaped else None
    return Plan(only(need, len(ins)), out, emit)


@rows_rule("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient")
def quantization_gradient(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """The gradient of each entry, and those of the bounds, which are sums over all entries."""
    found, rank = rows_of(ins, 0, 1), op.inputs[0].shape.rank
    per_channel = "PerChannel" in op.type
    if found is None or rank is None or (per_channel and found.axis == rank - 1):
        return None
    return Plan(only({0: found, 1: found}, 4), (found, PARTIAL, PARTIAL))
