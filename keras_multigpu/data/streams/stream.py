"""Batches of a stream, whose examples can only be read from front to end.

One graph, which gets the epoch's number, reads all epochs, so an endless dataset is traced once:

    epoch -> examples -> skip -> batches -> shards -> finished -> augmented

All workers read the same examples, and each finishes (decodes) those of its own shard. To start
within an epoch, the examples before are read and discarded.
"""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.checks import value_error
from keras_multigpu.data.caching.cached_source import require_memory
from keras_multigpu.data.caching.filling import size_of_one
from keras_multigpu.data.pipeline.damage import DamagedExample, Quarantine
from keras_multigpu.data.pipeline.loader import (
    BATCHES_AT_ONCE,
    GATE,
    PREFETCHED,
    as_element,
    plain_options,
)
from keras_multigpu.data.pipeline.order import Place, draw_seeds, hashed, steps_of
from keras_multigpu.data.pipeline.settings import Batching
from keras_multigpu.data.pipeline.source import Example, Stream, present

# How many examples in memory a shuffle draws from.
SHUFFLE_BUFFER = 1024

# How many examples are finished together while a cache fills.
FINISHED_AT_ONCE = 32


def with_cache(stream: Stream, settings: Batching) -> Stream:
    """The stream, with its cache if there is one; a `ValueError` for unsupported settings."""
    if settings["balance"] is not None:
        raise value_error(
            f"`balance` needs labels that are known before reading, and {stream.name} is a stream.",
            "Expected a source with random access.",
            "Pass `class_weight` to `fit`, or weight or resample the examples in the dataset.",
            balance=settings["balance"],
        )
    if settings["on_error"] == "skip" and not stream.names_damage:
        raise value_error(
            f"{stream.name} does not name its damaged examples.",
            'Expected on_error="raise": an error inside a dataset names no example to list.',
            "Repair the data, or call `dataset.ignore_errors()`, which drops them silently.",
            on_error=settings["on_error"],
        )
    return stream if settings["cache"] is None else with_memory(stream, settings["cache"])


def steps(stream: Stream, global_batch_size: int, settings: Batching, start: int = 0) -> int | None:
    """The number of batches in an epoch; None if unknown."""
    if stream.num_examples is None:
        return None
    return steps_of(stream.num_examples - start, global_batch_size, settings["remainder"])


