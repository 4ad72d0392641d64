"""Image files with their targets, as a source."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, read_rows
from keras_multigpu.data.sources.file_table import FileTable, digest_of
from keras_multigpu.data.sources.targets import Targets
from keras_multigpu.identities import identify_array


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
            # Keras multiplies weights only if they have as many axes as an example's loss.
            axes = [1] * max(len(targets.spec.shape) - 1, 0)
            weights = weights.reshape(-1, *axes)
        self.name = name
        self.num_examples = len(files)
        self.has_files = True
        if targets is not None:
            self.labels = targets.labels
            self.class_names = targets.class_names
        self._files = files
        self._weights = weights
        self.set_decoder(decoder, targets)

    def set_decoder(self, decoder: ImageDecoder, targets: Targets | None) -> None:
        """Decode images, and with them masks, in another way."""
        self.decoder, self.targets, self.draws = decoder, targets, decoder.draws
        weights = self._weights
        self.spec = (
            tf.TensorSpec(decoder.shape, tf.uint8),
            None if targets is None else targets.spec,
            None if weights is None else tf.TensorSpec(weights.shape[1:], tf.float32),
        )

    def stages(self) -> dict[int, Source]:
        if len(self.decoder.sizes) == 1:
            return {0: self}
        return {epoch: self._in_epoch(epoch) for epoch in self.decoder.sizes}

    def _in_epoch(self, epoch: int) -> Source:
        same = copy.copy(self)
        targets = None if self.targets is None else self.targets.in_epoch(epoch)
        same.set_decoder(self.decoder.in_epoch(epoch), targets)
        return same

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        rest = iter(out)
        images = next(rest)
        contents = self._files.contents(indices)

        def read(row: int) -> None:
            images[row] = self.decoder.decode(next(contents)(), seeds[row])

        damaged = read_rows(len(indices), read)
        if self.targets is not None:
            known = {row for row, _ in damaged}
            causes = self.targets.read(next(rest), indices, seeds)
            damaged += [(row, cause) for row, cause in causes if row not in known]
        if self._weights is not None:
            next(rest)[...] = self._weights[indices]
        return damaged

    def without_draws(self) -> Source:
        if not self.draws and len(self.decoder.sizes) == 1:
            return self
        same = copy.copy(self)
        targets = None if self.targets is None else self.targets.without_draws()
        same.set_decoder(self.decoder.without_draws(), targets)
        return same

    def example_name(self, index: int) -> str:
        return self._files.path(index)

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {
            "files": digest_of(self._files, exact),
            "images": self.decoder.settings,
            "targets": None if self.targets is None else self.targets.identity(exact),
            "weights": identify_array(self._weights),
        }
