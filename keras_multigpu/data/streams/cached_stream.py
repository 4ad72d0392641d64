"""Keeps the examples of a stream in memory; then they can be shuffled fully, too."""

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.caching.filling import size_of_one
from keras_multigpu.data.caching.memory_cache import require_memory
from keras_multigpu.data.pipeline.damage import Quarantine
from keras_multigpu.data.pipeline.loader import BATCHES_AT_ONCE
from keras_multigpu.data.pipeline.source import Example, Stream
from keras_multigpu.data.streams.shuffling import buffer_shuffled

FINISHED_AT_ONCE = 32
"""How many examples are finished together while the cache fills."""


class CachedStream(Stream):
    """A stream whose examples are read and finished once."""

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
                examples = finished(self.stream)
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
        """As `Stream.examples`, with what is wrong with each of them."""
        assert self._examples is not None
        if not shuffle:
            return self._examples
        # All examples are in memory: a buffer for all of them holds no more than that.
        return buffer_shuffled(self._examples, tf.data.UNKNOWN_CARDINALITY, epoch, seed)

    def finish(self, examples: Any, seeds: tf.Tensor) -> tuple[Example, tf.Tensor | None]:
        return examples


def cached(stream: Stream, where: str | Path) -> CachedStream:
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
            "Expected examples that can all be kept, and are the same each time.",
            "Leave out `cache`.",
            cache=where,
        )
    if stream.memory is None:
        stream.memory = CachedStream(stream)
    return stream.memory


def finished(stream: Stream) -> tf.data.Dataset:
    """All single examples of a stream in its own order, finished, with what is wrong with them."""
    # `Stream.examples` is made for graphs, in which the epoch is a tensor.
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
