"""What belongs to each image of a flow: further inputs, targets and weights."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.data.from_arrays import as_array, class_labels, spec_of, weight_spec_of
from keras_multigpu.data.pipeline.source import present
from keras_multigpu.identities import of_array


class FlowTargets:
    """The further inputs, targets and weights of a flow's images, in its class mode.

    With `repeats_image` the target is the changed image itself.
    """

    def __init__(
        self,
        inputs: Sequence[Any] = (),
        y: Any = None,
        weights: Any = None,
        *,
        repeats_image: bool = False,
        class_names: list[str] | None = None,
    ) -> None:
        self.repeats_image = repeats_image
        self.class_names = class_names
        inputs = tuple(as_array(array) for array in inputs)
        weights = as_array(weights)
        if isinstance(y, Classes):
            targets, spec, self.labels = [y], y.spec, y.labels
        else:
            arrays = keras.tree.map_structure(as_array, tuple(y) if isinstance(y, list) else y)
            spec = keras.tree.map_structure(spec_of, arrays)
            targets, self.labels = present(arrays), class_labels(arrays)
        self.spec = tuple(spec_of(array) for array in inputs), spec, weight_spec_of(weights)
        self._parts = [*inputs, *targets, *present(weights)]
        self._last_input = len(inputs)

    @classmethod
    def of_arrays(cls, flow: Any) -> "FlowTargets":
        # Keras leaves out the weights where there is no target; below, too.
        return cls(flow.x_misc, flow.y, None if flow.y is None else flow.sample_weight)

    @classmethod
    def of_files(cls, flow: Any) -> "FlowTargets":
        mode, weights = flow.class_mode, flow.sample_weight
        if mode is None:
            return cls()
        if mode == "input":
            return cls(weights=weights, repeats_image=True)
        if mode == "raw":
            return cls(y=np.asarray(flow.labels), weights=weights)
        if mode == "multi_output":
            return cls(y=tuple(flow.labels), weights=weights)
        names = list(flow.class_indices)
        classes = Classes(flow.classes, len(names), mode == "categorical", flow.dtype)
        return cls(y=classes, weights=weights, class_names=names)

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray) -> None:
        """Fill arrays with what belongs to some images, one for each part, without the image."""
        for target, part in zip(out, self._parts, strict=True):
            target[...] = part[indices]

    def identity(self, exact: bool) -> list[Any]:
        return [
            part.identity(exact) if isinstance(part, Classes) else of_array(part, whole=exact)
            for part in self._parts
        ]


class Classes:
    """The classes of a flow's images (one or a list for each), as numbers or vectors of 0 and 1."""

    def __init__(self, classes: Any, count: int, vectors: bool, dtype: str) -> None:
        self._count = count
        self._vectors = vectors
        self._dtype = dtype
        if isinstance(classes, np.ndarray):
            self._numbers = classes.astype(np.int64)
            lengths = np.ones(len(classes), np.int64)
        else:
            entries = [entry if isinstance(entry, list) else [entry] for entry in classes]
            self._numbers = np.array([number for entry in entries for number in entry], np.int64)
            lengths = np.array([len(entry) for entry in entries], np.int64)
        self._ends = np.cumsum(lengths)
        self.labels = self._numbers if (lengths == 1).all() else None
        self.spec = tf.TensorSpec((count,) if vectors else (), dtype)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if not self._vectors:
            return self._numbers[indices].astype(self._dtype)
        ends = self._ends[indices]
        vectors = np.zeros((len(indices), self._count), self._dtype)
        for row, (index, end) in enumerate(zip(indices, ends, strict=True)):
            start = self._ends[index - 1] if index else 0
            vectors[row, self._numbers[start:end]] = 1
        return vectors

    def identity(self, exact: bool) -> Any:
        parts = [of_array(part, whole=exact) for part in (self._numbers, self._ends)]
        return {"classes": parts, "spec": str(self.spec)}
