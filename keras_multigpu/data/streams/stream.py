"""Batches of a stream, whose examples can only be read from front to end.

One graph, which gets the epoch's number, reads all epochs, so an endless dataset is traced once:

    epoch -> examples -> skip -> batches -> shards -> finished -> augmented

All workers read the same examples, and each finishes (decodes) those of its own shard. To start
within an epoch, the examples before are read and discarded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.checks import value_error
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


def require_supported(stream: Stream, settings: Batching) -> None:
    """Raise a `ValueError` for settings that need examples in any order."""
    if settings["cache"] is not None:
        raise value_error(
            f"`cache` needs examples that can be read in any order, and {stream.name} is a stream.",
            "Expected a source with random access.",
            "Call `cache()` on the dataset, or leave `cache` out.",
            cache=settings["cache"],
        )
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
