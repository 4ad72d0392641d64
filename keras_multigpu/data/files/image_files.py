"""Image files with their targets as a source."""

import copy
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.files.file_table import FileTable
from keras_multigpu.data.files.targets import Targets
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, read_rows
from keras_multigpu.identities import of_array

# The size of at most this many files is read, which takes a slow disk 0.1 ms each.
MOST_SIZES = 10_000


class ImageFiles(Source):
    """Image files, decoded to `uint8` arrays of one size, with their targets."""

    def __init__(
        self,
        files: FileTable,
        decoder: ImageDecoder,
        targets: Targets | None = None,
        weights: np.ndarray | None = None,
        *,
        name: str,
    ) -> None:
        if weights is not None and targets is not None:
            # A weight has as many axes as the loss of an example, or Keras would not multiply them.
            axes = [1] * max(len(targets.spec.shape) - 1, 0)
            weights = weights.reshape(-1, *axes)
        self.name = name
        self.num_examples = len(files)
        self.draws = decoder.draws
        self.has_files = True
        self.spec = (
            tf.TensorSpec(decoder.shape, tf.uint8),
            None if targets is None else targets.spec,
            None if weights is None else tf.TensorSpec(weights.shape[1:], tf.float32),
        )
        if targets is not None:
            self.labels = targets.labels
            self.class_names = targets.class_names
        self._files = files
        self.decoder = decoder
        self.targets = targets
        self._weights = weights

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        rest = iter(out)
        images = next(rest)

        def read(row: int) -> None:
            path = self._files.path(int(indices[row]))
            images[row] = self.decoder.decode_file(path, seeds[row])

        damaged = read_rows(len(indices), read)
        if self.targets is not None:
            known = {row for row, _ in damaged}
            causes = self.targets.read(next(rest), indices, seeds)
            damaged += [(row, cause) for row, cause in causes if row not in known]
        if self._weights is not None:
            next(rest)[...] = self._weights[indices]
        return damaged

    def still(self) -> Source:
        if not self.draws:
            return self
        still = copy.copy(self)
        still.draws, still.decoder = False, self.decoder.still()
        still.targets = None if self.targets is None else self.targets.still()
        return still

    def example_name(self, index: int) -> str:
        return self._files.path(index)

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {
            "files": state_of(self._files, exact),
            "images": self.decoder.settings,
            "targets": None if self.targets is None else self.targets.identity(exact),
            "weights": of_array(self._weights),
        }


def state_of(files: FileTable, exact: bool) -> str:
    """A short text that changes with the names of files, and with the sizes of some.

    An exact one changes with their folder, and with the sizes and times of change of all.
    """
    content = hashlib.sha256()
    # Data that were moved as a whole are the same data, but their cache is made anew.
    top = "" if exact else files.common_folder()
    step = 1 if exact else max(len(files) // MOST_SIZES, 1)
    for index in range(len(files)):
        path = files.path(index)
        known = state_of_file(path, exact) if index % step == 0 else ""
        content.update(f"{path[len(top) :]}\0{known}\0".encode(errors="surrogatepass"))
    return content.hexdigest()[:32]


def state_of_file(path: str, exact: bool) -> str:
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # The latter at paths that no file can have.
        return "missing"
    return f"{state.st_size} {state.st_mtime_ns}" if exact else str(state.st_size)
