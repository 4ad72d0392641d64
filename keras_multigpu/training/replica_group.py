"""Which replicas exist, which of them live in this process, and how they exchange values.

    group.run(function) ──> function(replica) on the device of each replica of this process
    group.read, assign      a replica's copies of variables
    group.exchange          sums and gathers over all replicas, wherever they are

Only this module knows. A replica has a global `id`, which decides its share of a batch and its
random numbers, and a `place` among the replicas of this process, which decides which copy of a
variable is its own. In one process the two are equal; nothing else may rely on that.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.cluster import apart
from keras_multigpu.devices import short_name
from keras_multigpu.keras_internals import (
    collective_internals,
    graph_internals,
    variable_internals,
)
from keras_multigpu.keras_internals.replacing import replaced
from keras_multigpu.partition.emission.exchange import arrived, travelling
from keras_multigpu.replicas import get_strategy
from keras_multigpu.training.exchange.exchange import Exchange, Parts
from keras_multigpu.training.exchange.packing import Packing

T = TypeVar("T")

logger = logging.getLogger("keras_multigpu")

# Where batches are read and cut, so that a device receives its own share only.
HOST = "/device:CPU:0"

# How many int64 values one exchange carries outside a step.
MAX_WORDS = 2**23

Copies = tuple[tf.Variable, ...]
"""A variable's copies: one for each replica of this process, or one that they share."""


class Replica(NamedTuple):
    """One replica of this process: its number among all replicas, and those of its process."""

    id: int
    place: int
    device: str


