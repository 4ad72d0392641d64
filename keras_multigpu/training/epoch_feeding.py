"""Reads batches that know their epochs, such as `keras_multigpu.data.Batches`.

This part of the package does not know where data comes from, so such an object is told by what it
offers.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem

OFFERED = ("epoch", "epochs", "evaluation", "for_replicas", "global_batch_size", "steps_per_epoch")


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
        steps: How many batches make an epoch of `fit`, if not those of an epoch of the data.
        class_weight: Weights of classes, which become sample weights.
    """

    def __init__(
        self,
        batches: Any,
        training: bool,
        steps: int | None = None,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        refuse_endless_epoch(batches, steps)
        self.num_batches: int | None = batches.steps_per_epoch
        self.endless = training and (self.num_batches is not None or steps is not None)
        self.may_be_empty = bool(batches.may_lose_examples)
        self.is_countable = self.num_batches is not None and not self.may_be_empty
        self._batches = batches
        self._training = training
        self._steps = steps
        self._class_weight = class_weight
        self._epoch = 0
        self._made: tuple[int, tf.data.Dataset] | None = None
        self.spec: Any = None
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin with this epoch of `fit`."""
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
            made = self._endless() if self.endless else self._batches.epoch(self._epoch)
            if self._class_weight is not None:
                refuse_weights_twice(made.element_spec, self._class_weight)
                made = made.map(keras_internals.class_weights_of_batch(self._class_weight))
            self._made = self._epoch, made
            self.spec = made.element_spec
        return self._made[1]

    def _endless(self) -> tf.data.Dataset:
        """All batches from the beginning of an epoch of `fit` on."""
        if self._steps is None:
            return self._batches.epochs((self._epoch, 0))
        done = self._epoch * self._steps
        if self.num_batches is None:
            return self._batches.epochs().skip(done)
        epoch, batch = divmod(done, self.num_batches)
        return self._batches.epochs((epoch, batch * self._batches.global_batch_size))

    def cause(self, error: tf.errors.OpError) -> Exception | None:
        """Why reading failed, if that is what `error` is about."""
        failure: Exception | None = self._batches.failure
        return failure if failure is not None and str(failure) in str(error) else None

    def on_epoch_begin(self) -> None:
        """Nothing to do."""

    def on_epoch_end(self) -> None:
        """Nothing to do."""


def refuse_what_batches_bring(x: Any, **separate: Any) -> None:
    """Raise a `ValueError` where such batches come with arguments that they already decide."""
    given = {name: type(value) for name, value in separate.items() if value is not None}
    if given:
        raise ValueError(
            problem(
                f"{type(x).__name__} came together with {' and '.join(f'`{n}`' for n in given)}.",
                "Expected batches that bring their own targets, weights and size.",
                "Leave the arguments out; `batches.with_(...)` changes the batch size.",
                **given,
            )
        )


def refuse_endless_epoch(batches: Any, steps: int | None) -> None:
    """Raise a `ValueError` where an epoch would never end."""
    if steps is None and batches.is_infinite:
        raise ValueError(
            problem(
                "The data never ends, and nothing says how long an epoch is.",
                "Expected a number of steps.",
                "Pass `steps_per_epoch` to `fit`, `steps` to `evaluate`.",
                data=batches,
            )
        )


def refuse_weights_twice(spec: Any, class_weight: dict[int, float]) -> None:
    """Raise a `ValueError` where class weights come to batches that have weights."""
    if isinstance(spec, tuple) and len(spec) == 3:
        raise ValueError(
            problem(
                "`class_weight` came to batches that have sample weights.",
                "Expected one of the two.",
                'Write `batches.with_(balance="class_weight")`, which multiplies them, or leave '
                "out `balance`.",
                class_weight=class_weight,
            )
        )