@dataclasses.dataclass
class Epochs:
    """The batches of a stream from `first` on; for the other arguments see `Reading`."""

    stream: Stream
    global_batch_size: int
    settings: Batching
    first: Place
    shard: tuple[int, int]
    augment: Any
    quarantine: Quarantine
    marks_missing: bool

    def __post_init__(self) -> None:
        # The epochs that have had a batch.
        self._met: set[int] = set()
        self.stream.report_to(self.quarantine)
        if isinstance(self.stream, CachedStream):
            self.stream.prepare()

    def dataset(self, stop: int | None) -> tf.data.Dataset:
        """The batches of all epochs before `stop`, or of all."""

        def element(example: Example, seeds: tf.Tensor) -> Any:
            return as_element(*(self.augment(*example, seeds) if self.augment else example))

        last = np.iinfo(np.int64).max if stop is None else stop
        batches = tf.data.Dataset.range(self.first.epoch, last).flat_map(self._epoch)
        batches = batches.map(element, num_parallel_calls=BATCHES_AT_ONCE, deterministic=True)
        count = steps(self.stream, self.global_batch_size, self.settings, self.first.start)
        if stop is None:
            count = int(tf.data.INFINITE_CARDINALITY)
        if count is not None and stop in (None, self.first.epoch + 1):
            # TensorFlow cannot infer it, and Keras's progress bar needs it.
            batches = batches.apply(tf.data.experimental.assert_cardinality(count))
        return batches.prefetch(PREFETCHED).with_options(plain_options())

    @tf.autograph.experimental.do_not_convert
    def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        """The batches of an epoch, as `(example, seeds)`, with a warning or an error at its end."""
        start = tf.where(epoch == self.first.epoch, np.int64(self.first.start), np.int64(0))
        examples = self.stream.examples(
            epoch, bool(self.settings["shuffle"]), int(self.settings["seed"])
        )
        require_sliceable(examples.element_spec, self.stream)

        def ready(number: tf.Tensor, batch: Any) -> Any:
            return self._shard(epoch, start, number, batch)

        drop = self.settings["remainder"] == "drop"
        batches = examples.skip(start).batch(self.global_batch_size, drop_remainder=drop)
        batches = batches.enumerate().map(
            ready, num_parallel_calls=BATCHES_AT_ONCE, deterministic=True
        )
        # A dataset without elements, whose filter runs at the end of the epoch.
        end = tf.data.Dataset.from_tensors(0).filter(lambda _: self._end(epoch, start))
        return batches.concatenate(end.flat_map(lambda _: batches.take(0)))

    def _shard(
        self, epoch: tf.Tensor, start: tf.Tensor, number: tf.Tensor, batch: Any
    ) -> tuple[Example, tf.Tensor]:
        """This shard of a batch, finished, with the seeds of its examples."""
        first = present(batch)[0]
        total = first.shape[0] or tf.shape(first, tf.int64)[0]
        bounds = share_bounds(total, *self.shard)
        low, high = (tf.cast(bound, tf.int64) for bound in bounds)
        wanted = bounds[1] - bounds[0] if isinstance(total, int) else None
        if self.shard != (0, 1):
            batch = map_leaves(lambda leaf: leaf[low:high], batch)
        rows = tf.range(low, high)
        seeds = self._seeds(epoch, start + number * self.global_batch_size + rows)
        example, damage = self.stream.finish(batch, seeds)
        if self.marks_missing:
            example = (*example[:2], tf.ones_like(rows, tf.float32))
        if damage is not None:
            stay = self.marks_missing
            example, seeds = self._without_damaged(epoch, example, seeds, damage, stay)
            wanted = wanted if stay else None
        return with_size((example, seeds), wanted)

    # Python code called from the graph.

    def _seeds(self, epoch: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Two seeds for each position in the epoch; `int32[n, 2]`."""

        def draw(epoch: np.ndarray, positions: np.ndarray) -> np.ndarray:
            self._met.add(int(epoch))
            seed = int(self.settings["seed"])
            return draw_seeds(seed, int(epoch), positions, np.zeros_like(positions))

        return in_python(draw, [epoch, positions], tf.int32, [None, 2])

    def _without_damaged(
        self, epoch: tf.Tensor, example: Example, seeds: tf.Tensor, damage: tf.Tensor, stay: bool
    ) -> tuple[Example, tf.Tensor]:
        """A batch without its damaged rows (see `Stream.finish`), or with weight zero there."""

        def note(epoch: np.ndarray, damage: np.ndarray) -> np.ndarray:
            for name, cause in damage.tolist():
                if not cause:
                    continue
                if self.settings["on_error"] == "raise":
                    raise self.quarantine.failed(DamagedExample(cause.decode(), name.decode()))
                self.quarantine.add(int(epoch), name.decode(), cause.decode())
            return np.array([not cause for _, cause in damage.tolist()], np.bool_)

        intact = in_python(note, [epoch, damage], tf.bool, [None])
        if self.settings["on_error"] == "raise":
            # Nothing is left out, but the check must run first.
            with tf.control_dependencies([intact]):
                return map_leaves(tf.identity, example), tf.identity(seeds)
        if stay:
            return (*example[:2], tf.cast(intact, tf.float32)), seeds
        return map_leaves(lambda leaf: tf.boolean_mask(leaf, intact), (example, seeds))

    def _end(self, epoch: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """Give the epoch's warning, or an error if it had no batch; always False."""

        def check_end(epoch: np.ndarray, start: np.ndarray) -> np.ndarray:
            if int(epoch) not in self._met and not start:
                # Without an error, an endless dataset would search for a batch forever.
                name = self.stream.name
                raise self.quarantine.failed(
                    value_error(
                        f"There is no batch in epoch {int(epoch) + 1}: {name} ended too soon.",
                        'Expected at least one example, with remainder="drop" a full batch.',
                        "Check the dataset and the batch size; a generator may be used up.",
                        epoch=int(epoch),
                    )
                )
            self.quarantine.warn(int(epoch))
            return np.array(False)

        return in_python(check_end, [epoch, start], tf.bool, [])


def require_sliceable(spec: Any, stream: Stream) -> None:
    for leaf in keras.tree.flatten(spec):
        if isinstance(leaf, tf.SparseTensorSpec | tf.data.DatasetSpec):
            raise value_error(
                f"{stream.name} has examples that cannot be cut into shards.",
                "Expected dense or ragged tensors.",
                "Call `dataset.map` with `tf.sparse.to_dense` first.",
                spec=leaf,
            )


def with_size(structure: Any, size: int | None) -> Any:
    """The structure with this static number of rows."""

    def set_length(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor):
            leaf.set_shape([size, *leaf.shape[1:]])
        return leaf

    return map_leaves(set_length, structure)


class CachedStream(Stream):
    """A stream whose finished examples are kept in memory, where they can be shuffled fully."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.name = stream.name
        self.num_examples = stream.num_examples
        self.class_names = stream.class_names
        self.names_damage = stream.names_damage
        self._lock = threading.Lock()
        self._examples: tf.data.Dataset | None = None

    def prepare(self) -> None:
        """Make the cache, which fills while the first epoch is read."""
        with self._lock:
            if self._examples is None:
                examples = finish_all(self.stream)
                leaves = keras.tree.flatten(examples.element_spec)
                if self.num_examples is not None and all(
                    isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
                    for leaf in leaves
                ):
                    require_memory(self.num_examples * size_of_one(leaves), self.name)
                self._examples = examples.cache()

    def identity(self) -> dict[str, Any]:
        return self.stream.identity()

    def report_to(self, quarantine: Quarantine) -> None:
        self.stream.report_to(quarantine)

    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        """As `Stream.examples`, with the damage that `finish` has found."""
        assert self._examples is not None
        if not shuffle:
            return self._examples
        # All examples are in memory anyway, so the buffer may hold all.
        return buffer_shuffled(self._examples, epoch, seed, tf.data.UNKNOWN_CARDINALITY)

    def finish(self, examples: Any, seeds: tf.Tensor) -> tuple[Example, tf.Tensor | None]:
        return examples


def with_memory(stream: Stream, where: str | Path) -> CachedStream:
    """The stream with its cache, which all `Batches` of the stream share."""
    if where != "memory":
        raise value_error(
            f"{stream.name} is a stream, which cannot be kept in a folder.",
            'Expected cache="memory".',
            "Keep it in memory, or call `cache(file)` on the dataset, or pass a source that "
            "can be read in any order.",
            cache=where,
        )
    if stream.draws or stream.infinite:
        why = "is infinite" if stream.infinite else "is drawn again whenever it is read"
        raise value_error(
            f"{stream.name} {why}.",
            "Expected a finite number of examples that never change.",
            cache=where,
        )
    if stream.memory is None:
        stream.memory = CachedStream(stream)
    return stream.memory


def finish_all(stream: Stream) -> tf.data.Dataset:
    """All finished examples of a stream in its own order, each with its damage."""
    # `Stream.examples` must be called in a graph, in which the epoch is a tensor.
    epoch = tf.data.Dataset.range(1)
    examples = epoch.flat_map(
        tf.autograph.experimental.do_not_convert(lambda epoch: stream.examples(epoch, False, 0))
    )
    if type(stream).finish is Stream.finish:
        return examples.map(lambda *example: (example, None))
    seeds = np.zeros((FINISHED_AT_ONCE, 2), np.int32)

    def finish(*batch: Any) -> Any:
        count = tf.shape(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None))[0]
        batch = batch if len(batch) > 1 else batch[0]
        return stream.finish(batch, tf.constant(seeds)[:count])

    ready = examples.batch(FINISHED_AT_ONCE).map(
        tf.autograph.experimental.do_not_convert(finish),
        num_parallel_calls=BATCHES_AT_ONCE,
        deterministic=True,
    )
    return ready.unbatch()


def in_python(
    function: Callable[..., np.ndarray],
    arguments: list[tf.Tensor],
    dtype: tf.DType,
    shape: list[int | None],
) -> tf.Tensor:
    def call(*values: np.ndarray) -> np.ndarray:
        with GATE:
            return function(*values)

    result = tf.numpy_function(call, arguments, dtype)
    result.set_shape(shape)
    return result


def buffer_shuffled(
    examples: tf.data.Dataset, epoch: tf.Tensor, seed: int, buffer: int = SHUFFLE_BUFFER
) -> tf.data.Dataset:
    """Shuffle with a buffer, in an order that depends on seed and epoch; call it in a graph."""
    # The graph's own seed, so that the program's `tf.random.set_seed` does not change the order.
    tf.random.set_seed(1)
    return examples.shuffle(buffer, seed=epoch_seed(seed, epoch), reshuffle_each_iteration=False)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """The seed of all shuffling in an epoch: a scalar `int64` below `2**31`."""

    def hashes(epoch: np.ndarray) -> np.ndarray:
        return (hashed(seed, int(epoch), 4) >> np.uint64(33)).astype(np.int64)[0]

    return in_python(hashes, [epoch], tf.int64, [])


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), structure
    )
