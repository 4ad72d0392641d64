"""A source that reads one example at a time, for tests."""

import abc

import tensorflow as tf

from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.pipeline.source import Source, present, read_rows


class ExampleSource(Source):
    """`read_one` returns an example as arrays, or raises `DamagedExample`."""

    @abc.abstractmethod
    def read_one(self, index, seed):
        """Read one example."""

    def read(self, out, indices, seeds):
        def read(row):
            leaves = present(self.read_one(int(indices[row]), seeds[row]))
            for array, leaf in zip(out, leaves, strict=True):
                array[row] = leaf

        return read_rows(len(indices), read)


class Torn(ExampleSource):
    """Arrays of inputs and classes, of which some examples cannot be read."""

    name = "torn"

    def __init__(self, x, y, damaged):
        self.num_examples = len(x)
        self.spec = (tf.TensorSpec(x.shape[1:], x.dtype), tf.TensorSpec((), tf.int32), None)
        self._x, self._y, self._damaged = x, y, damaged

    def read_one(self, index, seed):
        if index in self._damaged:
            raise DamagedExample("torn in two")
        return self._x[index], self._y[index], None

    def example_name(self, index):
        return f"page {index}"
