"""When weights that replicas divide are gathered: bucket after bucket, for each use again.

A gather depends on variables alone, so all of them could begin at once, and every device would hold
the whole model. So uses are put into buckets in the order of the program, forward and backward, and
a bucket is gathered once the bucket before last has been used: two are there at a time, one in use
and one on its way. What the forward pass has gathered is not kept for the backward pass.
"""

from collections.abc import Iterator

from keras_multigpu.partition.layouts import REPLICATED, is_sharded
from keras_multigpu.partition.planning.cost import bytes_of
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.sizes import is_number

BUCKET = 25 * 2**20
"""How many bytes of weights are gathered together, unless a single one is larger."""


def find_buckets(planned: Planned) -> dict[Operation, int]:
    """The bucket of each operation that takes whole what replicas divide."""
    found: dict[Operation, int] = {}
    bucket, size = 0, 0
    gathered: set[Tensor] = set()
    for op in planned.program.operations:
        for tensor in gathered_by(op, planned):
            own = bytes_of(tensor, planned.facts)
            known = int(own) if own is not None and is_number(own) else BUCKET  # type: ignore[arg-type]
            if tensor not in gathered and size and size + known > BUCKET:
                bucket, size, gathered = bucket + 1, 0, set()
            size += 0 if tensor in gathered else known
            gathered.add(tensor)
            found[op] = bucket
    return found


def gathered_by(op: Operation, planned: Planned) -> Iterator[Tensor]:
    """The tensors, or the handles of variables, of which an operation takes all rows."""
    plan = planned.plans[op]
    for tensor, need in zip(op.inputs, plan.need, strict=True):
        if need == REPLICATED and is_sharded(planned.layouts[tensor]):
            yield tensor
    for tensor in op.inputs:
        if tensor.variable is not None and plan.variables.get(tensor.variable) == REPLICATED:
            # Not all of these are divided.
            if is_sharded(planned.given[tensor.variable]):
                yield tensor
