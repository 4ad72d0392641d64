"""Caches in memory."""

import gc
import weakref

import pytest
import tensorflow as tf
from numbered_examples import Numbers

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.caching.cached_source import cached


def test_the_memory_is_freed_with_the_batches():
    source = Numbers(10)
    batches = Batches(source, global_batch_size=4, cache="memory")
    batches.reading().source.prepare()
    array = weakref.ref(batches.reading().source._cache._blocks[0][0])
    del batches, source
    gc.collect()
    assert array() is None


def test_too_little_memory_is_refused():
    source = Numbers(10)
    source.spec = (tf.TensorSpec((2**40,), tf.float32), None, None)
    with pytest.raises(MemoryError, match=r"take 40 TiB, and .* of memory are available\. .* 90%"):
        cached(source, "memory").prepare()
    assert source.read_ones == []
