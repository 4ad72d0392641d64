"""Arrays in memory, or memory-mapped, as a source."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.data.pipeline.arrays import as_array, class_labels, common_length, specs_of
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.identities import identify_array, identity_of


class ArraySource(Source):
    """Examples in arrays; targets and weights may be missing."""

    name = "arrays"

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        data = keras.tree.lists_to_tuples((x, y, sample_weight))
        data = keras.tree.map_structure(as_array, data)
        self._arrays = present(data)
        self.num_examples = common_length(self._arrays)
        self.spec = specs_of(data)
        self.labels = class_labels(data[1])

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        for target, array in zip(out, self._arrays, strict=True):
            target[...] = array[indices]
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        arrays = [identify_array(array, whole=exact) for array in self._arrays]
        return {"spec": identity_of(self.spec), "arrays": arrays}
