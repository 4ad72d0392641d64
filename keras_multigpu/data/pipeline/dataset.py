"""Turns a loader into a `tf.data.Dataset` of batches."""

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.pipeline.augmenting import Augment
from keras_multigpu.data.pipeline.loader import BATCHES_AT_ONCE, GATE, Loader, in_lasting_thread
from keras_multigpu.data.pipeline.source import Example, filled, present

PREFETCHED = 2
"""How many batches wait, ready, for the training step."""


def batches_of(
    loader: Loader, spec: Example, *, steps: int | None, size: int | None, augment: Augment | None
) -> tf.data.Dataset:
    """A dataset of the batches that a loader reads; `size` is None where it differs."""
    leaves = [*present(spec), tf.TensorSpec((2,), tf.int32)]
    dtypes = [leaf.dtype for leaf in leaves]

    # TensorFlow keeps the functions that a graph calls until the process ends. So this one must
    # not keep the loader, and with it a cache; the dataset does, and its iterators keep that.
    known = weakref.ref(loader)

    def loaded(step: np.ndarray) -> list[np.ndarray]:
        with GATE:
            loader = known()
            assert loader is not None, "The dataset that was being read is gone."
            return in_lasting_thread(loader, int(step))

    def load(step: tf.Tensor) -> Any:
        tensors = tf.numpy_function(loaded, [step], dtypes, name="read_batch")
        for tensor, leaf in zip(tensors, leaves, strict=True):
            tensor.set_shape([size, *leaf.shape])
        x, y, weight = filled(spec, tensors[:-1])
        if augment is not None:
            x, y, weight = augment(x, y, weight, tensors[-1])
        return as_element(x, y, weight)

    # Without an end it counts on through all epochs: the plan derives a batch's place from its
    # number, and `repeat` would begin anew with zero.
    dataset = tf.data.Dataset.range(np.iinfo(np.int64).max if steps is None else steps)
    # Our own number and not AUTOTUNE: the end of an iterator waits for its thread, up to seconds.
    dataset = dataset.map(load, num_parallel_calls=BATCHES_AT_ONCE, deterministic=True)
    # The function above holds it weakly; it lives as long as the dataset.
    dataset.loader = loader
    return dataset.prefetch(PREFETCHED).with_options(plain_options())


def as_element(x: Any, y: Any, weight: Any) -> Any:
    """A batch in the form that Keras expects of a dataset's elements."""
    if weight is not None:
        return x, y, weight
    # A lone tuple of inputs would be taken for `(x, y)`.
    return (x, y) if y is not None else (x,) if isinstance(x, tuple) else x


def plain_options() -> tf.data.Options:
    """Options of datasets whose batches are sharded here, and not by TensorFlow."""
    options = tf.data.Options()
    options.deterministic = True
    # The pipeline is sized here, and the end of an iterator waits for the tuner's thread, which
    # sleeps for up to seconds.
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
