"""How bench_augmentation.py runs a layer: in a compiled function, and in a dataset."""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from data_peers import CORES
from photographs import originals

BATCH, SIZE, CLASSES = 64, 224, 10

Run = Callable[[int], Any]
"""Passes a number of batches through a layer, and returns the last one."""


@functools.cache
def photographs() -> np.ndarray:
    """Random crops of photographs, `uint8[64, 224, 224, 3]`."""
    random = np.random.default_rng(0)
    images = [image for image in originals().values() if min(image.shape[:2]) >= SIZE]
    parts = []
    for number in range(BATCH):
        image = images[number % len(images)]
        top, left = (random.integers(image.shape[axis] - SIZE + 1) for axis in (0, 1))
        parts.append(image[top : top + SIZE, left : left + SIZE])
    return np.stack(parts)


def batch(dtype: str, mixes: bool) -> Any:
    """The batch that all layers get, with labels for those that mix examples."""
    images = tf.constant(photographs(), dtype)
    labels = tf.one_hot(tf.range(BATCH) % CLASSES, CLASSES)
    return {"images": images, "labels": labels} if mixes else images


def in_model(layer: Any, data: Any) -> Run:
    """The layer in a compiled function, as a model's training step calls it."""
    compiled = tf.function(lambda data: layer(data))

    def run(batches: int) -> Any:
        for _ in range(batches):
            result = compiled(data)
        return result

    return run


def in_pipeline(layer: Any, data: Any) -> Run:
    """The layer in a dataset of batches, with the options that `Batches` sets."""
    options = tf.data.Options()
    options.autotune.enabled = False
    # As `Batches` calls it.
    augment = getattr(layer, "augment_batch", None)
    augment = augment and tf.autograph.experimental.do_not_convert(augment)

    def change(step: tf.Tensor) -> Any:
        if augment is None:
            return layer(data)
        seeds = tf.stack([tf.fill([BATCH], tf.cast(step, tf.int32)), tf.range(BATCH)], axis=1)
        if isinstance(data, dict):
            return augment(data["images"], data["labels"], None, seeds, True)[:2]
        return augment(data, None, None, seeds, True)[0]

    count = tf.Variable(0, dtype=tf.int64)
    steps = tf.data.Dataset.from_tensors(0).flat_map(lambda _: tf.data.Dataset.range(count))
    steps = steps.map(change, num_parallel_calls=CORES, deterministic=True).with_options(options)

    def run(batches: int) -> Any:
        count.assign(batches)
        return deque(steps, maxlen=1)[0]

    return run


WAYS = {"model": in_model, "pipeline": in_pipeline}
LEAST = {"model": 4, "pipeline": 2 * CORES}
"""The fewest batches in a reading."""
