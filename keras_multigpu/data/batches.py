"""`Batches`: what every source of data becomes, and what `fit` takes."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import replicas as devices
from keras_multigpu.checks import printable, require_positive_integer, type_error
from keras_multigpu.data import preview
from keras_multigpu.data.caching import cached_source as caching
from keras_multigpu.data.files.targets import class_weights, counts_of
from keras_multigpu.data.pipeline import augmenting, subsets
from keras_multigpu.data.pipeline.damage import Damage, Quarantine
from keras_multigpu.data.pipeline.dataset import batches_of
from keras_multigpu.data.pipeline.loader import Loader
from keras_multigpu.data.pipeline.order import Order
from keras_multigpu.data.pipeline.plan import Part, Place, Plan
from keras_multigpu.data.pipeline.settings import (
    CHANGEABLE,
    DEFAULTS,
    REPLICA_BATCH_SIZE,
    Batching,
    Use,
    changes_of,
    completed,
    require_batches,
    require_place,
    require_shard,
    require_valid,
)
from keras_multigpu.data.pipeline.source import Source, Stream, present
from keras_multigpu.data.streams import stream as streaming
from keras_multigpu.identities import identity_of

PASSED_ON = "        **batching: Arguments of `Batches`."
"""How a docstring says that a function takes them, too."""

Maker = TypeVar("Maker", bound=Callable[..., Any])


class Batches(keras.utils.PyDataset):
    """Global batches of examples, in an order that (seed, epoch) alone decides.

    The `from_*` functions make them; `DistributedModel`'s `fit`, `evaluate` and `predict` take
    them. `fit` reads epoch after epoch, `evaluate` and validation read `evaluation()`, `predict`
    reads `prediction()`.

    Args:
        source: Where the examples come from.
        global_batch_size: The number of examples of one optimizer step. Replicas share them
            evenly; their shares differ by at most one.
        replica_batch_size: One replica's share; the global batch grows with the replicas. Give one
            of the two sizes, or none for 32 a replica.
        shuffle: Whether each epoch has a new order, a full shuffle; otherwise that of the source.
        seed: Integer that decides all shuffles and the random draws of `augment`.
        remainder: What becomes of a last batch that is smaller: `"keep"` it, or `"drop"` it.
        augment: A Keras layer, or a function of a batch of images, or a list of them, applied in
            the pipeline. What a layer draws depends on seed, epoch and example, not on the
            replica or thread. A function with an argument `seeds` gets two integers for each
            example, for TensorFlow's `stateless_*` functions. In evaluation, layers, and functions
            with an argument `training`, are called with `training=False`; other functions with
            `seeds` are left out.
        cache: `"memory"` or a folder: examples are decoded once and kept as they are before
            `augment`. They are still shuffled anew, and augmented anew. A folder knows images by
            path, size and time of change: replaced with both the same, the old one is served.
        balance: `"class_weight"` weighs each example by the inverse of its class's frequency;
            `"oversample"` repeats the examples of smaller classes until all are as large as the
            largest, and every replica's share has all classes in equal parts.
        on_error: `"raise"` an error that names a damaged example, or `"skip"` it: it is left out
            of its batch, and so out of loss, metrics and counts, and listed in `quarantine`.
            `predict` returns a row for each example, NaN for those that are damaged.

    Example:

    ```python
    train, validation = kmg.data.from_directory("photos", image_size=(224, 224)).split(0.2)
    model.fit(train, validation_data=validation, epochs=10)
    ```
    """

    def __init__(
        self, source: Source | Stream, *, _use: Use | None = None, **settings: Any
    ) -> None:
        self._settings = completed(settings)
        require_valid(self._settings, source)
        # Only to name now what is wrong with it, and not in the first epoch.
        augmenting.augmentation(self._settings["augment"], training=True)
        self._plain = source
        self._use = _use or Use(None, True, Quarantine())
        self._source = source
        if isinstance(source, Stream):
            self._source = streaming.prepared(source, self._settings)
        elif self._settings["cache"] is not None:
            self._source = caching.cached(source, self._settings["cache"])

    # What there is.

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the source; None if unknown."""
        return self._source.num_examples

    @property
    def global_batch_size(self) -> int:
        """The number of examples of one optimizer step."""
        size = self._settings["global_batch_size"]
        if size is not None:
            return size
        replicas = self._use.replicas or devices.default_strategy().num_replicas_in_sync
        return (self._settings["replica_batch_size"] or REPLICA_BATCH_SIZE) * replicas

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        if isinstance(self._source, Source):
            return self._plan().steps()
        return streaming.steps(self._source, self.global_batch_size, self._settings)

    @property
    def is_infinite(self) -> bool:
        """Whether an epoch never ends, so that `fit` needs `steps_per_epoch`."""
        return isinstance(self._source, Stream) and self._source.infinite

    def __bool__(self) -> bool:
        """True: there are no batches without examples."""
        # Otherwise Python asks for the length, which may not be known.
        return True

    def __iter__(self) -> Any:
        """Batches are not iterated over: each epoch has its own order."""
        raise type_error(
            "`Batches` cannot be iterated over: each epoch has an order of its own.",
            "Expected one epoch of them.",
            "Write `batches.epoch(0)`.",
            batches=self,
        )

    def __getitem__(self, index: Any) -> Any:
        """Batches are not numbered: each epoch has its own order."""
        return iter(self)

    @property
    def workers(self) -> int:
        """Keras asks for them where a model that is not distributed is to read batches: an error.

        It is to make this error that Keras takes batches for a `PyDataset`.
        """
        raise type_error(
            "`Batches` came to a model that is not distributed.",
            "Expected a model that `keras_multigpu.distribute` has returned.",
            "Write `model = keras_multigpu.distribute(model)` before `compile`; plain Keras reads "
            "`batches.epoch(k)`, a `tf.data.Dataset`.",
            batches=self,
        )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        steps = self.steps_per_epoch
        if steps is None:
            raise type_error(
                "These batches have no length.",
                "Expected a source whose number of examples is known.",
                "Count them while reading, or use `steps_per_epoch`, which is None here.",
                source=self._source.name,
            )
        return steps

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, in the order of their numbers; None if there are none."""
        return self._source.class_names

    @property
    def class_counts(self) -> dict[str, int] | None:
        """How many examples each class has; None where examples have no single class."""
        labels = self._labels()
        return None if labels is None else counts_of(labels, self.class_names)

    @property
    def class_weight(self) -> dict[int, float] | None:
        """Weights that make all classes count the same, for `fit(class_weight=...)`.

        Each is `examples / (classes * examples of the class)`, so that the mean weight of an
        example is one; classes without examples have weight zero and are not counted.
        """
        counts = self.class_counts
        return None if counts is None else class_weights(list(counts.values()))

    @property
    def file_paths(self) -> list[str] | None:
        """The file of each example, in the source's order; None where they are not files."""
        source = self._source
        if not isinstance(source, Source) or not source.has_files:
            return None
        return [source.example_name(index) for index in range(source.num_examples)]

    @property
    def quarantine(self) -> list[Damage]:
        """The damaged examples met so far, each as `(name, cause)`."""
        return self._use.quarantine.entries

    @property
    def may_lose_examples(self) -> bool:
        """Whether batches may come out smaller, or empty, because damaged examples are left out."""
        return self._settings["on_error"] == "skip" and not self.marks_missing

    @property
    def marks_missing(self) -> bool:
        """Whether weights of zero mark the rows of damaged examples, and mean nothing else."""
        return self._use.marks_missing

    def failure_in(self, error: Exception) -> Exception | None:
        """The error that ended reading, of which TensorFlow's `error` has only the text."""
        return self._use.quarantine.failure_in(error)

    def example_at(self, epoch: int, position: int) -> str | None:
        """What stands at a position of an epoch: its file, if it has one; None if unknown."""
        if not isinstance(self._source, Source):
            return None
        examples, _ = self._plan().order.examples(epoch, np.array([position]))
        return self._source.example_name(int(examples[0]))

    def __repr__(self) -> str:
        """What these batches are, in one line."""
        count = "an unknown number of" if self.num_examples is None else f"{self.num_examples:,}"
        parts = [f"{count} examples from {self._source.name}"]
        if self.class_names:
            parts.append(f"{len(self.class_names)} classes")
        settings = self._settings
        if settings["global_batch_size"] is None and self._use.replicas is None:
            # Not to start TensorFlow's devices only to count them.
            parts.append(f"{settings['replica_batch_size'] or REPLICA_BATCH_SIZE} a replica")
        else:
            steps = self.steps_per_epoch
            parts.append(f"{'?' if steps is None else f'{steps:,}'} x {self.global_batch_size}")
        return printable(f"Batches({', '.join(parts + changes_of(settings))})")

    def identity(self) -> dict[str, Any]:
        """What decides which examples come in which order, as plain values, for a checkpoint."""
        settings = {n: v for n, v in self._settings.items() if n not in CHANGEABLE}
        if isinstance(self._source, Stream):
            # What is read once has one order, and is then shuffled fully.
            settings["cache"] = self._settings["cache"] is not None
        source = self._plain.identity()
        return {"source": source, "training": self._use.training, **identity_of(settings)}

    # Datasets of them.

    def epoch(
        self, number: int, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """One epoch's batches as a plain `tf.data.Dataset`, which stock Keras can use, too.

        Args:
            number: The epoch, counted from zero.
            start: How many examples of the epoch to leave out at its beginning.
            shard: `(i, n)`: part i of n of each batch. The parts are contiguous and joined make the
                batch; a part can be empty.
        """
        return self._dataset(Place(number, start), endless=False, part=part_of(shard))

    def epochs(
        self, number: int = 0, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """The batches of an epoch and of all that follow it, without an end.

        Args:
            number: The epoch to begin with.
            start: As for `epoch`, of that epoch.
            shard: As for `epoch`.
        """
        return self._dataset(Place(number, start), endless=True, part=part_of(shard))

    def position_after(self, position: tuple[int, int], batches: int) -> tuple[int, int]:
        """Where reading stands, as `(epoch, examples)`, some batches after a position."""
        return self._plan().place(Place(*position), batches)

    def cut_epochs(self, number: int, start: int, endless: bool) -> tf.data.Dataset:
        """As `epoch` or `epochs`, of `for_replicas(n, here)`: their rows, with two numbers.

        These are the size of the whole batch, and how many of its rows come before.
        """
        here, plan = self._use.here, self._plan()
        assert here is not None and self._use.replicas is not None
        # `MixUp` and `CutMix` mix neighbours, so these come to one process together; a `Sequence`
        # may hold such a layer.
        steps = augmenting.each_of(self._settings["augment"])
        in_pairs = any(hasattr(one, "augment_batch") for one in steps)
        part = Part(here.start, here.stop, self._use.replicas, never_none=True, in_pairs=in_pairs)
        cuts = tf.data.Dataset.from_tensor_slices(plan.cuts(start, part))
        if endless:
            # The first epoch may begin in its middle; those behind it are all cut alike.
            further = tf.data.Dataset.from_tensor_slices(plan.cuts(0, part))
            cuts = cuts.concatenate(further.repeat())
        return tf.data.Dataset.zip(self._dataset(Place(number, start), endless, part), cuts)

    def _dataset(self, first: Place, endless: bool, part: Part) -> tf.data.Dataset:
        settings = self._settings
        augment = augmenting.augmentation(settings["augment"], self._use.training)
        if isinstance(self._source, Stream):
            require_place(first.epoch, first.start, self._source.num_examples)
            return streaming.dataset(
                self._source,
                self.global_batch_size,
                settings,
                first=first,
                endless=endless,
                share=(part.first, part.shares),
                augment=augment,
                quarantine=self._use.quarantine,
                marks_missing=self.marks_missing,
            )
        plan = self._plan()
        require_place(first.epoch, first.start, plan.order.length)
        require_batches(plan)
        self._source.prepare()
        x, y, weight = self._source.spec
        by_class = self._use.training and settings["balance"] == "class_weight"
        # Class weights travel as sample weights, also where the source has none.
        if self.marks_missing or (by_class and weight is None):
            weight = tf.TensorSpec((), tf.float32)
        skip = settings["on_error"] == "skip"
        loader = Loader(
            self._source,
            plan,
            first=first,
            part=part,
            weights=np.array([*(self.class_weight or {}).values()]) if by_class else None,
            skip=skip,
            quarantine=self._use.quarantine,
            marks_missing=self.marks_missing,
        )
        return batches_of(
            loader,
            (x, y, weight),
            steps=None if endless else plan.steps(first.start),
            size=None if self.may_lose_examples else plan.static_size(part, first.start),
            augment=augment,
        )

    def _plan(self) -> Plan:
        assert self._source.num_examples is not None
        # In evaluation an example that comes twice would count twice in the metrics.
        oversample = self._use.training and self._settings["balance"] == "oversample"
        order = Order(
            self._source.num_examples,
            seed=self._settings["seed"],
            shuffle=self._settings["shuffle"],
            classes=self._labels() if oversample else None,
        )
        return Plan(order, self.global_batch_size, self._settings["remainder"])

    def _labels(self) -> np.ndarray | None:
        return self._source.labels if isinstance(self._source, Source) else None

    # Others like them.

    def with_(self, **changes: Any) -> Self:
        """A copy with some settings changed; one batch size replaces the other.

        Args:
            **changes: Arguments of `Batches`.
        """
        settings = dict(self._settings)
        if {"global_batch_size", "replica_batch_size"} & changes.keys():
            settings.update(global_batch_size=None, replica_batch_size=None)
        return self._like(self._plain, {**settings, **changes})

    def for_replicas(self, replicas: int, here: range | None = None) -> Self:
        """A copy as `DistributedModel` reads it: `replica_batch_size` counts for its replicas.

        Args:
            replicas: How many there are in all processes.
            here: The indices of those of this process, where there are several.
        """
        require_positive_integer("replicas", replicas)
        return self._like(self._plain, self._settings, replicas=replicas, here=here)

    @property
    def can_be_cut(self) -> bool:
        """Whether a process can read the rows of its replicas alone."""
        # Not those of a stream, which is read from its beginning; nor where damaged examples are
        # left out, as nobody knows then how many rows the others have. And texts cannot be sent,
        # where a metric asks for those of all.
        source, skips = self._source, self._settings["on_error"] == "skip"
        if skips or not isinstance(source, Source):
            return False
        return all(leaf.dtype != tf.string for leaf in present(source.spec))

    def evaluation(self) -> Self:
        """A copy for evaluation: every example once, in the source's order, with its own weight.

        Nothing is drawn at random: layers of `augment` are called with `training=False`, and
        instead of a random part of an image its middle is taken.
        """
        return self._in_order()

    def prediction(self) -> Self:
        """As `evaluation()`, but with a row for each example, so that predictions can be assigned.

        With `on_error="skip"` damaged examples stay, as zeros, and instead of sample weights come
        ones, and zeros for the damaged.
        """
        return self._in_order(marks_missing=self._settings["on_error"] == "skip")

    def _in_order(self, **use: Any) -> Self:
        settings = {**self._settings, "shuffle": False, "remainder": "keep"}
        return self._like(self._plain.still(), settings, training=False, **use)

    def take(self, num_examples: int) -> Self:
        """A copy of some examples: a random choice by the seed, or without `shuffle` the first.

        Args:
            num_examples: How many; all of them if there are not so many.
        """
        return self._like(subsets.taken(self._plain, num_examples, self._settings), self._settings)

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Two disjoint parts, such as for training and validation.

        Each class is split in the same proportion. The parts depend on the seed alone: they
        are the same whatever the batch size.

        Args:
            fraction: The share of the second part, between 0 and 1.
        """
        first, second = subsets.split(self._plain, fraction, self._settings)
        return self._like(first, self._settings), self._like(second, self._settings)

    def preview(self, path: str | Path | None = None, count: int = 8) -> Any:
        """Draw a few examples with their labels, before and after augmentation.

        Args:
            path: The file to write, which ends in `.png`; None for none.
            count: How many examples to draw.

        Returns:
            A figure of matplotlib, which a notebook shows.
        """
        augment = augmenting.augmentation(self._settings["augment"], self._use.training)
        return preview.draw(self, path, count, augment)

    def _like(self, source: Source | Stream, settings: Any, **changes: Any) -> Self:
        return type(self)(source, _use=self._use._replace(**changes), **settings)


def part_of(shard: Any) -> Part:
    require_shard(shard)
    number, shards = map(int, shard)
    return Part(number, number + 1, shards)


def with_settings(function: Maker) -> Maker:
    """Let `help` and notebooks show by name which settings a function, or `Batches`, takes."""
    # They come as `**batching`, so that a name of Keras's, such as `batch_size`, gets an error that
    # teaches.
    types, kind = get_type_hints(Batching), inspect.Parameter.KEYWORD_ONLY
    settings = [
        inspect.Parameter(name, kind, default=value, annotation=types[name])
        for name, value in DEFAULTS.items()
    ]
    signature = inspect.signature(function)
    own = [
        one
        for one in signature.parameters.values()
        if one.kind is not one.VAR_KEYWORD and not one.name.startswith("_")
    ]
    function.__signature__ = signature.replace(parameters=own + settings)  # type: ignore[attr-defined]
    if function.__doc__ and Batches.__doc__:  # Not with `python -OO`.
        explained = Batches.__doc__[Batches.__doc__.index("        global_batch_size: ") :]
        explained = explained[: explained.index("\n\n")]
        function.__doc__ = function.__doc__.replace(PASSED_ON, explained)
    return function


with_settings(Batches)
