"""What the new values of a step's variables depend on.

Optimizers update hundreds of variables inside one condition. What a single one of them depends on
is known only if conditions are entered, and each variable is tracked by itself.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Sequence

from keras_multigpu.partition.program import (
    BRANCH,
    LOOP,
    WRITES,
    Operation,
    Program,
    Tensor,
    has_effect,
)

# Sets of variables or operations are integers, one bit for each: programs have thousands.


def union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def variables_needed(program: Program) -> tuple[int, dict[int, int]]:
    """The variables whose present values the results depend on, and those for each new value."""
    state: dict[int, int] = {}
    results = needed_in(program, [0] * len(program.inputs), state)
    return union(results), state


def needed_in(program: Program, given: Sequence[int], state: dict[int, int]) -> list[int]:
    """What a program's results depend on. `state` has, and gets, the same for the variables."""
    made: dict[Tensor, int] = dict(zip(program.inputs, given, strict=True))
    for op in program.operations:
        inputs = [made.get(tensor, 0) for tensor in op.inputs]
        handles = [tensor.variable for tensor in op.inputs if tensor.variable is not None]
        if op.type == BRANCH:
            ends = [dict(state) for _ in op.inner]
            found = [
                needed_in(inner, inputs[1:], end) for inner, end in zip(op.inner, ends, strict=True)
            ]
            for number in set().union(*ends):
                new = [end.get(number, 1 << number) for end in ends]
                if any(each != state.get(number, 1 << number) for each in new):
                    state[number] = union([inputs[0], *new])
            outs = [union([inputs[0], *each]) for each in zip(*found, strict=True)]
        else:
            bits = union([*inputs, *(state.get(number, 1 << number) for number in handles)])
            if op.type == LOOP:
                state |= dict.fromkeys(handles, bits)
            elif op.type in WRITES and handles:
                state[handles[0]] = union(inputs[1:]) if op.type == "AssignVariableOp" else bits
            outs = [bits] * len(op.outputs)
        made |= zip(op.outputs, outs, strict=True)
    return [made.get(tensor, 0) for tensor in program.outputs]


def operations_for(
    program: Program, wanted: Collection[int], results: bool, effects: bool
) -> set[Operation]:
    """The operations that the new values of some variables depend on.

    Args:
        program: The program.
        wanted: The numbers of the variables.
        results: Whether to add the operations that the program's results depend on.
        effects: Whether to add those that have effects on anything but variables.
    """
    state: dict[int, int] = {}
    made: dict[Tensor, int] = {}
    found = 0
    for place, op in enumerate(program.operations):
        touched = [tensor.variable for tensor in op.inputs if tensor.variable is not None]
        bits = union([1 << place, *(made.get(tensor, 0) for tensor in op.inputs)])
        bits |= union(state.get(number, 0) for number in touched)
        made |= dict.fromkeys(op.outputs, bits)
        if op.type in WRITES or op.inner:
            state |= dict.fromkeys(touched, bits)
        if effects and has_effect(op) and op.type not in WRITES:
            found |= bits
    if results:
        found |= union(made.get(tensor, 0) for tensor in program.outputs)
    found |= union(state.get(number, 0) for number in wanted)
    return {op for place, op in enumerate(program.operations) if found >> place & 1}
