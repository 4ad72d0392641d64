"""A dataset whose elements the hosts of a tf.data service make, in the order that they have here.

The service gives elements as they become ready, and what one of its workers had in hand is lost if
that worker dies. So elements travel with their places in the dataset. They are put in order here,
and one that does not come is made here: each comes once, whatever becomes of the service.
"""

import logging
import queue
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.settings import settings
from keras_multigpu.data.road.damage import Quarantine
from keras_multigpu.data.road.loader import through_gate
from keras_multigpu.keras_internals import dataset_internals

AHEAD = 64
"""How many elements wait for one that is before them, until it is made here."""

# What calls Python in a graph; another process has no such function.
PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}

_log = logging.getLogger("keras_multigpu")
_service = tf.data.experimental.service


class ServedDataset:
    """The elements of a dataset, which can be made at any place, made by a tf.data service."""

    def __init__(self, dataset: tf.data.Dataset, service: str) -> None:
        self._dataset = dataset.with_options(as_written())
        self._service = service
        require_served(self._dataset)
        require_listener(service)
        self._count = int(dataset.cardinality())
        self.quarantine = Quarantine()

    def elements(self) -> tf.data.Dataset:
        def generate() -> Iterator[Any]:
            return through_gate(self._in_order(), self.quarantine)

        spec = self._dataset.element_spec
        return tf.data.Dataset.from_generator(generate, output_signature=spec)

    def _in_order(self) -> Iterator[Any]:
        arrivals = Arrivals(self._read)
        waiting: dict[int, Any] = {}
        patience, warned = settings().heartbeat_timeout, False
        try:
            for place in range(self._count):
                while place not in waiting and len(waiting) < AHEAD:
                    arrived = arrivals.next(patience)
                    if arrived is None:
                        break
                    patience = settings().heartbeat_timeout
                    if arrived[0] >= place:  # Others were made here.
                        waiting[arrived[0]] = arrived[1]
                if place in waiting:
                    yield waiting.pop(place)
                    continue
                if not waiting:
                    patience = 0  # Until something comes again.
                if not warned:
                    warned = True
                    self._warn(place, arrivals.error)
                yield tf.data.experimental.at(self._dataset, place)
        finally:
            arrivals.stop()

    def _read(self) -> Iterator[tuple[Any, Any]]:
        def with_place(place: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return place, tf.data.experimental.at(self._dataset, place)

        numbered = tf.data.Dataset.range(self._count).map(
            tf.autograph.experimental.do_not_convert(with_place)
        )
        # Each place is given to one worker, when it asks for the next one.
        mode = _service.ShardingPolicy.DYNAMIC
        numbered = numbered.with_options(as_written())
        yield from numbered.apply(_service.distribute(mode, self._service))

    def _warn(self, place: int, error: str) -> None:
        _log.warning(
            "Element %d of the dataset did not come from the tf.data service at %s, and is made "
            "here, as are others that do not come. Is a worker gone? %s",
            place,
            self._service,
            error,
        )


def as_written() -> tf.data.Options:
    """Options under which TensorFlow runs the steps of a dataset as they stand."""
    # Steps that are merged into one can be read from front to end only. And where TensorFlow makes
    # a step parallel two threads ask for the first elements of a dataset at once, which crashes it.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return options


class Arrivals:
    """The places and elements that a thread reads, which may wait for ever; what ended it early."""

    def __init__(self, read: Any) -> None:
        self.error = ""
        self._read = read
        self._arrived: queue.Queue[tuple[int, Any] | None] = queue.Queue(1)
        self._stopped = threading.Event()
        self._over = False
        threading.Thread(target=self._run, daemon=True).start()

    def next(self, seconds: float) -> tuple[int, Any] | None:
        """The next that arrives within some seconds, if any does."""
        if self._over:
            return None
        try:
            arrived = self._arrived.get(timeout=seconds) if seconds else self._arrived.get_nowait()
        except queue.Empty:
            return None
        self._over = arrived is None
        return arrived

    def stop(self) -> None:
        """Let the thread end, once it has read what it waits for."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for place, element in self._read():
                if not self._hand_over((int(place), element)):
                    return
        except tf.errors.OpError as error:
            self.error = error.message
        self._hand_over(None)

    def _hand_over(self, arrived: tuple[int, Any] | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._arrived.put(arrived, timeout=1)
                return True
            except queue.Full:
                pass
        return False


def require_served(dataset: tf.data.Dataset) -> None:
    if calls_python(dataset):
        raise refused(
            "calls Python, which the service's processes cannot",
            "Write what `map` calls with TensorFlow's functions.",
        )
    if dataset.cardinality() < 0:
        raise refused("has no known end", "Call `dataset.take(n)` with a number.")
    if any(
        step[0] == dataset_internals.UNSEEDED[0] for step in dataset_internals.steps_of(dataset)
    ):
        raise refused(
            "shuffles, for which each worker would have an order of its own",
            "Leave its `shuffle` out; `Batches` shuffles.",
        )
    try:
        tf.data.experimental.at(dataset, 0)
    except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError) as error:
        raise refused(
            f"can be read from front to end only ({error.message})",
            "Begin with `Dataset.from_tensor_slices(files)` and read each file in `map`.",
        ) from error


def calls_python(dataset: tf.data.Dataset) -> bool:
    ignored = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    text = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=ignored
    )
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(node.op in PYTHON for part in nodes for node in part)


def require_listener(service: str) -> None:
    """Raise a `ValueError` unless somebody listens there; TensorFlow would wait for ever."""
    match = re.fullmatch(r"(?:\w+://)?(.+):(\d+)", service)
    try:
        if match is None:
            raise OSError("it is not of the form `grpc://host:port`")
        host = match[1].strip("[]")
        socket.create_connection((host, int(match[2])), settings().heartbeat_timeout).close()
    except OSError as error:
        raise value_error(
            f"There is no tf.data service at `service`: {error}.",
            "Expected the address of a `tf.data.experimental.service.DispatchServer`.",
            "Start it, with at least one `WorkerServer`, or leave `service` out.",
            service=service,
        ) from error


def refused(what: str, fix: str) -> ValueError:
    return value_error(
        f"The dataset {what}.",
        "Expected with `service` steps of TensorFlow that can be read at any place, such as "
        "`from_tensor_slices`, `map`, `batch` and `zip`.",
        f"{fix} Or leave `service` out.",
    )
