"""Reads batches that know their epochs, such as `keras_multigpu.data.Batches`.

This part of the package does not know where data comes from, so such an object is told by what it
offers.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem

OFFERED = ("epoch", "epochs", "evaluation", "for_replicas", "steps_per_epoch", "failure")


def knows_epochs(x: Any) -> bool:
    """Whether `x` offers its batches epoch by epoch."""
    return all(hasattr(type(x), name) for name in OFFERED)


class EpochSource:
    """Batches of an object that offers them epoch by epoch.

    In training one dataset goes on from epoch to epoch, so that the next epoch's first batches
    are being read while this one's last are in use. Evaluation reads one epoch, always the same.

    Args:
        batches: The object; in evaluation what its `evaluation()` returned.
        training: Whether epochs follow one another.
        class_weight: Weights of classes, which become sample weights.
    """

    def __init__(
        self, batches: Any, training: bool, class_weight: dict[int, float] | None = None
    ) -> None:
        self.num_batches: int | None = batches.steps_per_epoch
        self.endless = training and self.num_batches is not None
        self.may_be_empty = bool(batches.may_lose_examples)
        self.is_countable = self.num_batches is not None and not self.may_be_empty
        self._batches = batches
        self._training = training
        self._class_weight = class_weight
        self._epoch = 0
        self._made: tuple[int, tf.data.Dataset] | None = None
        self.spec: Any = None
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin with this epoch."""
        self._epoch = epoch if self._training else 0
        self._dataset()

    def iterator(self) -> Iterator[Any]:
        """A new iterator: over all epochs if it is endless, otherwise over the next one."""
        iterator = iter(self._dataset())
        if self._training and not self.endless:
            self._epoch += 1
        return iterator

    def _dataset(self) -> tf.data.Dataset:
        if self._made is None or self._made[0] != self._epoch:
            batches = self._batches
            made = batches.epochs((self._epoch, 0)) if self.endless else batches.epoch(self._epoch)
            if self._class_weight is not None:
                made = made.map(keras_internals.class_weights_of_batch(self._class_weight))
            self._made = self._epoch, made
            self.spec = made.element_spec
        return self._made[1]

    def cause(self) -> Exception | None:
        """Why reading failed, where the object knows."""
        failure: Exception | None = self._batches.failure
        return failure

    def on_epoch_begin(self) -> None:
        """Nothing to do."""

    def on_epoch_end(self) -> None:
        """Nothing to do."""


def refuse_what_batches_bring(x: Any, **separate: Any) -> None:
    """Raise a `ValueError` where such batches come with arguments that they already decide."""
    given = {name: value for name, value in separate.items() if value is not None}
    if given:
        raise ValueError(
            problem(
                f"{type(x).__name__} came together with {' and '.join(f'`{n}`' for n in given)}.",
                "Expected batches that bring their own targets, weights and size.",
                "Leave the arguments out; `batches.with_(...)` changes the batch size.",
                **given,
            )
        )
