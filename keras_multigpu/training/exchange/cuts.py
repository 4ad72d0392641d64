"""What the cuts of a graph mean for its operations: their stages.

A cut is an operation that marks a sum over replicas. The functions here only read graphs.
"""

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf


def sources(operation: tf.Operation) -> list[tf.Operation]:
    """The operations that must run before this one."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def ancestors(
    operations: Iterable[tf.Operation], stop: Collection[str] = (), with_control: bool = True
) -> dict[str, tf.Operation]:
    """These operations and those that they are computed from, by name.

    Args:
        stop: The names of operations to go no further back from.
        with_control: Whether to follow control dependencies too.
    """
    found: dict[str, tf.Operation] = {}
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            if operation.name not in stop:
                waiting += [tensor.op for tensor in operation.inputs]
                waiting += operation.control_inputs if with_control else ()
    return found


def descendants(graph: Any, names: Collection[str], cuts: Collection[str]) -> set[str]:
    """The names of these operations, and of all computed from them other than through cuts."""
    users: dict[str, list[str]] = {}
    for operation in graph.get_operations() if names else ():
        for source in sources(operation):
            users.setdefault(source.name, []).append(operation.name)
    found, waiting = set(names), list(names)
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user not in found and user not in cuts:
                found.add(user)
                waiting.append(user)
    return found


def stage_numbers(
    graph: Any, cuts: Collection[str], late: Collection[str] = (), after: int = 0
) -> dict[str, int]:
    """The first stage in which each operation can run, by name, if the results need it.

    Args:
        late: The names of operations that run in the stage `after` or later.
    """
    numbers: dict[str, int] = {}
    # By a list and not by recursion: graphs are deeper than Python's stack. Nor in the order of the
    # graph, whose loops get inputs when their gradients are made.
    waiting = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while waiting:
        before = sources(operation := waiting[-1])
        unknown = [each for each in before if each.name not in numbers]
        if unknown and operation.name not in numbers:
            waiting += unknown
            continue
        waiting.pop()
        stages = [numbers[each.name] + (each.name in cuts) for each in before]
        numbers[operation.name] = max([after * (operation.name in late), *stages])
    return numbers
