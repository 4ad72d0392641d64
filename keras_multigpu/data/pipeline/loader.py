"""Reads batches from a source in the threads of a `tf.data.Dataset`."""

import atexit
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_multigpu.data.pipeline.augmenting import Augment
from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample, Quarantine
from keras_multigpu.data.pipeline.order import Part, Place, Plan, draw_seeds
from keras_multigpu.data.pipeline.source import Example, Source, present, unflatten

T = TypeVar("T")

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# How many batches are read concurrently; further cores share the work on each. With the prefetched
# ones they take 18.4 MiB on two cores for 32 images of 224x224.
BATCHES_AT_ONCE = min(CORES, 4)

# How many finished batches wait for the training step.
PREFETCHED = 2

_THREADS_PER_BATCH = CORES // BATCHES_AT_ONCE
_LEAST_PIECE = 4
# How many threads the gate remembers before it looks which have ended.
_MOST_THREADS = 256
# tf.data has stopped if there is no call during this many polls, 10 ms apart.
_QUIET = 5
# Threads start when they are needed. There are enough that no batch waits for one.
_READING = ThreadPoolExecutor(1000, thread_name_prefix="keras_multigpu_read")
_SHARING = ThreadPoolExecutor(CORES, thread_name_prefix="keras_multigpu_share")


@dataclasses.dataclass(eq=False)
class Loader:
    """Reads a batch by its number.

    Args:
        first: Where batch 0 begins.
        part: Which rows of each batch to read.
        weights: The weight of each class, if classes are weighted.
        skip: Whether to leave out damaged examples; otherwise they raise `DamagedExample`.
        marks_missing: Whether skipped examples keep their rows, with a weight of zero, while all
            others have a weight of one.
    """

    source: Source
    plan: Plan
    _: dataclasses.KW_ONLY
    first: Place
    part: Part
    weights: np.ndarray | None
    skip: bool
    quarantine: Quarantine
    marks_missing: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: dict[int, int] = {}
        self._leaves = present(self.source.spec)
        self._weight_leaves = len(present(self.source.spec[2]))

    def __call__(self, step: int) -> list[np.ndarray]:
        """The leaves of one batch, and the seeds of its examples."""
        try:
            return self._batch(step)
        except Ending:
            raise
        except Exception as error:
            self.quarantine.failed(error)
            raise

    def _batch(self, step: int) -> list[np.ndarray]:
        place = self.plan.place(self.first, step)
        positions = self.plan.positions(place.start, self.part)
        order = self.plan.order
        # With oversampling an example may recur in an epoch, with new draws each time.
        examples, repeats = order.examples(place.epoch, positions)
        seeds = draw_seeds(order.seed, place.epoch, examples, repeats)
        leaves = [
            np.empty((len(examples), *spec.shape), spec.dtype.as_numpy_dtype)
            for spec in self._leaves
        ]
        damaged = read_in_pieces(self.source.read, leaves, examples, seeds)
        for row, cause in damaged:
            name = self.source.example_name(int(examples[row]))
            if not self.skip:
                raise DamagedExample(cause, name)
            self.quarantine.add(place.epoch, name, cause)
        self._finish(place.epoch)
        leaves = self._with_weights(leaves, examples)
        return drop_rows(damaged, [*leaves, seeds], self.marks_missing)

    def _finish(self, epoch: int) -> None:
        """Give the warning of an epoch when all its batches have been read."""
        # Batches are read concurrently, so the last one need not finish last.
        with self._lock:
            done = self._finished.pop(epoch, 0) + 1
            start = self.first.start if epoch == self.first.epoch else 0
            if done < self.plan.steps(start):
                self._finished[epoch] = done
                return
        self.quarantine.warn(epoch)

    def _with_weights(self, leaves: list[np.ndarray], examples: np.ndarray) -> list[np.ndarray]:
        """The leaves with class weights multiplied into the sample weights."""
        count = self._weight_leaves
        if self.marks_missing:
            return [*leaves[: len(leaves) - count], np.ones(len(examples), np.float32)]
        if self.weights is None:
            return leaves
        assert self.source.labels is not None
        factor = self.weights[self.source.labels[examples]].astype(np.float32)
        weights = leaves[-count:] if count else [np.ones(1, np.float32)]
        return [
            *leaves[: len(leaves) - count],
            *(leaf * factor.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in weights),
        ]


def drop_rows(damaged: Damaged, leaves: list[np.ndarray], keep_shape: bool) -> list[np.ndarray]:
    """A batch without its damaged rows, or with zeros in their place."""
    if not damaged:
        return leaves
    rows = [row for row, _ in damaged]
    if not keep_shape:
        return [np.delete(leaf, rows, axis=0) for leaf in leaves]
    for leaf in leaves:
        leaf[rows] = b"" if leaf.dtype == object else 0
    return leaves


