"""How an epoch is cut into batches: arithmetic on positions."""

from typing import NamedTuple

import numpy as np

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.data.pipeline.order import Order


class Place(NamedTuple):
    """Where a batch begins."""

    epoch: int
    start: int


class Part(NamedTuple):
    """The rows of a batch that are read: those of consecutive shards.

    Attributes:
        first: The first shard.
        stop: One after the last shard.
        shards: Into how many the batch is cut, as in `keras_multigpu.batch_sizes`.
        in_pairs: Whether rows 0 and 1, 2 and 3, and so on stay together, the last of an odd number
            with the pair before: what mixes neighbours then finds them.
    """

    first: int = 0
    stop: int = 1
    shards: int = 1
    in_pairs: bool = False

    def rows(self, size: int) -> tuple[int, int]:
        """The first row of a batch of this size, and the one after the last."""
        low = share_bounds(size, self.first, self.shards)[0]
        high = share_bounds(size, self.stop - 1, self.shards)[1]
        if self.in_pairs and high > low:
            # An odd number ends with a group of three, of which no row can be without the others.
            if high == size and size % 2:
                low = min(low, max(size - 3, 0))
            low, high = low - low % 2, min(high + high % 2, size)
        return low, high


def steps_of(examples: int, batch_size: int, remainder: str) -> int:
    whole, rest = divmod(max(examples, 0), batch_size)
    return whole + (rest > 0 and remainder == "keep")


class Plan(NamedTuple):
    """The batches of all epochs."""

    order: Order
    global_batch_size: int
    remainder: str

    def steps(self, start: int = 0) -> int:
        """The number of batches from a position to the end of its epoch."""
        return steps_of(self.order.length - start, self.global_batch_size, self.remainder)

    def place(self, first: Place, step: int) -> Place:
        """Where a batch begins, counted from the batch at `first` on, over all epochs."""
        in_first = self.steps(first.start)
        if step < in_first:
            return Place(first.epoch, first.start + step * self.global_batch_size)
        epochs, step = divmod(step - in_first, self.steps())
        return Place(first.epoch + 1 + epochs, step * self.global_batch_size)

    def positions(self, start: int, part: Part) -> np.ndarray:
        size = min(self.global_batch_size, self.order.length - start)
        low, high = part.rows(size)
        return np.arange(start + low, start + high, dtype=np.int64)

    def cuts(self, start: int, part: Part) -> np.ndarray:
        """For each batch of an epoch its size, and how many of its rows come before a part."""
        starts = start + self.global_batch_size * np.arange(self.steps(start), dtype=np.int64)
        sizes = np.minimum(self.global_batch_size, self.order.length - starts)
        # All but the last batch have one size: the bounds of a million are computed twice.
        before = {size: part.rows(size)[0] for size in map(int, np.unique(sizes))}
        return np.stack([sizes, np.array([before[int(n)] for n in sizes], np.int64)], axis=1)

    def static_size(self, part: Part, start: int = 0) -> int | None:
        """The size of this part in every batch, None if it differs."""
        size = self.global_batch_size
        whole = self.order.length % size == 0 and (self.order.length - start) % size == 0
        if self.remainder == "keep" and not whole:
            return None
        low, high = part.rows(self.global_batch_size)
        return high - low
