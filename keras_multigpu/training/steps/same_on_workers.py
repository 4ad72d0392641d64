"""Checks that all processes have read the same batch, and traced the same step.

Each process gets the same data and trains on its own rows. If each shuffled the data in its own
order, some examples would come twice in an epoch and others never, and nobody would notice. So
batches are compared in every step: a few numbers travel with its sums, which costs almost nothing.
One more number says whether a worker wants to stop; the step then changes nothing on any of them.

Each process splits its own graph, and exchanges sums in the order of that graph. The graphs differ
if a script asks which worker it is, and then unrelated sums would be added. So graphs are compared
once, before they run.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.failures import ending_together
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.shares import Rows, shares_here

DIFFERS = (
    "The workers read different batches. Expected the same data in the same order on each of them, "
    "of which each trains on its own part. Give `dataset.shuffle` and generators of random numbers "
    "a seed, or make the data with `keras_multigpu.data`, whose order is the same everywhere."
)

# Attributes of operations that hold names, with the process's own counters in them.
NAMES = ("container", "shared_name")


def number_of(data: bytes) -> int:
    """A hash of bytes, the same in each process."""
    # 7 bytes of it, because processes exchange int64.
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def known_to_all(group: ReplicaGroup, error: ValueError) -> ValueError:
    """Wait until every process has found this error, to be raised in all of them."""
    # The first process to end aborts the exchanges of the others, which would report only that.
    with contextlib.suppress(tf.errors.OpError):
        group.exchange_numbers([0])
    return error


# How many bits of a fingerprint each float32 carries, so that 4,096 replicas sum them exactly.
BITS = 12


class StepCheck:
    """Compares the workers' batches in a step, and asks who wants to stop, by one sum.

    Args:
        group: The replicas.
        shares: The shares of all replicas, in all processes.
        stops: Whether to ask too who wants to stop.

    Attributes:
        numbers: This worker's numbers; empty if there is nothing to ask.
    """

    def __init__(self, group: ReplicaGroup, shares: Sequence[Rows], stops: bool = False) -> None:
        self._group = group
        numbers: list[tf.Tensor] = []
        with tf.device(HOST):
            # If each worker has read its own rows, there is nothing to compare.
            if group.is_spread and not shares_here(shares):
                own = fingerprint([rows.data for rows in shares])
                parts = tf.bitwise.right_shift(own, tf.range(0, 32, BITS))
                parts = tf.bitwise.bitwise_and(parts, 2**BITS - 1)
                numbers = tf.unstack(tf.cast(parts, tf.float32))
            self._of_batch = len(numbers)
            if stops:
                numbers.append(group.stop_flags[0].read_value())
            self.numbers = tf.stack(numbers) if numbers else tf.zeros([0])

    def exchanged(self) -> tf.Tensor | None:
        """As `result`, with an exchange of its own."""
        if not self._of_batch:
            return None
        numbers = self.numbers[: self._of_batch]
        (total,) = self._group.exchange.sum([[numbers] for _ in self._group.replicas])[0]
        return self.result(total)

    def result(self, total: tf.Tensor) -> tf.Tensor:
        """Whether no worker wants to stop, given the sums; fails if batches differ."""
        with tf.device(HOST):
            of_batch, stops = tf.split(total, [self._of_batch, -1])
            same = tf.reduce_all(of_batch == self.numbers[: self._of_batch] * self._group.count)
            check = tf.debugging.Assert(same, [DIFFERS], summarize=1)
            # Without a graph the check is already done.
            with tf.control_dependencies([] if check is None else [check]):
                return tf.reduce_all(stops < 1)


def fingerprint(batches: Any) -> tf.Tensor:
    """A hash of the first rows of some batches."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    values = [bits(leaf[:1] if leaf.shape.rank else leaf) for leaf in leaves if leaf is not None]
    every = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
    # Different factors, so that the order counts, and odd ones, which lose no bit of a product.
    return tf.reduce_sum(every * (2 * tf.range(tf.size(every)) + 1))


def bits(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.string:
        return tf.cast(tf.strings.to_hash_bucket_fast(values, 2**31 - 1), tf.int32)
    if values.dtype.is_floating:
        return tf.bitcast(tf.cast(values, tf.float32), tf.int32)
    return tf.cast(values, tf.int32)


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
