"""What a replica adds to a tensor of the step that all replicas have whole.

A sum over replicas is taken where that moves least, be it before the operation whose result
somebody looks at: a gradient is summed, and then gets its shape. What is linear is done again with
the part.
"""

import tensorflow as tf

from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Rows
from keras_multigpu.partition.splitter import Splitter, Value

ALONE = {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "StopGradient", "Transpose"}
ADDED = {"Add", "AddN", "AddV2", "Sub"}
# Deeper than what lies between a sum and a gradient.
DEEPEST = 20


def own_part(splitter: Splitter, value: Value, depth: int = 0) -> tf.Tensor | None:
    """A replica's part of a tensor; None if it has none of its own.

    Of rows these are its own. What is added to a sum once is added by all, each by its part of the
    examples.
    """
    source = value.source
    if value.layout == PARTIAL or isinstance(value.layout, Rows):
        return value.local
    if source is None or not value.made_of or depth > DEEPEST or not source.dtype.is_floating:
        return None
    if value.layout != REPLICATED or source.op.type not in ALONE | ADDED | {"Mul"}:
        return None
    alone = source.op.type in ALONE
    parts = [
        own_part(splitter, each, depth + 1) if not alone or place == 0 else None
        for place, each in enumerate(value.made_of)
    ]
    rows = [isinstance(each.layout, Rows) for each in value.made_of]
    known = [part for part in parts if part is not None]
    if not known or any(rows) or (source.op.type == "Mul" and len(known) > 1):
        return None
    inputs = []
    for part, each in zip(parts, value.made_of, strict=True):
        if part is None:
            part = each.local
            if source.op.type in ADDED:
                part *= tf.cast(splitter.numbers.fraction, part.dtype)
        inputs.append(part)
    return splitter.again(value, inputs, whole=True)
