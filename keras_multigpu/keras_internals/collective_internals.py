"""TensorFlow's collectives between replicas, checked on TensorFlow 2.21.

Replicas that exchange a tensor name the same *group*, an integer for their devices, and the same
*instance*, an integer for this exchange. TensorFlow's own launchers count both from the start for
each strategy, so for the devices of one process `Collectives` numbers them:

- Strategies of other devices would join the same group, and those of the same devices the same
  instance with other shapes: an error that ends all sums of the process (tensorflow#61314).
- The instances of each device would be counted by themselves. Two threads that run steps of one
  strategy at once draw in turn, and add each other's gradients without a word.
- Each call would draw new ones, and TensorFlow keeps them all: 1.6 KB of the host's memory for each
  sum of two replicas, so 6 GB an hour for a MobileNet with ten steps a second.
"""

import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce

from keras_multigpu.keras_internals.graph_internals import single_device

# For all strategies, because those of the same devices share a group.
_instances = itertools.count(1)


def collectives_of(strategy: tf.distribute.Strategy) -> "Collectives | OfWorkers | None":
    """The collectives between a strategy's replicas; None if it sums without any."""
    sums = getattr(strategy.extended, "_cross_device_ops", None)
    if not isinstance(sums, CollectiveAllReduce):
        return None
    if sums._group_size > len(sums._devices):
        return OfWorkers(sums._launchers)
    return Collectives(sums._devices, sums._options.implementation.value)


class Collectives:
    """Exchanges between the devices of this process, of which each tensor travels by itself.

    Args:
        devices: The devices, by place.
        implementation: What TensorFlow calls the way that they take, such as "NCCL".
    """

    def __init__(self, devices: Sequence[str], implementation: str) -> None:
        self._hint, self._group = implementation.lower(), group_of(devices)
        self._tokens = []
        for device in devices:
            with tf.init_scope(), single_device(), tf.device(device):
                # In graphs, what uses the same resource runs in the order in which it was made.
                # NCCL needs the same order on all devices.
                self._tokens.append(tf.Variable(0.0, trainable=False))

    def all_reduce(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum of a tensor over all replicas, on each of them."""
        reduce = partial(tf.raw_ops.CollectiveReduceV2, merge_op="Add", final_op="Id")
        return self._launched(reduce, parts)

    def all_gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of all replicas, of equal shapes, one after another, on each of them."""
        return self._launched(tf.raw_ops.CollectiveGatherV2, parts)

    def all_to_all(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows that all replicas have for each: of each tensor, one row for every place."""
        # CPUs have no `CollectiveReduceScatterV2`, which moves as many bytes.
        return self._launched(tf.raw_ops.CollectiveAllToAllV2, parts)

    def _launched(
        self, collective: Callable[..., tf.Tensor], parts: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        instance = instance_of(parts[0])

        def launch(token: tf.Variable, part: tf.Tensor) -> tf.Tensor:
            with tf.device(token.device):
                return collective(
                    input=part,
                    group_size=len(self._tokens),
                    group_key=self._group,
                    instance_key=instance,
                    ordering_token=[token.handle],
                    communication_hint=self._hint,
                )

        return together([partial(launch, token) for token in self._tokens], parts)


class OfWorkers:
    """Exchanges between the devices of several processes, which must count alike.

    So TensorFlow's own launchers count. Of their methods, the public `batch_all_reduce`
    concatenates the tensors of a call, so a sum starts when the last of them is there, and the
    public `all_gather` exchanges shapes first.
    """

    def __init__(self, launchers: Sequence[Any]) -> None:
        self._launchers = launchers

    def all_reduce(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As that of `Collectives`, on the devices of this process."""
        return together([launcher.all_reduce for launcher in self._launchers], parts)

    def all_gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As that of `Collectives`, on the devices of this process."""
        gathers = [partial(launcher._all_gather, options=None) for launcher in self._launchers]
        return together(gathers, parts)


def together(
    functions: Sequence[Callable[[tf.Tensor], tf.Tensor]], parts: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """What each function returns for its part; they wait for each other."""
    if not tf.executing_eagerly():
        return [function(part) for function, part in zip(functions, parts, strict=True)]
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function, part: function(part), functions, parts))


def group_of(devices: Sequence[str]) -> int:
    """The group of all strategies of these devices.

    They share one, because each group costs its GPUs an NCCL communicator, which TensorFlow keeps.
    The names of devices include the worker's number, so those of joined workers differ. TensorFlow
    gives its own strategies groups from 1.
    """
    return 2**30 + zlib.crc32(",".join(sorted(devices)).encode()) % 2**30


def instance_of(part: tf.Tensor) -> tf.Tensor:
    """The instance of an exchange of tensors like this one."""
    graph = tf.compat.v1.get_default_graph()
    # Branches and loops have no values of a call.
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if tf.executing_eagerly() or not graph.building_function:
        return new_instance()
    of_call = InstanceOfCall() if part.shape.is_fully_defined() else new_instance
    with graph.as_default():
        return graph.capture_call_time_value(of_call, tf.TensorSpec([], tf.int32))


class InstanceOfCall:
    """The instance of an exchange in a call of its function: one for each thread, again and again.

    A thread's next call begins when its last one has ended. Only tensors of another shape must have
    another instance.
    """

    def __init__(self) -> None:
        self._known: dict[int, tf.Tensor] = {}

    def __call__(self) -> tf.Tensor:
        thread = threading.get_ident()
        if thread not in self._known:
            self._known[thread] = new_instance()
        return self._known[thread]


def new_instance() -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(next(_instances), tf.int32)
