"""TensorFlow's all-reduce: how it tells the sums of a process apart, checked on TensorFlow 2.21.

Replicas that add up name the same *group*, an integer for their devices, and the same *instance*,
an integer for this sum. TensorFlow's own launchers count both from the start for each strategy:

- Strategies of other devices join the same group, and those of the same devices the same instance
  with other shapes: an error that ends all sums of the process (tensorflow#61314).
- The instances of each device are counted by themselves. Two threads that run steps of one strategy
  at once draw in turn, and add each other's gradients without a word.
- Each call draws new ones, and TensorFlow keeps them all: 1.6 KB of the host's memory for each sum
  of two replicas, so 6 GB an hour for a MobileNet with ten steps a second.
"""

import collections
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

# For all strategies, because those of the same devices share a group.
_numbers = itertools.count(1)

# Whether the sum that a thread is making has the same shape in all calls.
_made = threading.local()


def launchers_of(strategy: Any) -> Sequence[Any] | None:
    """What makes TensorFlow's collectives on each device of this process, in order.

    None if a strategy sums without collectives.
    """
    return getattr(strategy.extended._cross_device_ops, "_launchers", None)


def all_reduce(launchers: Sequence[Any], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of a tensor over all replicas, on each of this process."""
    # The public `all_reduce` concatenates the tensors of a call, whatever their types, so a sum
    # starts when the last of them is there. For a single tensor it adds six operations, and keeps
    # its graph for a gradient.
    return launched([launcher.all_reduce for launcher in launchers], parts)


def all_gather(launchers: Sequence[Any], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors of all replicas, of equal shapes, one after another, on each of this process."""
    # The public one exchanges the shapes first.
    return launched([partial(launcher._all_gather, options=None) for launcher in launchers], parts)


def launched(
    functions: Sequence[Callable[[tf.Tensor], tf.Tensor]], parts: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    if not tf.executing_eagerly():
        return [function(part) for function, part in zip(functions, parts, strict=True)]
    # Without a graph each waits for the others.
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function, part: function(part), functions, parts))


def keep_apart(strategy: tf.distribute.Strategy) -> None:
    """Keep a strategy's sums apart from those of other strategies and threads.

    Functions traced before stay as they are, and so do sums of several processes, which must count
    alike.
    """
    for sums in list(vars(strategy.extended).values()):
        if not isinstance(sums, CollectiveAllReduce) or sums._group_size > len(sums._devices):
            continue
        with sums._lock:
            if not isinstance(sums._launchers[0], Launcher):
                numbers = Numbers(len(sums._launchers))
                sums._launchers = [
                    Launcher(launcher, place, group_of(sums._devices), numbers)
                    for place, launcher in enumerate(sums._launchers)
                ]


def group_of(devices: tuple[str, ...]) -> int:
    """The group of all strategies of these devices.

    They share one, because each group costs its GPUs an NCCL communicator, which TensorFlow keeps.
    The names of devices include the worker's number, so those of joined workers differ. TensorFlow
    gives its own strategies groups from 1.
    """
    return 2**30 + zlib.crc32(",".join(sorted(devices)).encode()) % 2**30


class Numbers:
    """The numbers of a strategy's sums: each replica's n-th sum in a graph has the same."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()
        # What other replicas have drawn already, by graph; outside of graphs, by this object.
        self._ahead: weakref.WeakKeyDictionary[Any, list[collections.deque[int]]]
        self._ahead = weakref.WeakKeyDictionary()

    def draw(self, place: int, graph: Any = None) -> int:
        """The number of a replica's next sum."""
        with self._lock:
            where = self if graph is None else graph
            if where not in self._ahead:
                self._ahead[where] = [collections.deque() for _ in range(self._replicas)]
            ahead = self._ahead[where]
            if not ahead[place]:
                number = next(_numbers)
                for each in ahead:
                    each.append(number)
            return ahead[place].popleft()


class Launcher(CollectiveReplicaLauncher):
    """Makes the sums of one replica, in place of TensorFlow's own launcher."""

    def __init__(self, stock: Any, place: int, group: int, numbers: Numbers) -> None:
        super().__init__(
            group, stock._group_size, stock._collective_keys, stock._device, stock._options
        )
        self._place, self._numbers = place, numbers

    def all_reduce(self, input_tensor: tf.Tensor, *args: Any, **more: Any) -> tf.Tensor:
        _made.is_fixed = input_tensor.shape.is_fully_defined()
        return super().all_reduce(input_tensor, *args, **more)

    def _all_gather(self, input_tensor: tf.Tensor, *args: Any, **more: Any) -> tf.Tensor:
        _made.is_fixed = input_tensor.shape.is_fully_defined()
        return super()._all_gather(input_tensor, *args, **more)

    def _next_instance_key(self) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        # Branches and loops have no values of a call.
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        if tf.executing_eagerly() or not graph.building_function:
            return as_key(self._numbers.draw(self._place))
        number = self._numbers.draw(self._place, graph)
        value = InstanceOfCall() if _made.is_fixed else new_key
        with graph.as_default():
            # All replicas get the value of the first that asks for this number.
            return graph.capture_call_time_value(
                value, tf.TensorSpec([], tf.int32), key=("sum", number)
            )


class InstanceOfCall:
    """The instance of a sum in a call of its function: one for each thread, again and again.

    A thread's next call begins when its last one has ended. Only a sum of another shape must have
    another instance.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tf.Tensor] = {}

    def __call__(self) -> tf.Tensor:
        thread = threading.get_ident()
        if thread not in self._keys:
            self._keys[thread] = new_key()
        return self._keys[thread]


def new_key() -> tf.Tensor:
    return as_key(next(_numbers))


def as_key(number: int) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(number, tf.int32)
