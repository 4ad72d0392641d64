"""Which of the sums of a step are gradients: `sum_dtype="bfloat16"` rounds these and no others.

A gradient is a sum that nothing needs but new weights and what optimizers remember. What is
reported, as losses and metrics, is exact, and what a replica needs for its own examples, as the
statistics of a batch: an error there would not stay in one sum.
"""

from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from keras_multigpu.training.exchange.stages import made_of


def gradients_among(
    sums: Sequence[tf.Tensor],
    cuts: Collection[str],
    weights: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    own: Sequence[tf.Tensor],
) -> set[str]:
    """The names of the operations that mark sums of gradients.

    Args:
        sums: All sums of what replicas have; not rows that they gather.
        cuts: The names of the operations that mark these and all other exchanges.
        weights: The new values of weights, and of what optimizers remember.
        results: What else the step yields.
        own: What a replica alone has: its rows, and how many these are.
    """
    found = {tensor.op.name for tensor in sums if tensor.dtype == tf.float32}
    if not found:
        return found
    of_replica = made_of(sums[0].graph, [tensor.op.name for tensor in own], cuts)
    # What callbacks look at is computed beside the step.
    step = needed_for([*weights, *results], ())
    its_part = [tensor for name in of_replica & step.keys() for tensor in step[name].inputs]
    # A step that continues with new weights does not need their gradients for that.
    new = {tensor.op.name for tensor in weights}
    return found - needed_for([*results, *its_part], new).keys()


def needed_for(tensors: Iterable[tf.Tensor], given: Collection[str]) -> dict[str, tf.Operation]:
    """The operations, by name, that tensors need if these operations are given."""
    found: dict[str, tf.Operation] = {}
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            if operation.name not in given:
                waiting += [tensor.op for tensor in operation.inputs]
    return found
