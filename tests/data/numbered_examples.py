"""A source for tests of caches: images filled with their number."""

import numpy as np
import tensorflow as tf
from helpers.example_source import ExampleSource

from keras_multigpu.data import Batches
from keras_multigpu.data.pipeline.damage import DamagedExample


class Numbers(ExampleSource):
    """Example i is a 2x2 image of i, with the class i % 3; reads are recorded."""

    name = "numbers"

    def __init__(self, count=10, settings="plain", damaged=(), draws=False):
        self.num_examples = count
        self.spec = (tf.TensorSpec((2, 2, 1), tf.uint8), tf.TensorSpec((), tf.int32), None)
        self.labels = np.arange(count) % 3
        self.settings = settings
        self.damaged = set(damaged)
        self.draws = draws
        self.read_ones = []

    def read_one(self, index, seed):
        self.read_ones.append(index)
        if index in self.damaged:
            raise DamagedExample("torn in two")
        return np.full((2, 2, 1), index % 256, np.uint8), index % 3, None

    def identity(self, exact=False):
        return f"numbers, {self.settings}"


def fill(source, where, count=None):
    """Fill the cache of a source, or of its first examples."""
    batches = Batches(source, cache=where, shuffle=False)
    (batches if count is None else batches.take(count)).epoch(0)


def numbers_of(dataset):
    return [int(number) for x, *_ in dataset for number in x[:, 0, 0, 0]]
