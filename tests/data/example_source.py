"""A source that reads one example at a time, for tests."""

import abc

from keras_multigpu.data.road.source import Source, fill_rows


class ExampleSource(Source):
    """`read_one` returns an example as arrays, or raises `DamagedExample`."""

    @abc.abstractmethod
    def read_one(self, index, seed):
        """Read one example."""

    def read(self, out, indices, seeds):
        return fill_rows(
            out, len(indices), lambda row: self.read_one(int(indices[row]), seeds[row])
        )
