"""How an epoch is cut into batches: arithmetic on positions."""

from typing import NamedTuple

import numpy as np

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.data.road.order import Order


class Place(NamedTuple):
    """Where a batch begins."""

    epoch: int
    start: int


class Plan(NamedTuple):
    """The batches of all epochs.

    Attributes:
        order: Which example stands where.
        global_batch_size: The number of examples of a batch.
        remainder: `"keep"` or `"drop"`: what becomes of a last batch that is smaller.
    """

    order: Order
    global_batch_size: int
    remainder: str

    def steps(self, start: int = 0) -> int:
        """The number of batches from a position to the end of its epoch."""
        left = max(self.order.length - start, 0)
        if self.remainder == "drop":
            return left // self.global_batch_size
        return -(-left // self.global_batch_size)

    def place(self, first: Place, step: int) -> Place:
        """Where a batch begins, counted from the batch at `first` on, over all epochs."""
        in_first = self.steps(first.start)
        if step < in_first:
            return Place(first.epoch, first.start + step * self.global_batch_size)
        epochs, step = divmod(step - in_first, self.steps())
        return Place(first.epoch + 1 + epochs, step * self.global_batch_size)

    def positions(self, start: int, share: tuple[int, int]) -> np.ndarray:
        """The positions of share i of n, cut as in `batch_sizes`, of the batch at `start`."""
        size = min(self.global_batch_size, self.order.length - start)
        low, high = share_bounds(size, *share)
        return np.arange(start + low, start + high, dtype=np.int64)

    def static_size(self, share: tuple[int, int], start: int = 0) -> int | None:
        """The size of this share in every batch, None if it differs."""
        size = self.global_batch_size
        whole = self.order.length % size == 0 and (self.order.length - start) % size == 0
        if self.remainder == "keep" and not whole:
            return None
        low, high = share_bounds(self.global_batch_size, *share)
        return high - low
