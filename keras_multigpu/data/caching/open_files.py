"""`OpenFiles`: the files of a cache folder, with what this process knows of its examples."""

import numpy as np

from keras_multigpu.data.caching.rows import Rows

SUM = np.dtype(np.uint32)
"""The type of a checksum."""


class OpenFiles:
    """The open files of a cache folder.

    Attributes:
        leaves: A file for each leaf of the examples.
        sums_file: That of the checksums.
        sums: The checksums as this process read or wrote them; zero where an example is missing.
    """

    def __init__(self, leaves: list[Rows], sums: Rows, count: int) -> None:
        self.leaves = leaves
        self.sums_file = sums
        self.sums = np.empty(count, SUM)
        sums.read(self.sums, np.arange(count))
        self._checked: tuple[list[tuple[int, int]], np.ndarray] = ([], self.sums)

    def checked(self) -> np.ndarray:
        """Of which examples the checksums have been compared since the files last changed."""
        state = [leaf.state() for leaf in self.leaves]
        if state != self._checked[0]:
            # A new array: what a thread has read before the change, it marks in the old one.
            self._checked = state, np.zeros(len(self.sums), bool)
        return self._checked[1]
