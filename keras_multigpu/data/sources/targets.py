"""The targets of image files: classes or values."""

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.identities import identify_array

LABEL_MODES = ("int", "categorical", "binary", None)


class Targets(abc.ABC):
    """The targets of image files; the attributes are those of a `Source`, for targets alone."""

    spec: tf.TensorSpec
    labels: np.ndarray | None = None
    class_names: list[str] | None = None

    @abc.abstractmethod
    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        """Fill `out` with the targets of some examples; returns the same as `Source.read`."""

    def without_draws(self) -> "Targets":
        """The same targets without random draws, for evaluation."""
        return self

    def in_epoch(self, epoch: int) -> "Targets":
        """The same targets with the image size of an epoch."""
        return self

    @abc.abstractmethod
    def identity(self, exact: bool = False) -> dict[str, Any]:
        """As `Source.identity`."""


class ArrayTargets(Targets):
    """A number or an array of them for each file; or with `classes` a one at each class number."""

    def __init__(
        self,
        values: np.ndarray,
        class_names: list[str] | None = None,
        labels: np.ndarray | None = None,
        classes: int | None = None,
    ) -> None:
        self._values, self._classes = values, classes
        self.class_names, self.labels = class_names, labels
        shape, dtype = ((classes,), np.float32) if classes else (values.shape[1:], values.dtype)
        self.spec = tf.TensorSpec(shape, dtype)

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        values = self._values[indices]
        # One-hot rows of all files would take much memory.
        out[...] = values[:, None] == np.arange(self._classes) if self._classes else values
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        values = identify_array(self._values, whole=exact)
        return {"values": values, "classes": self._classes}


def of_classes(labels: np.ndarray, label_mode: str, names: list[str] | None) -> ArrayTargets:
    """The class of each file in Keras's form for each `label_mode`."""
    numbers = np.asarray(labels, np.int32)
    count = len(names) if names else int(numbers.max(initial=-1)) + 1
    if label_mode == "binary" and count != 2:
        raise value_error(
            f"There are {count} classes.",
            'Expected exactly two for label_mode="binary".',
            'Choose two with `class_names`, or pass label_mode="int".',
            class_names=names,
        )
    values = numbers[:, None].astype(np.float32) if label_mode == "binary" else numbers
    return ArrayTargets(values, names, numbers, count if label_mode == "categorical" else None)
