"""Operations with a result for each example, where examples are the first axis."""

import tensorflow as tf

from keras_multigpu.partition.families import EXAMPLES
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout
from keras_multigpu.partition.plan import Facts, Plan, only, rows_of
from keras_multigpu.partition.rules.entering import rows_rule
from keras_multigpu.partition.site import Site

# Their first input is a shape that begins with the number of examples.
SHAPED = {
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
}


@rows_rule(*EXAMPLES)
def each_example(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    places = EXAMPLES[op.type]
    found = rows_of([ins[n] for n in places if ins[n] != REPLICATED])
    if found is None or found.axis or not each_has_its_own(op):
        return None
    need: dict[int, Layout] = {}
    for place in places:
        if ins[place] == found:
            need[place] = found
            continue
        dims = facts.dims(op.inputs[place])
        if dims is None or (dims[0] != facts.length(found.blocks) and dims[0] != 1):
            return None
        if dims[0] == facts.length(found.blocks):
            need[place] = found
    if op.type not in SHAPED or op.inputs[0].shape.as_list() == [2]:
        # Else height and width only.
        return Plan(only(need, len(ins)), (found,) * len(op.outputs))

    def emit(site: Site, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return site.run([site.local_shape(inputs[0], found), *inputs[1:]])

    return Plan(only(need, len(ins)), (found,), emit)


def each_has_its_own(op: tf.Operation) -> bool:
    """Whether the places of the largest entries, if returned, are counted within one example."""
    return "Argmax" not in op.type or not op.get_attr("include_batch_in_index")


@rows_rule(
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
    "Dilation2DBackpropFilter",
)
def filter_gradient(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    found = rows_of(ins, 0) or rows_of(ins, 2)
    if found is None or found.axis:
        return None
    return Plan(only({0: found, 2: found}, 3), (PARTIAL,))


@rows_rule("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient")
def quantization_gradient(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
    """The gradient of each entry, and those of the bounds, which are sums over all."""
    found, rank = rows_of(ins, 0, 1), op.inputs[0].shape.rank
    per_channel = "PerChannel" in op.type
    if found is None or rank is None or (per_channel and found.axis == rank - 1):
        return None
    return Plan(only({0: found, 1: found}, 4), (found, PARTIAL, PARTIAL))
