"""Lets the sums of accumulated gradients wait until an update needs them.

With `gradient_accumulation_steps=k` each step adds its gradients to accumulators, and only every
k-th step uses them:

    if due:  update((accumulator + gradient) / k), accumulator = 0
    else:    accumulator += gradient

A replica has one term of a gradient. The sum is linear, so replicas may keep their own:

    total = own accumulator + own gradient
    total = the sum of all replicas' totals, if due       Closing
    if due:  update(total / k), accumulator = 0
    else:    accumulator = total

Only this form is changed, in which nothing else reads the accumulator: what the optimizer makes of
a sum need not be linear.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_multigpu.partition.layouts import PARTIAL
from keras_multigpu.partition.planning.planned import Planned
from keras_multigpu.partition.program import (
    BRANCH,
    OPEN_READ,
    Closing,
    Operation,
    Program,
    Tensor,
    has_effect,
)

ADDS = ("Add", "AddV2")


class Accumulation(NamedTuple):
    """How the branches of a condition use an accumulator.

    Attributes:
        handle: The accumulator.
        adds: What adds the gradient to it, where it only grows and in the other branch.
        gradient: The gradient, where it only grows.
    """

    handle: Tensor
    adds: list[Operation]
    gradient: Tensor


def let_sums_wait(program: Program) -> list[Closing]:
    """Change a program so that the sums of what it accumulates can wait; what then closes them."""
    made: list[Closing] = []
    for op in [each for each in program.operations if each.type == BRANCH]:
        for waiting in range(2 if len(op.inner) == 2 else 0):
            branches = [op.inner[waiting], op.inner[1 - waiting]]
            found = list(accumulations(program, op, branches))
            made += [let_wait(program, op, branches, each, waiting) for each in found]
            if found:
                drop_unused(op, branches)
    if made:
        program.keep_needed()
    return made


def are_terms(closing: Closing, planned: Planned) -> bool:
    """Whether replicas have terms of a gradient, which otherwise is summed before."""
    return planned.plans[closing.inputs[1].op].need == (PARTIAL, PARTIAL)


def take_at_once(closing: Closing, program: Program) -> None:
    """Let a sum wait no longer."""
    add = closing.inputs[1].op
    add.inputs[0].op.type = "ReadVariableOp"
    program.replace(closing.outputs[0], add.outputs[0])
    program.keep_needed()


def accumulations(
    program: Program, op: Operation, branches: Sequence[Program]
) -> Iterator[Accumulation]:
    """The accumulators that only grow in the first branch of a condition."""
    for place, handle in enumerate(op.inputs[1:]):
        if handle.variable is None or handle.users != [op]:
            continue
        uses = [branch.inputs[place].users for branch in branches]
        if any([use.type for use in own] != ["ReadVariableOp", "AssignVariableOp"] for own in uses):
            continue
        (read, grows), (other_read, reset) = uses
        adds = [user for each in (read, other_read) for user in each.outputs[0].users]
        if [each.type in ADDS for each in adds] != [True, True] or not is_zero(reset.inputs[1]):
            continue
        pairs = zip(adds, (read, other_read), strict=True)
        gradients = [t for add, own in pairs for t in add.inputs if t.op is not own]
        (total,) = adds[0].outputs
        is_kept = total is grows.inputs[1] and total.users == [grows]
        if is_kept and len(gradients) == 2 and are_same(gradients, branches):
            found = Accumulation(handle, adds, gradients[0])
            if not is_needed_before(program, op, branches, found):
                yield found


def is_zero(tensor: Tensor) -> bool:
    source = tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor
    value = source.constant
    return tensor.op.type == "ZerosLike" or (value is not None and not np.any(value))


def are_same(tensors: Sequence[Tensor], programs: Sequence[Program]) -> bool:
    """Whether two programs with equal inputs compute equal tensors."""
    places = [
        program.inputs.index(tensor) if tensor in program.inputs else None
        for tensor, program in zip(tensors, programs, strict=True)
    ]
    if places != [None, None]:
        return places[0] == places[1]
    one, other = (tensor.op for tensor in tensors)
    if one.inner or has_effect(one) or any(tensor.variable is not None for tensor in one.inputs):
        return False
    return (
        one.type == other.type
        and tensors[0].value_index == tensors[1].value_index
        and one.node_def.attr == other.node_def.attr
        and len(one.inputs) == len(other.inputs)
        and all(are_same(pair, programs) for pair in zip(one.inputs, other.inputs, strict=True))
    )


def is_needed_before(
    program: Program, op: Operation, branches: Sequence[Program], found: Accumulation
) -> bool:
    """Whether anything else takes the gradient, which then is summed for that."""
    if found.gradient not in branches[0].inputs:
        return False
    place = branches[0].inputs.index(found.gradient)
    outer, inner = op.inputs[1 + place], [branch.inputs[place] for branch in branches]
    is_taken_inside = [each.users for each in inner] != [[add] for add in found.adds]
    results = *program.outputs, *program.taps
    return is_taken_inside or outer in results or outer.users != [op]


def let_wait(
    program: Program,
    op: Operation,
    branches: Sequence[Program],
    found: Accumulation,
    waiting: int,
) -> Closing:
    """Add to an accumulator before a condition, and not in its branches."""
    new: list[Operation] = []

    def outside(tensor: Tensor) -> Tensor:
        """A tensor of a branch, computed before the condition."""
        if tensor in branches[0].inputs:
            return op.inputs[1 + branches[0].inputs.index(tensor)]
        new.append(Operation(tensor.op.raw, tensor.op.type, [*map(outside, tensor.op.inputs)]))
        return new[-1].outputs[tensor.value_index]

    gradient, raw = outside(found.gradient), found.adds[0].raw
    (read,) = (t.op for t in found.adds[0].inputs if t is not found.gradient)
    own = Operation(read.raw, OPEN_READ, [found.handle])
    add = Operation(raw, found.adds[0].type, [own.outputs[0], gradient])
    closing = Closing(raw, [op.inputs[0], add.outputs[0]], waiting)
    place = program.operations.index(op)
    program.operations[place:place] = [*new, own, add, closing]
    op.inputs.append(closing.outputs[0])
    for branch, added in zip(branches, found.adds, strict=True):
        total = Operation(added.raw, "Placeholder").outputs[0]
        branch.inputs.append(total)
        branch.replace(added.outputs[0], total)
    return closing


def drop_unused(op: Operation, branches: Sequence[Program]) -> None:
    """Drop the inputs of a condition that no branch takes: an open sum would be taken for it."""
    for branch in branches:
        branch.keep_needed()
    for place in reversed(range(len(op.inputs) - 1)):
        given = [branch.inputs[place] for branch in branches]
        is_result = any(own in b.outputs for own, b in zip(given, branches, strict=True))
        if not is_result and not any(own.users for own in given):
            del op.inputs[place + 1]
            for branch in branches:
                del branch.inputs[place]
