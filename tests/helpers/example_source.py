"""A source that reads one example at a time, for tests."""

import abc

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
