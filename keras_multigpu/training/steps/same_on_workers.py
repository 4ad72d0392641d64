"""Checks that all processes have traced the same step.

Each process splits its own graph, and exchanges sums in the order of that graph. The graphs differ
if a script asks which worker it is, and then unrelated sums would be added. So graphs are compared
once, before they run.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.failures import ending_together
from keras_multigpu.partition.program import Operation, Program, Tensor
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
    operations = list(Program(graph).all_operations())
    numbers = fingerprints(operations)
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


def fingerprints(operations: Iterable[Operation]) -> list[int]:
    """A hash of the type, the attributes and the inputs of each operation of a program.

    Names are left out: they count the layers that a process has made before.
    """
    places: dict[Tensor, int] = {}
    found = []
    for op in operations:
        inputs = [places.setdefault(tensor, len(places)) for tensor in op.inputs]
        attributes = [
            (name, value.SerializeToString(deterministic=True))
            for name, value in sorted(op.node_def.attr.items())
            # The functions that it calls are programs.
            if not name.startswith("_") and name not in NAMES and not calls(value)
        ]
        found.append(number_of(repr((op.type, attributes, inputs)).encode()))
    return found


def calls(value: Any) -> bool:
    """Whether an attribute names functions, with the process's own counters in their names."""
    return bool(value.HasField("func") or value.list.func)
