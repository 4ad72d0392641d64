"""Whether all processes have read the same batch, and traced the same step.

Each is handed the same data and trains on rows of its own. Data that each process shuffles in its
own order would go unnoticed: some examples would come twice in an epoch, and others never. Batches
are compared in every step: a few numbers travel with its sums, which costs almost nothing. One more
says whether a worker wants to stop; then the step changes nothing on any of them.

Each splits its own graph, and exchanges sums in the order of that graph. Where a script asks which
worker it is, graphs may differ, and sums of different things would be added to each other. Graphs
are compared once, before they run.
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
from keras_multigpu.training.shares import Rows, those_here

DIFFERS = (
    "The workers read different batches. Expected the same data in the same order on each of them, "
    "of which each trains on its own part. Give `dataset.shuffle` and generators of random numbers "
    "a seed, or make the data with `keras_multigpu.data`, whose order is the same everywhere."
)

NAMES = ("container", "shared_name")
"""Attributes of operations that are names, which a process counts."""


def number_of(data: bytes) -> int:
    """A number that differs where bytes do, the same in each process."""
    # 7 bytes of it, because processes exchange int64.
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def known_to_all(group: ReplicaGroup, error: ValueError) -> ValueError:
    """An error that every process has found, to raise once all of them have."""
    # The first process to end aborts the exchanges of the others: they would see only its end.
    with contextlib.suppress(tf.errors.OpError):
        group.of_processes([0])
    return error


BITS = 12
"""Of a fingerprint in each float32, of which 4,096 replicas sum that many exactly."""


class Asked:
    """What the workers ask each other in a step, in numbers that all replicas sum.

    Args:
        group: The replicas.
        shares: Those of all replicas, also of those in other processes.
        stops: Whether they also ask who wants to stop.

    Attributes:
        numbers: What this worker says; nothing if there is nothing to ask.
    """

    def __init__(self, group: ReplicaGroup, shares: Sequence[Rows], stops: bool = False) -> None:
        self._group = group
        numbers: list[tf.Tensor] = []
        with tf.device(HOST):
            # Where each has read its own rows, there is nothing to compare.
            if group.is_spread and not those_here(shares):
                own = fingerprint([rows.data for rows in shares])
                parts = tf.bitwise.right_shift(own, tf.range(0, 32, BITS))
                parts = tf.bitwise.bitwise_and(parts, 2**BITS - 1)
                numbers = tf.unstack(tf.cast(parts, tf.float32))
            self._of_batch = len(numbers)
            if stops:
                numbers.append(group.stop_flags[0].read_value())
            self.numbers = tf.stack(numbers) if numbers else tf.zeros([0])

    def alone(self) -> tf.Tensor | None:
        """As `answered`, by an exchange of its own."""
        if not self._of_batch:
            return None
        numbers = self.numbers[: self._of_batch]
        (total,) = self._group.run(lambda replica: self._group.sum([tf.identity(numbers)]))[0]
        return self.answered(total)

    def answered(self, total: tf.Tensor) -> tf.Tensor:
        """Whether no worker wants to stop, given the sums; it fails where batches differ."""
        with tf.device(HOST):
            of_batch, stops = tf.split(total, [self._of_batch, -1])
            same = tf.reduce_all(of_batch == self.numbers[: self._of_batch] * self._group.count)
            check = tf.debugging.Assert(same, [DIFFERS], summarize=1)
            # Without a graph it has been checked by now.
            with tf.control_dependencies([] if check is None else [check]):
                return tf.reduce_all(stops < 1)


def fingerprint(batches: Any) -> tf.Tensor:
    """A number of the first rows of some batches."""
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
    """Raise a `ValueError`, in all processes, where these have traced different graphs."""
    if not group.is_spread or group.pretends:
        return
    operations = graph.get_operations()
    numbers = fingerprints(graph)
    with ending_together(group.workers, group.worker):
        known = group.of_processes([len(numbers), number_of(repr(numbers).encode())])
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
