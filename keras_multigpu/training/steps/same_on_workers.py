"""Checks that all processes have traced the same step.

Each process splits its own graph, and exchanges sums in the order of that graph. The graphs differ
if a script asks which worker it is, and then unrelated sums would be added. So graphs are compared
once, before they run.
"""

import hashlib
from typing import Any

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.failures import ending_together
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.agreement import known_to_all
from keras_multigpu.training.replica_group import ReplicaGroup

# Attributes of operations that hold names, with the process's own counters in them.
NAMES = ("container", "shared_name")


def number_of(data: bytes) -> int:
    """A hash of bytes, the same in each process."""
    # 7 bytes of it, because processes exchange int64.
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def require_same_graph(group: ReplicaGroup, graph: Any) -> None:
    """Raise a `ValueError` in all processes if they have traced different graphs."""
    if not group.is_spread:
        return
    operations = graph.get_operations()
    numbers = fingerprints(graph)
    with ending_together(group.workers, group.worker):
        known = group.exchange_numbers([len(numbers), number_of(repr(numbers).encode())])
    if all(each == known[0] for each in known):
        return
    common = min(count for count, _ in known)
    by_operation = enumerate(zip(*group.exchange_numbers(numbers[:common]), strict=True))
    place = next((n for n, each in by_operation if len({*each}) > 1), common)
    operation = operations[min(place, len(operations) - 1)]
    error = value_error(
        "The workers have traced different steps: the first operation that differs is number "
        f"{place}, here `{operation.type}` of {place_of(operation)}.",
        "Expected the same model, loss and step on all workers.",
        "Make sure that nothing in them depends on the worker or on its own random numbers.",
        worker=group.worker,
        operations=len(operations),
    )
    raise known_to_all(group, error)


def fingerprints(graph: Any) -> list[int]:
    """A hash of each operation's type, attributes and inputs, and of what it calls.

    Names are left out: they count the layers that a process has made before.
    """
    operations = graph.get_operations()
    places = {operation.name: place for place, operation in enumerate(operations)}
    library = {each.signature.name: each for each in graph.as_graph_def().library.function}
    known: dict[str, Any] = {}

    def attributes(node: Any) -> list[Any]:
        return [
            (name, described(value))
            for name, value in sorted(node.attr.items())
            if not name.startswith("_") and name not in NAMES
        ]

    def described(value: Any) -> Any:
        if value.WhichOneof("value") == "func":
            return of_function(value.func.name)
        return value.SerializeToString(deterministic=True)

    def of_function(name: str) -> Any:
        if name not in known:
            known[name] = None  # A gradient may name the function that it belongs to.
            function = library.get(name)
            nodes = [] if function is None else function.node_def
            known[name] = [(node.op, attributes(node)) for node in nodes]
        return known[name]

    found = []
    for operation in operations:
        inputs = [(places[tensor.op.name], tensor.value_index) for tensor in operation.inputs]
        description = operation.type, attributes(operation.node_def), inputs
        found.append(number_of(repr(description).encode()))
    return found
