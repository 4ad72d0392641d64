"""The targets of image files: classes or values."""

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import require_choice, value_error
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


class ClassTargets(Targets):
    """One class for each example, in Keras's form for each `label_mode`."""

    def __init__(
        self, labels: np.ndarray, label_mode: str, class_names: list[str] | None = None
    ) -> None:
        require_choice("label_mode", label_mode, LABEL_MODES)
        self.labels = np.asarray(labels, np.int32)
        self.class_names = class_names
        self._mode = label_mode
        self._classes = len(class_names) if class_names else int(self.labels.max(initial=-1)) + 1
        if label_mode == "binary" and self._classes != 2:
            raise value_error(
                f"There are {self._classes} classes.",
                'Expected exactly two for label_mode="binary".',
                'Choose two with `class_names`, or pass label_mode="int".',
                class_names=class_names,
            )
        shapes = {"int": (), "categorical": (self._classes,), "binary": (1,)}
        self.spec = tf.TensorSpec(
            shapes[label_mode], tf.int32 if label_mode == "int" else tf.float32
        )

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        assert self.labels is not None
        labels = self.labels[indices]
        if self._mode == "categorical":
            out[...] = 0
            out[np.arange(len(labels)), labels] = 1
        else:
            out[...] = labels.reshape(out.shape)
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        labels = identify_array(self.labels, whole=exact)
        return {"mode": self._mode, "classes": self._classes, "labels": labels}


class ValueTargets(Targets):
    """An array of numbers for each example: several labels, or regression targets."""

    def __init__(
        self,
        values: np.ndarray,
        class_names: list[str] | None = None,
        labels: np.ndarray | None = None,
    ) -> None:
        self._values = values
        self.class_names = class_names
        self.spec = tf.TensorSpec(values.shape[1:], values.dtype)
        self.labels = labels

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        out[...] = self._values[indices]
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {"values": identify_array(self._values, whole=exact)}
