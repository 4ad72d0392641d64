"""`Batches`: the data that all sources return and `fit` takes."""

import dataclasses
from pathlib import Path
from typing import Any, Self, Unpack

import keras
import tensorflow as tf

from keras_multigpu.checks import error_of, type_error
from keras_multigpu.data import preview
from keras_multigpu.data.pipeline import subsets
from keras_multigpu.data.pipeline.damage import Damage
from keras_multigpu.data.pipeline.settings import (
    Batching,
    fill_defaults,
    parse_shard,
    with_settings,
)
from keras_multigpu.data.pipeline.source import Source, Stream
from keras_multigpu.data.reading import Reading


@with_settings
class Batches(keras.utils.PyDataset):
    """Global batches of examples, in an order that depends on (seed, epoch) alone.

    The `from_*` functions return them, and `fit`, `evaluate` and `predict` of a `DistributedModel`
    take them. `fit` reads epoch after epoch; `evaluate`, `predict` and validation read
    `evaluation()`.

    Args:
        source: The examples.
        global_batch_size: The number of examples of one optimizer step. They are split over the
            replicas; shares differ by at most one example.
        replica_batch_size: The number of examples of one replica, so that the global batch grows
            with the number of replicas. Give one of the two sizes, or neither for 32 a replica.
        shuffle: Whether to shuffle each epoch fully, in a new order; otherwise in the source's.
        seed: Integer that decides all shuffles and the random draws of `augment`.
        remainder: `"keep"` or `"drop"` a smaller last batch.
        augment: A Keras layer, a function of a batch of images, or a list of them, applied in the
            pipeline. Draws depend on seed, epoch and example, not on the replica or thread. A
            function with an argument `seeds` gets two integers for each example, for
            `tf.random.stateless_*`. In evaluation, layers and functions with an argument
            `training` get `training=False`; other functions with `seeds` are skipped.
        cache: `"memory"` or a folder: examples that can be read in any order are decoded once,
            while each epoch still shuffles and augments them. A folder identifies images by path,
            size and modification time; a replaced image with the same three goes unnoticed.
        balance: `"class_weight"` weights each example by the inverse frequency of its class.
            `"oversample"` repeats examples of smaller classes until all are as large as the
            largest, and gives every replica equally many examples of each class.
        on_error: `"raise"` an error that names a damaged example, or `"skip"` it: it is left out of
            its batch, of loss, metrics and counts, and listed in `quarantine`. `predict` returns
            NaN for it.

    Example:

    ```python
    train, validation = kmg.data.from_directory("photos", image_size=(224, 224)).split(0.2)
    model.fit(train, validation_data=validation, epochs=10)
    ```
    """

    def __init__(self, source: Source | Stream | Reading, **batching: Unpack[Batching]) -> None:
        if not isinstance(source, Reading):  # `_like` passes one.
            source = Reading(source, fill_defaults(batching))
        self._reading: Reading = source

    # Properties.

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the source; None if unknown."""
        return self._reading.num_examples

    @property
    def global_batch_size(self) -> int:
        """The number of examples of one optimizer step."""
        return self._reading.global_batch_size

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        return self._reading.steps_per_epoch

    @property
    def class_names(self) -> list[str] | None:
        """The class names in the order of their numbers; None if there are none."""
        return self._reading.source.class_names

    @property
    def class_counts(self) -> dict[str, int] | None:
        """The number of examples of each class; None unless each example has one class."""
        return self._reading.class_counts

    @property
    def class_weight(self) -> dict[int, float] | None:
        """Weights that balance the classes, for `fit(class_weight=...)`.

        Each is `examples / (classes * examples of the class)`, so the mean weight of an example is
        one. Classes without examples have weight zero and do not count.
        """
        return self._reading.class_weight

    @property
    def file_paths(self) -> list[str] | None:
        """The file of each example, in the source's order; None if examples are not files."""
        source = self._reading.source
        if not isinstance(source, Source) or not source.has_files:
            return None
        return [source.example_name(index) for index in range(source.num_examples)]

    @property
    def quarantine(self) -> list[Damage]:
        """The damaged examples found so far, each as `(name, cause)`."""
        return self._reading.quarantine.entries

    def example_at(self, epoch: int, position: int) -> str | None:
        """The name of the example at a position of an epoch: its file, if it has one.

        None if the order is not known before reading.
        """
        return self._reading.example_at(epoch, position)

    def __repr__(self) -> str:
        """A summary in one line."""
        return repr(self._reading)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        steps = self.steps_per_epoch
        if steps is None:
            raise type_error(
                "These batches have no length.",
                "Expected a source whose number of examples is known.",
                "Count them while reading, or use `steps_per_epoch`, which is None here.",
                source=self._reading.source.name,
            )
        return steps

    def __bool__(self) -> bool:
        """True, even if the length is unknown."""
        return True

    def __iter__(self) -> Any:
        """An error: each epoch has its own order."""
        raise type_error(
            "`Batches` cannot be iterated over: each epoch has an order of its own.",
            "Expected one epoch of them.",
            "Write `batches.epoch(0)`.",
            batches=self,
        )

    def __getitem__(self, index: Any) -> Any:
        """An error: each epoch has its own order."""
        return iter(self)

    @property
    def workers(self) -> int:
        """An error, which a model raises that is not distributed: Keras reads `workers` first.

        This is why `Batches` derive from `PyDataset`.
        """
        # What Python expects of an attribute that is missing.
        raise error_of(
            AttributeError,
            "`Batches` were given to a model that is not distributed.",
            "Expected a model that `keras_multigpu.distribute` has returned.",
            "Write `model = keras_multigpu.distribute(model)` before `compile`; plain Keras reads "
            "`batches.epoch(k)`, a `tf.data.Dataset`.",
            batches=self,
        )

    # Datasets.

    def epoch(
        self, number: int, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """One epoch's batches as a plain `tf.data.Dataset`, which stock Keras accepts as well.

        Args:
            number: The epoch, counted from zero.
            start: How many examples to skip at the beginning of the epoch.
            shard: `(i, n)`: part i of n of each batch. Parts are contiguous, and a part can be
                empty.
        """
        return self._reading.epoch(number, start, parse_shard(shard))

    def epochs(
        self, number: int = 0, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """The batches of an epoch and of all later epochs: an endless dataset.

        Args:
            number: The first epoch.
            start: As for `epoch`, for the first epoch.
            shard: As for `epoch`.
        """
        return self._reading.epochs(number, start, parse_shard(shard))

    def reading(self, use: str = "training") -> Reading:
        """The data for a `DistributedModel`. Internal to this package.

        Args:
            use: `"training"`, `"evaluation"` or `"prediction"`. For prediction with
                `on_error="skip"`, damaged examples stay as zeros, and the sample weights are one
                for intact examples and zero for damaged ones.
        """
        if use == "training":
            return self._reading
        return self._reading.evaluation(marks_missing=use == "prediction")

    # Copies.

    def with_(self, **batching: Unpack[Batching]) -> Self:
        """A copy with some settings changed; one batch size replaces the other.

        Args:
            **batching: Arguments of `Batches`.
        """
        return self._like(self._reading.with_(**batching))

    def evaluation(self) -> Self:
        """A copy for evaluation: every example once, in the source's order, with its own weight.

        Nothing is random: layers of `augment` get `training=False`, and random crops become center
        crops.
        """
        return self._like(self._reading.evaluation())

    def take(self, num_examples: int) -> Self:
        """A copy with some examples, chosen by the seed, or the first ones without `shuffle`.

        Args:
            num_examples: The number of examples; all if there are fewer.
        """
        reading = self._reading
        return self._part(subsets.take(reading.original, num_examples, reading.settings))

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Two disjoint parts, such as for training and validation.

        Each class is split in the same proportion. The parts depend on the seed alone.

        Args:
            fraction: The second part's fraction of the examples, between 0 and 1.
        """
        reading = self._reading
        first, second = subsets.split(reading.original, fraction, reading.settings)
        return self._part(first), self._part(second)

    def preview(
        self,
        path: str | Path | None = None,
        count: int = 8,
        bounding_box_format: str | None = None,
    ) -> Any:
        """Draw a few examples with their labels, masks and boxes, before and after augmentation.

        Args:
            path: A `.png` file to write, or None.
            count: How many examples to draw.
            bounding_box_format: The format of boxes in a dictionary with `labels`. None for that of
                `augment`.

        Returns:
            A matplotlib figure, which a notebook shows.
        """
        return preview.draw(self._reading, path, count, bounding_box_format)

    def _part(self, source: Source) -> Self:
        return self._like(dataclasses.replace(self._reading, original=source))

    def _like(self, reading: Reading) -> Self:
        return type(self)(reading)
