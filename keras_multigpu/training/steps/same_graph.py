"""Whether all processes have traced the same step, checked before it first runs.

Each splits its own graph, and exchanges sums in the order of that graph. Where a script asks which
worker it is, graphs may differ, and sums of different things would be added to each other.
"""

from typing import Any

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.failures import ending_together
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.agreement import known_to_all, number_of
from keras_multigpu.training.replica_group import ReplicaGroup

NAMES = ("container", "shared_name")
"""Attributes that are names, which a process counts."""


def require_same_graph(group: ReplicaGroup, graph: Any) -> None:
    """Raise a `ValueError`, in all processes, where these have traced different graphs."""
    if not group.is_spread or group.pretends:
        return
    operations = graph.get_operations()
    numbers = fingerprints(graph)
    with ending_together(group.workers, group.worker):
        known = group.of_processes([len(numbers), joined(numbers)])
    if all(each == known[0] for each in known):
        return
    common = min(count for count, _ in known)
    everyones = group.of_processes(numbers[:common])
    pairs = zip(*everyones, strict=True)
    place = next((n for n, each in enumerate(pairs) if len({*each}) > 1), common)
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
    """A number for each operation: its type, attributes and inputs, and what it calls; no names.

    Names count the layers that a process has made before.
    """
    operations = graph.get_operations()
    places = {operation.name: place for place, operation in enumerate(operations)}
    library = {each.signature.name: each for each in graph.as_graph_def().library.function}
    known: dict[str, Any] = {}

    def attributes(node: Any) -> list[Any]:
        return [
            (name, of_function(value.func.name) if is_function(value) else plain(value))
            for name, value in sorted(node.attr.items())
            if not name.startswith("_") and name not in NAMES
        ]

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


def is_function(value: Any) -> bool:
    return bool(value.WhichOneof("value") == "func")


def plain(value: Any) -> bytes:
    data: bytes = value.SerializeToString(deterministic=True)
    return data


def joined(numbers: list[int]) -> int:
    return number_of(repr(numbers).encode())