def read_in_pieces(
    read: Callable[..., Damaged], out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray
) -> Damaged:
    """As `Source.read`, by several threads if there are more cores than concurrent batches."""
    pieces = min(_THREADS_PER_BATCH, len(indices) // _LEAST_PIECE)
    return in_pieces(pieces, _SHARING, read, out, indices, seeds)


def in_pieces(
    pieces: int,
    pool: ThreadPoolExecutor,
    read: Callable[..., Damaged],
    out: Sequence[np.ndarray],
    indices: np.ndarray,
    seeds: np.ndarray,
) -> Damaged:
    """As `Source.read`, in pieces read by the threads of a pool; a single piece by this thread."""
    if pieces <= 1:
        return read(out, indices, seeds)
    bounds = np.linspace(0, len(indices), pieces + 1).astype(int)

    def piece(low: int, high: int) -> Damaged:
        part = read([leaf[low:high] for leaf in out], indices[low:high], seeds[low:high])
        return [(low + row, cause) for row, cause in part]

    bounded = zip(bounds[:-1], bounds[1:], strict=True)
    parts = [submit(pool, piece, low, high) for low, high in bounded]
    return [entry for part in parts for entry in part.result()]


def make_dataset(
    loader: Loader, spec: Example, *, steps: int | None, size: int | None, augment: Augment | None
) -> tf.data.Dataset:
    """A dataset of the batches that a loader reads; `size` is None if it varies."""
    leaves = [*present(spec), tf.TensorSpec((2,), tf.int32)]
    dtypes = [leaf.dtype for leaf in leaves]

    # TensorFlow keeps the Python functions of a graph until the process ends. This one must not
    # keep the loader, and so a cache, alive. The dataset does, and iterators keep the dataset.
    known = weakref.ref(loader)

    def load_step(step: np.ndarray) -> list[np.ndarray]:
        with GATE:
            reader = known()
            if reader is None:  # The iterator was dropped while it was reading ahead.
                raise Ending
            return call_in_lasting_thread(reader, int(step))

    def load(step: tf.Tensor) -> Any:
        tensors = tf.numpy_function(load_step, [step], dtypes, name="read_batch")
        for tensor, leaf in zip(tensors, leaves, strict=True):
            tensor.set_shape([size, *leaf.shape])
        x, y, weight = unflatten(spec, tensors[:-1])
        if augment is not None:
            x, y, weight = augment(x, y, weight, tensors[-1])
        return as_element(x, y, weight)

    # An endless dataset counts through all epochs, since the plan needs each batch's number;
    # `repeat` would restart from zero.
    dataset = tf.data.Dataset.range(np.iinfo(np.int64).max if steps is None else steps)
    # Not AUTOTUNE: an iterator's end would wait for its thread, for up to seconds.
    dataset = dataset.map(load, num_parallel_calls=BATCHES_AT_ONCE, deterministic=True)
    dataset.loader = loader
    return dataset.prefetch(PREFETCHED).with_options(plain_options())


def as_element(x: Any, y: Any, weight: Any) -> Any:
    """A batch in the form that Keras expects of a dataset's elements."""
    if weight is not None:
        return x, y, weight
    # Keras would take a single tuple of inputs for `(x, y)`.
    return (x, y) if y is not None else (x,) if isinstance(x, tuple) else x


def plain_options() -> tf.data.Options:
    """Options for datasets that TensorFlow must neither shard nor tune."""
    options = tf.data.Options()
    options.deterministic = True
    # An iterator's end would wait for the tuner's thread, which sleeps for up to seconds.
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def call_in_lasting_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call in a thread that lives until Python ends."""
    # tf.data starts threads for each iterator, and OpenCV and TensorFlow leak memory per thread.
    return submit(_READING, call, *arguments).result()


class Ending(StopIteration):
    """The data is no longer needed: its dataset is gone, or Python is shutting down.

    A `StopIteration` is the only error that TensorFlow does not log by itself.
    """

    def __init__(self) -> None:
        super().__init__("What is being read is no longer needed.")


def submit(pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """`pool.submit`; raises `Ending` if Python is shutting down."""
    try:
        return pool.submit(call, *arguments)
    except RuntimeError:
        raise Ending from None


class Gate:
    """Admits calls from tf.data's threads until Python shuts down, then waits for them to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._calls = 0
        self._closed = False
        # A thread that enters Python during its shutdown is killed, and TensorFlow would wait for
        # its result forever.
        atexit.register(self.close)

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1
            if len(self._threads) > _MOST_THREADS:
                # Those that have left Python; they come back as new ones.
                self._threads &= sys._current_frames().keys()
            self._threads.add(threading.get_ident())
            if self._closed:
                raise Ending

    def __exit__(self, *exception: Any) -> None:
        """Do nothing: `close` examines the threads themselves."""

    def close(self, patience: float = 10) -> None:
        """Admit no more calls, and wait until all have returned and no new one arrives."""
        with self._lock:
            self._closed = True
            # This thread must not wait for itself.
            self._threads.discard(threading.get_ident())
        quiet, calls, end = 0, self._calls, time.monotonic() + patience
        # tf.data goes on until its buffers are full of errors.
        while self._threads and quiet < _QUIET and time.monotonic() < end:
            time.sleep(0.01)
            with self._lock:
                # A call ends only when its thread has left Python: after the gate, TensorFlow still
                # converts an error to text.
                busy = self._calls > calls or self._threads & sys._current_frames().keys()
                quiet, calls = 0 if busy else quiet + 1, self._calls


GATE = Gate()


def through_gate(elements: Iterator[T], quarantine: Quarantine) -> Iterator[T]:
    """The same elements, each computed inside the gate; an error is remembered."""
    end: Any = object()
    while True:
        try:
            with GATE:
                element = next(elements, end)
        except Exception as error:
            # A generator replaces an `Ending` by a `RuntimeError`.
            if isinstance(error, Ending) or isinstance(error.__cause__, Ending):
                return
            quarantine.failed(error)
            raise
        if element is end:
            return
        yield element
