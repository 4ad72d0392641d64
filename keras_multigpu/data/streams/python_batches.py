"""Batches from Python code (`PyDataset`s, flows and generators) as streams of examples."""

import abc
import contextlib
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import type_error, value_error
from keras_multigpu.data.pipeline.arrays import as_array, specs_of
from keras_multigpu.data.pipeline.damage import Quarantine
from keras_multigpu.data.pipeline.loader import submit, through_gate
from keras_multigpu.data.pipeline.order import hashed, shuffled
from keras_multigpu.data.pipeline.source import Example, Stream, present, three_parts, unflatten
from keras_multigpu.identities import identity_of
from keras_multigpu.seeded_layers import preserve_random_state

logger = logging.getLogger("keras_multigpu")


class PythonBatches(Stream):
    """Batches from Python code, cut into examples."""

    def __init__(self, first: Any, name: str) -> None:
        self.name = name
        example = as_example(first, name)
        leaves = present(example)
        self.batch_size = len(leaves[0])  # Of the first batch.
        self.spec: Example = specs_of(example)
        self._quarantine = Quarantine()

    def report_to(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "spec": identity_of(self.spec)}

    @abc.abstractmethod
    def batches(self, epoch: int, shuffle: bool, seed: int) -> Iterator[Any]:
        """One epoch's batches."""

    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        leaves = present(self.spec)
        signature = tuple(tf.TensorSpec((None, *leaf.shape), leaf.dtype) for leaf in leaves)

        def generate(epoch: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
            batches = map(self._leaves, self.batches(int(epoch), shuffle, seed))
            return through_gate(batches, self._quarantine)

        dataset = tf.data.Dataset.from_generator(
            generate, output_signature=signature, args=(epoch,)
        )
        return dataset.unbatch().map(lambda *leaves: unflatten(self.spec, leaves))

    def _leaves(self, batch: Any) -> tuple[np.ndarray, ...]:
        """The arrays of a batch; a `ValueError` unless they have the shapes of the first batch."""
        example = as_example(batch, self.name)
        arrays = present(example)
        specs = present(self.spec)
        shapes = [array.shape[1:] for array in arrays]
        expected = [tuple(spec.shape) for spec in specs]
        if shapes != expected or len({len(array) for array in arrays}) > 1:
            raise value_error(
                f"{self.name} gave a batch that does not look like its first one.",
                f"Expected arrays of shapes (n, ...) with {expected} after n.",
                "Bring all examples to one shape, for example with padding.",
                shapes=[array.shape for array in arrays],
            )
        return tuple(
            array.astype(spec.dtype.as_numpy_dtype, copy=False)
            for array, spec in zip(arrays, specs, strict=True)
        )


class PyDatasetStream(PythonBatches):
    """The batches of a `keras.utils.PyDataset`, read by as many threads as it has workers."""

    def __init__(self, dataset: Any, steps: int | None = None) -> None:
        self._dataset = dataset
        self._length = require_length(dataset, steps)
        self._is_endless = dataset.num_batches is None
        with preserve_random_state():
            first = dataset[0]
        super().__init__(first, f"the PyDataset {type(dataset).__name__}")
        if dataset.use_multiprocessing:
            logger.warning(
                "%s asks for processes, but is read by one thread. If several threads may call its "
                "`__getitem__`, set use_multiprocessing=False and `workers`.",
                type(dataset).__name__,
            )

    def batches(self, epoch: int, shuffle: bool, seed: int) -> Iterator[Any]:
        dataset = self._dataset
        numbers = np.arange(self._length)
        if self._is_endless:
            # Continue where the previous epoch ended.
            numbers = numbers + epoch * self._length
        elif shuffle:
            numbers = shuffled(numbers, self._length, hashed(seed, epoch))
        dataset.on_epoch_begin()
        workers = 1 if dataset.use_multiprocessing else max(1, dataset.workers)
        yield from read_in_threads(dataset.__getitem__, numbers.tolist(), workers)
        dataset.on_epoch_end()


_drawing = threading.RLock()


@contextlib.contextmanager
def keep_numpy() -> Iterator[None]:
    """Let one thread at a time draw from NumPy's global state, and restore it: it is the user's."""
    with _drawing:
        state = np.random.get_state()
        try:
            yield
        finally:
            np.random.set_state(state)


class FlowStream(PythonBatches):
    """A flow of an `ImageDataGenerator`, called as it is."""

    def __init__(self, flow: Any) -> None:
        self._flow = copy.copy(flow)
        self.class_names = list(getattr(flow, "class_indices", ())) or None
        with keep_numpy():
            first = self._flow[0]
        super().__init__(first, f"the flow {type(flow).__name__}")
        self.num_examples = int(flow.n)

    def batches(self, epoch: int, shuffle: bool, seed: int) -> Iterator[Any]:
        flow = copy.copy(self._flow)
        flow.shuffle = shuffle
        if flow.seed is None:
            # Makes an epoch reproducible, and equal for all workers.
            flow.seed = seed % 2**31
        before = epoch * len(flow)
        with keep_numpy():
            np.random.seed(flow.seed + before)
            flow.on_epoch_end()

        def read(number: int) -> Any:
            with keep_numpy():
                # The flow seeds NumPy's global state from its seed and this count.
                flow.total_batches_seen = before + number
                return flow[number]

        yield from read_in_threads(read, range(len(flow)), max(1, flow.workers))


class GeneratorStream(PythonBatches):
    """The batches of generators that `factory(epoch)` makes: `steps` of each, or all."""

    def __init__(self, factory: Callable[[int], Any], steps: int | None = None) -> None:
        self._factory = factory
        self._steps = steps
        # For the shapes. Each epoch has its own iterator, so no batch is lost.
        with preserve_random_state():
            first = next(self._iterator(), None)
        if first is None:
            raise value_error(
                "The generator gave no batch.",
                "Expected batches (x, y) from each new iterator.",
                "Check that the function makes a new iterator whenever it is called.",
                batches=0,
            )
        super().__init__(first, "the generator")

    def _iterator(self, epoch: int = 0) -> Iterator[Any]:
        made = self._factory(epoch)
        try:
            return iter(made)
        except TypeError:
            raise type_error(
                "What the function returned cannot be iterated over.",
                "Expected an iterator over batches.",
                "Use `yield` in the function, or return an iterator.",
                made=type(made).__name__,
            ) from None

    def batches(self, epoch: int, shuffle: bool, seed: int) -> Iterator[Any]:
        count = 0
        iterator = self._iterator(epoch)
        for count, batch in enumerate(iterator, start=1):
            yield batch
            if count == self._steps:
                return
        if self._steps is not None:
            raise value_error(
                f"The generator ended after {count} of {self._steps} batches.",
                "Expected at least `steps` batches in each epoch.",
                steps=self._steps,
                epoch=epoch,
            )


def read_in_threads(read: Callable[[int], Any], numbers: Any, workers: int) -> Iterator[Any]:
    """Batches in order, read in advance by `workers` threads, or by this one if that is 1."""
    if workers == 1:
        yield from map(read, numbers)
        return
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="keras_multigpu_batches") as pool:
        try:
            for number in numbers:
                waiting.append(submit(pool, read, number))
                # One more than there are threads, so that none idles meanwhile.
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def require_length(dataset: Any, steps: int | None) -> int:
    length = dataset.num_batches
    if length is None and steps is None:
        raise value_error(
            "The PyDataset has no length.",
            "Expected a known number of batches in an epoch.",
            "Give it a `__len__`, or pass `steps`.",
            dataset=type(dataset).__name__,
        )
    if length is not None and steps is not None:
        raise value_error(
            "`steps` was given with a PyDataset that has a length.",
            "Expected one of them.",
            steps=steps,
            length=length,
        )
    return int(length) if length is not None else int(steps or 0)


def as_example(batch: Any, name: str) -> Example:
    """A batch of up to three parts, or inputs alone, as `(x, y, sample_weight)` of arrays."""
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    # tf.data would stack the arrays in a list.
    example = keras.tree.lists_to_tuples(three_parts(parts, f"A batch of {name}"))
    return keras.tree.map_structure(as_array, example)
