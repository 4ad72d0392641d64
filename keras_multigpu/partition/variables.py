"""The variables of one device's step: what assigns them, and what their new values depend on.

Optimizers update hundreds of variables inside one condition. What a single one of them depends on
is known only if conditions and calls are entered, and each variable is tracked by itself.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from keras_multigpu.partition.facts import (
    BRANCHES,
    LOOPS,
    GraphFacts,
    has_effect,
    is_call,
    passed_on,
)

ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
SCATTERED = {
    f"ResourceScatter{kind}{name}": combine
    for kind in ("", "Nd")
    for name, combine in {
        "Add": tf.tensor_scatter_nd_add,
        "Sub": tf.tensor_scatter_nd_sub,
        "Update": tf.tensor_scatter_nd_update,
        "Max": tf.tensor_scatter_nd_max,
        "Min": tf.tensor_scatter_nd_min,
    }.items()
}
WRITES = {*ASSIGNMENTS, *SCATTERED, "ResourceStridedSliceAssign", "RngReadAndSkip"}

# Sets of variables or operations are integers, one bit for each: graphs have thousands.
Known = tuple[int, int | None]
"""The variables that a tensor depends on, and the variable whose handle it is."""


def union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def variables_needed(
    facts: GraphFacts, handles: Sequence[int | None]
) -> tuple[int, dict[int, int]]:
    """The variables whose present values the results depend on, and those for each new value.

    Args:
        handles: The number of the variable whose handle each input of the graph is, or None.
    """
    state: dict[int, int] = {}
    results = needed_in(facts, [(0, number) for number in handles], state)
    return union(bits for bits, _ in results), state


def needed_in(facts: GraphFacts, given: Sequence[Known], state: dict[int, int]) -> list[Known]:
    """What a graph's results depend on. `state` has, and gets, the same for the variables."""
    nothing: Known = (0, None)
    made = {t.name: known for t, known in zip(facts.graph.inputs, given, strict=True)}
    for op in facts.operations:
        if op.type == "Placeholder":
            continue
        inputs = [made.get(tensor.name, nothing) for tensor in op.inputs]
        handles = [number for _, number in inputs if number is not None]
        bits = union(own for own, _ in inputs)
        if is_call(op):
            outs = needed_in(facts.inner[op.name][0], inputs, state)
        elif op.type in BRANCHES:
            ends = [dict(state) for _ in facts.inner[op.name]]
            found = [
                needed_in(inner, inputs[1:], end)
                for inner, end in zip(facts.inner[op.name], ends, strict=True)
            ]
            for number in set().union(*ends):
                new = [end.get(number, 1 << number) for end in ends]
                if any(each != state.get(number, 1 << number) for each in new):
                    state[number] = union([inputs[0][0], *new])
            outs = [
                (union([inputs[0][0], *(own for own, _ in each)]), each[0][1])
                for each in zip(*found, strict=True)
            ]
        else:
            bits |= union(state.get(number, 1 << number) for number in handles)
            if op.type in LOOPS:
                state |= dict.fromkeys(handles, bits)
            elif op.type in WRITES and handles:
                rest = union(own for own, _ in inputs[1:])
                state[handles[0]] = rest if op.type == "AssignVariableOp" else bits
            keeps = op.type in ("Identity", *LOOPS)
            outs = [(bits, inputs[n][1] if keeps else None) for n in range(len(op.outputs))]
        made |= zip([tensor.name for tensor in op.outputs], outs, strict=True)
    return [made.get(tensor.name, nothing) for tensor in facts.graph.outputs]


def operations_for(
    facts: GraphFacts,
    handles: Sequence[int | None],
    wanted: Collection[int],
    results: bool,
    effects: bool,
) -> set[str]:
    """The names of the operations that the new values of some variables depend on.

    Args:
        handles: As for `variables_needed`.
        wanted: The numbers of the variables.
        results: Whether to add the operations that the graph's results depend on.
        effects: Whether to add those that have effects on anything but variables.
    """
    state: dict[int, int] = {}
    made: dict[str, int] = {}
    variable = {t.name: number for t, number in zip(facts.graph.inputs, handles, strict=True)}
    found = 0
    for place, op in enumerate(facts.operations):
        touched = [n for t in op.inputs if (n := variable.get(t.name)) is not None]
        bits = union([1 << place, *(made.get(tensor.name, 0) for tensor in op.inputs)])
        bits |= union(state.get(number, 0) for number in touched)
        made |= dict.fromkeys((tensor.name for tensor in op.outputs), bits)
        if op.type == "Identity":
            variable[op.outputs[0].name] = variable.get(op.inputs[0].name)
        if op.type in WRITES or op.name in facts.inner:
            state |= dict.fromkeys(touched, bits)
        if effects and has_effect(op) and op.type not in WRITES:
            found |= bits
    if results:
        found |= union(made.get(tensor.name, 0) for tensor in facts.graph.outputs)
    found |= union(state.get(number, 0) for number in wanted)
    return {op.name for place, op in enumerate(facts.operations) if found >> place & 1}


def assigned_inputs(facts: GraphFacts) -> set[int]:
    """The places of a graph's inputs that are handles of variables which it assigns."""
    places = {tensor.name: place for place, tensor in enumerate(facts.graph.inputs)}
    assigned: list[tf.Tensor] = []
    for op in facts.operations:
        if op.type in WRITES:
            assigned.append(op.inputs[0])
        shift = 1 if op.type in BRANCHES else 0
        for inner in facts.inner.get(op.name, ()):
            assigned += [op.inputs[place + shift] for place in assigned_inputs(inner)]
    sources = [passed_on(tensor).name for tensor in assigned]
    return {places[name] for name in sources if name in places}