class ReplicaGroup:
    """The replicas that train one model together.

    Attributes:
        strategy: The strategy that runs: a mirrored one in place of central storage.
        count: The number of replicas.
        replicas: Those of this process, in the order of their places.
        is_spread: Whether some replicas live in other processes.
        first_device: The device where values for all replicas of this process are computed.
        is_chief: Whether this process writes files and prints for all.
        exchange: What travels between them.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy = with_copies(strategy)
        self.count: int = strategy.num_replicas_in_sync
        devices = strategy.extended.worker_devices
        self.replicas = [
            Replica(number, place, device)
            for place, (number, device) in enumerate(zip(local_ids(strategy), devices, strict=True))
        ]
        self.exchange = Exchange(
            devices,
            self.count,
            collective_internals.collectives_of(strategy) if self.count > 1 else None,
        )
        self._exchanges: dict[tuple[Exchange, int], Any] = {}
        self._changes: list[tf.Variable] = []
        self.is_spread = len(self.replicas) < self.count
        if self.is_spread:
            apart.note_use()
        self.first_device = self.replicas[0].device
        self.is_chief = self.replicas[0].id == 0

    @property
    def workers(self) -> list[str]:
        """The addresses of the processes; empty if this is the only one."""
        if not self.is_spread:
            return []
        addresses: list[str] = self.strategy.cluster_resolver.cluster_spec().as_dict()["worker"]
        return addresses

    @property
    def worker(self) -> int:
        """The number of this process."""
        return self.worker_of(self.replicas[0].id)

    def worker_of(self, replica: int) -> int:
        """The number of a replica's process; all have equally many replicas."""
        return replica // len(self.replicas)

    def device_of(self, replica: int) -> str:
        return short_name(self.replicas[replica % len(self.replicas)].device)

    def name_of(self, replica: int) -> str:
        """A replica's device, as `GPU:1`, or `GPU:1 of worker 2`."""
        name = self.device_of(replica)
        return f"{name} of worker {self.worker_of(replica)}" if self.is_spread else name

    def run(self, function: Callable[[Replica], T]) -> list[T]:
        """Run a function on each replica of this process; the results by place."""
        with graph_internals.single_device():
            return self.exchange.on_each(function, self.replicas)

    def copies(self, variables: Sequence[keras.Variable]) -> list[Copies]:
        """The copies of variables that live in this process."""
        return [copies_in(storage) for storage in variable_internals.storages_of(list(variables))]

    def read(self, variables: Sequence[Copies], replica: Replica) -> list[tf.Tensor]:
        """The values of variables on one replica: its own copies, or the shared ones."""
        own = [parts[0] if is_shared(parts) else parts[replica.place] for parts in variables]
        if tf.executing_eagerly():
            return [variable.read_value() for variable in own]
        # One operation reads the variables of one device. On 8 replicas of a MobileNet two for each
        # of 4,600 variables were half of the graph.
        values: dict[int, tf.Tensor] = {}
        for device, places in by_device(own).items():
            if is_in_parts(own[places[0]]):
                values.update({place: own[place].read_value() for place in places})
                continue
            with tf.device(device):
                there = graph_internals.read_together([own[place] for place in places])
            values.update(zip(places, there, strict=True))
        return [values[place] for place in range(len(own))]

    def assign(
        self, variables: Sequence[Copies], values: Sequence[tf.Tensor], replica: Replica
    ) -> None:
        """Give one replica's copies new values.

        The first replica of this process assigns a shared copy, so its value must be the same on
        all replicas, as the state of a metric is.
        """
        pairs = [
            (parts[replica.place], value)
            for parts, value in zip(variables, values, strict=True)
            if replica.place == 0 or not is_shared(parts)
        ]
        for device, places in by_device([part for part, _ in pairs]).items():
            with tf.device(device):
                for part, value in (pairs[place] for place in places):
                    part.assign(value, read_value=False)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Count the assignments in this context as one change, at its begin and at its end.

        Another worker may be killed in between, which ends the step anywhere.
        """
        if not self.is_spread:
            yield
            return
        if not self._changes:
            with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
                kind = {"dtype": tf.int64, "trainable": False}
                self._changes = [tf.Variable(0, **kind), tf.Variable(0, **kind)]
        begun, ended = self._changes
        with tf.control_dependencies([begun.assign_add(1, read_value=False)]):
            is_graph = not tf.executing_eagerly()
            known = len(tf.compat.v1.get_default_graph().get_operations()) if is_graph else 0
            yield
        made = tf.compat.v1.get_default_graph().get_operations()[known:] if is_graph else []
        with tf.control_dependencies([each for each in made if each.op_def.is_stateful]):
            ended.assign_add(1, read_value=False)

    @property
    def changes(self) -> tuple[int, int]:
        """How many changes have begun in this process, and how many of them have ended."""
        begun, ended = (int(each.numpy()) for each in self._changes or map(tf.constant, (0, 0)))
        return begun, ended

    def gather_on_first(self, parts: Parts) -> list[tf.Tensor]:
        """The rows of all replicas, on the first device."""
        if self.is_spread:
            return self.exchange.gather(parts)[0]
        with tf.device(self.first_device):
            return [tf.concat(leaves, axis=0) for leaves in zip(*parts, strict=True)]

    def gather_values(self, values: Parts) -> list[list[tf.Tensor]]:
        """The values of all replicas, in the order of their ids; of the same shapes on each."""
        if not self.is_spread:
            return [list(each) for each in values]
        if not values[0]:
            return [[]] * self.count
        dtypes = [value.dtype for value in values[0]]
        on_each = self.exchange.on_each
        sent = on_each(lambda own: [travelling(value) for value in own], values)
        packings = on_each(Packing, sent)
        packs = on_each(lambda one, own: [p[tf.newaxis] for p in one.pack(own)], packings, sent)
        wholes = self.exchange.all_gather(packs)[0]
        return [
            list(map(arrived, packings[0].unpack([each[number] for each in wholes]), dtypes))
            for number in range(self.count)
        ]

    def broadcast_from_chief(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The chief's arrays, bit for bit; each process passes arrays of the same sizes."""
        if not self.is_spread or not arrays:
            return list(arrays)
        own = np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in arrays])
        # As integers, which lose nothing in a sum with zeros, and all in one exchange.
        words = np.pad(own, (0, -own.size % 8)).view(np.int64)

        def exchange(part: tf.Tensor) -> tf.Tensor:
            parts = [[part if each.id == 0 else tf.zeros_like(part)] for each in self.replicas]
            return self.exchange.sum(parts)[0][0]

        parts = np.split(words, range(MAX_WORDS, words.size, MAX_WORDS))
        function = tf.function(exchange, autograph=False)
        # If `function` were called, TensorFlow would warn that it is traced again and again.
        concrete = [function.get_concrete_function(tf.TensorSpec(p.shape, tf.int64)) for p in parts]
        found = [each(tf.constant(p)).numpy() for each, p in zip(concrete, parts, strict=True)]
        ends = np.cumsum([array.nbytes for array in arrays])
        parts = np.split(np.concatenate(found).view(np.uint8)[: own.size], ends[:-1])
        return [
            np.frombuffer(part.tobytes(), array.dtype).reshape(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each process; returns once all processes have called this."""
        if not self.is_spread:
            return [list(numbers)]
        key = self.exchange, len(numbers)
        if key not in self._exchanges:

            def exchange(own: tf.Tensor) -> list[list[tf.Tensor]]:
                return self.gather_values([[own]] * len(self.replicas))

            function = tf.function(exchange, autograph=False)
            spec = tf.TensorSpec([len(numbers)], tf.int64)
            self._exchanges[key] = function.get_concrete_function(spec)
        rows = self._exchanges[key](tf.constant(numbers, tf.int64))
        return [[int(n) for n in row] for (row,) in rows[:: len(self.replicas)]]

    def any_worker(self, flag: bool) -> bool:
        """Whether the flag of any process is set, so that all of them act alike."""
        return any(is_set for (is_set,) in self.exchange_numbers([int(flag)]))

    def exchanging(self, exchange: Exchange) -> contextlib.AbstractContextManager[None]:
        """Let steps that are made in this context exchange values in another way."""
        return replaced(self, "exchange", exchange)


def local_ids(strategy: tf.distribute.Strategy) -> list[int]:
    """The ids of the replicas of this process, in the order of their devices."""
    found: list[int] = []

    def note() -> None:
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        found.append(int(tf.get_static_value(own)))

    # Only inside a replica can this be asked; in a graph that never runs, it costs nothing.
    with tf.Graph().as_default():
        strategy.run(note)
    return sorted(found)


def copies_of(variable: keras.Variable) -> Copies:
    return copies_in(variable_internals.variable_storage(variable))


def copies_in(storage: Any) -> Copies:
    if isinstance(storage, tf.distribute.DistributedValues):
        return tuple(storage.values)
    return (storage,)


def parts_or_copies(storage: Any) -> Copies:
    """The variables that hold a storage's value, each on its device."""
    return storage.parts if is_in_parts(storage) else copies_in(storage)


def is_in_parts(storage: Any) -> bool:
    return isinstance(storage, variable_internals.VariableInParts)


def by_device(variables: Sequence[tf.Variable]) -> dict[str, list[int]]:
    """The places of variables by device; "" for those in parts."""
    places: dict[str, list[int]] = {}
    for place, variable in enumerate(variables):
        device = "" if is_in_parts(variable) else variable.device
        places.setdefault(device, []).append(place)
    return places


def is_shared(parts: Copies) -> bool:
    return len(parts) == 1


def with_copies(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """The strategy, or one of the same devices that gives each replica a copy of the variables."""
    # With central storage the replicas would assign a variable in turn in a custom step. It would
    # save no memory: in each step every replica needs all values and computes all new ones.
    if not isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        return strategy
    logger.info("Central storage: every replica keeps a copy of the variables, as if mirrored.")
    with graph_internals.single_device():
        devices = strategy.extended.worker_devices
        return get_strategy("auto", devices=devices)


@contextlib.contextmanager
def scope_of(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The scope of a strategy, whatever scope is open around it."""
    with graph_internals.single_device(), strategy.scope():
        yield
