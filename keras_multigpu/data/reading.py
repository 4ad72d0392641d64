"""`Reading`: how `Batches` are read for training, evaluation or prediction."""

import dataclasses
import functools
import re
from typing import Any, Self

import numpy as np
import tensorflow as tf

from keras_multigpu import replicas as devices
from keras_multigpu.checks import printable, require_positive_integer, value_error
from keras_multigpu.data.caching import cached_source as caching
from keras_multigpu.data.pipeline import augmenting
from keras_multigpu.data.pipeline.damage import Quarantine
from keras_multigpu.data.pipeline.loader import Loader, make_dataset
from keras_multigpu.data.pipeline.order import Order, Part, Place, Plan
from keras_multigpu.data.pipeline.settings import (
    CHANGEABLE,
    REPLICA_BATCH_SIZE,
    Batching,
    fill_defaults,
    list_changes,
    require_batches,
    require_place,
    require_valid,
)
from keras_multigpu.data.pipeline.source import Source, Stream, present
from keras_multigpu.data.streams import stream as streaming
from keras_multigpu.identities import identity_of

ALL = Part()


@dataclasses.dataclass(frozen=True, repr=False)
class Reading:
    """The data that `fit`, `evaluate` and `predict` read. `Batches` are its public interface.

    Attributes:
        original: The source without a cache.
        settings: All arguments of `Batches`.
        quarantine: The damaged examples that any reading of the same `Batches` has found.
        training: Whether this is for training.
        marks_missing: Whether damaged examples stay as rows of zeros, marked by weights of zero.
        replicas: The number of replicas that `replica_batch_size` is for; None for the machine's.
        here: The replicas of this process, if others are in other processes.
    """

    original: Source | Stream
    settings: Batching
    quarantine: Quarantine = dataclasses.field(default_factory=Quarantine)
    training: bool = True
    marks_missing: bool = False
    replicas: int | None = None
    here: range | None = None

    def __post_init__(self) -> None:
        require_valid(self.settings, self.original)
        # Raises their errors now rather than in the first epoch.
        _ = self.augment, self.source

    @functools.cached_property
    def source(self) -> Source | Stream:
        """The source, with its cache if there is one."""
        if isinstance(self.original, Stream):
            streaming.require_supported(self.original, self.settings)
            return self.original
        where = self.settings["cache"]
        return self.original if where is None else caching.add_cache(self.original, where)

    @property
    def augment(self) -> augmenting.Augment | None:
        return augmenting.augmentation(self.settings["augment"], self.training)

    # Properties.

    @property
    def num_examples(self) -> int | None:
        return self.source.num_examples

    @property
    def global_batch_size(self) -> int:
        size = self.settings["global_batch_size"]
        if size is not None:
            return size
        replicas = self.replicas or devices.default_strategy().num_replicas_in_sync
        return (self.settings["replica_batch_size"] or REPLICA_BATCH_SIZE) * replicas

    @property
    def steps_per_epoch(self) -> int | None:
        if isinstance(self.source, Source):
            return self._plan().steps()
        return streaming.steps(self.source, self.global_batch_size, self.settings)

    @property
    def is_infinite(self) -> bool:
        return isinstance(self.source, Stream) and self.source.infinite

    @property
    def may_lose_examples(self) -> bool:
        """Whether batches may be smaller, or empty, because damaged examples are left out."""
        return self.settings["on_error"] == "skip" and not self.marks_missing

    @property
    def can_be_cut(self) -> bool:
        """Whether a process can read only the rows of its own replicas."""
        # A stream is read from its beginning. If damaged examples are left out, the number of rows
        # in other processes is unknown. Texts cannot be sent to a metric that gathers all rows.
        if self.settings["on_error"] == "skip" or not isinstance(self.source, Source):
            return False
        return all(leaf.dtype != tf.string for leaf in present(self.source.spec))

    @property
    def labels(self) -> np.ndarray | None:
        return self.source.labels if isinstance(self.source, Source) else None

    @property
    def class_counts(self) -> dict[str, int] | None:
        labels, names = self.labels, self.source.class_names
        if labels is None:
            return None
        names = names or [str(label) for label in range(int(labels.max()) + 1)]
        if len({*names}) < max(len(names), int(labels.max()) + 1):
            raise value_error(
                "`class_names` does not have a name of its own for each class.",
                f"Expected at least {int(labels.max()) + 1} different names.",
                class_names=names,
            )
        return dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True))

    @property
    def class_weight(self) -> dict[int, float] | None:
        if self.class_counts is None:
            return None
        counts = self.class_counts.values()
        total, classes = sum(counts), sum(count > 0 for count in counts)
        weights = (total / (classes * count) if count else 0.0 for count in counts)
        return dict(enumerate(weights))

    def failure_in(self, error: Exception) -> Exception | None:
        """The Python error behind TensorFlow's `error`, if it is known."""
        shapes = re.search(r"First element had shape .* and element \d+ had shape .*\]", str(error))
        if shapes is not None:
            return value_error(
                f"The examples of {self.source.name} differ in shape: {shapes[0]}.",
                "Expected one shape for all examples of a batch.",
                "Resize, crop or pad them in `dataset.map`, or make them ragged tensors.",
                batch_size=self.global_batch_size,
            )
        return self.quarantine.failure_in(error)

    def example_at(self, epoch: int, position: int) -> str | None:
        """The name of the example at a position of an epoch; None if unknown."""
        if not isinstance(self.source, Source):
            return None
        examples, _ = self._plan().order.examples(epoch, np.array([position]))
        return self.source.example_name(int(examples[0]))

    def position_after(self, position: tuple[int, int], batches: int) -> tuple[int, int]:
        """The position `(epoch, examples)` some batches after another one."""
        return self._plan().place(Place(*position), batches)

    def identity(self) -> dict[str, Any]:
        """The facts that decide the examples and their order, as plain values for a checkpoint."""
        settings = {n: v for n, v in self.settings.items() if n not in CHANGEABLE}
        source = self.original.identity()
        return {"source": source, "training": self.training, **identity_of(settings)}

    def __repr__(self) -> str:
        count = "an unknown number of" if self.num_examples is None else f"{self.num_examples:,}"
        parts = [f"{count} examples from {self.source.name}"]
        if self.source.class_names:
            parts.append(f"{len(self.source.class_names)} classes")
        if self.settings["global_batch_size"] is None and self.replicas is None:
            # Counting replicas would initialize TensorFlow's devices.
            parts.append(f"{self.settings['replica_batch_size'] or REPLICA_BATCH_SIZE} a replica")
        else:
            steps = self.steps_per_epoch
            parts.append(f"{'?' if steps is None else f'{steps:,}'} x {self.global_batch_size}")
        return printable(f"Batches({', '.join(parts + list_changes(self.settings))})")

    # Datasets.

    def epoch(self, number: int, start: int = 0, part: Part = ALL) -> tf.data.Dataset:
        """The batches of an epoch, without its first `start` examples."""
        return self.dataset_from(Place(number, start), number + 1, part)

    def epochs(
        self, number: int = 0, start: int = 0, part: Part = ALL, stop: int | None = None
    ) -> tf.data.Dataset:
        """As `epoch`, followed by all later epochs, or by those before `stop`."""
        return self.dataset_from(Place(number, start), stop, part)

    def cut_epochs(self, number: int, start: int, stop: int | None) -> tf.data.Dataset:
        """As `epochs`, for the rows of the replicas `here` alone.

        With each part come the size of the whole batch and the number of rows before the part.
        """
        here, plan = self.here, self._plan()
        assert here is not None and self.replicas is not None
        # `Mix` mixes adjacent rows, so one process must read both; a `Sequence` may
        # contain such a layer.
        steps = augmenting.flatten_layers(self.settings["augment"])
        in_pairs = any(hasattr(one, "augment_batch") for one in steps)
        part = Part(here.start, here.stop, self.replicas, in_pairs=in_pairs)
        cuts = tf.data.Dataset.from_tensor_slices(plan.cuts(start, part))
        # Only the first epoch may begin in its middle.
        further = tf.data.Dataset.from_tensor_slices(plan.cuts(0, part))
        cuts = cuts.concatenate(further.repeat())
        return tf.data.Dataset.zip(self.dataset_from(Place(number, start), stop, part), cuts)

    def dataset_from(self, first: Place, stop: int | None, part: Part) -> tf.data.Dataset:
        settings = self.settings
        if isinstance(self.source, Stream):
            require_place(first.epoch, first.start, self.source.num_examples)
            epochs = streaming.Epochs(
                self.source,
                self.global_batch_size,
                settings,
                first=first,
                shard=(part.first, part.shards),
                augment=self.augment,
                quarantine=self.quarantine,
                marks_missing=self.marks_missing,
            )
            return epochs.dataset(stop)
        plan = self._plan()
        require_place(first.epoch, first.start, plan.order.length)
        require_batches(plan)
        stages = self.source.stages()
        if len(stages) > 1:
            return self._in_stages(stages, first, stop, part)
        self.source.prepare()
        x, y, weight = self.source.spec
        by_class = self.training and settings["balance"] == "class_weight"
        # Class weights become sample weights, even if the source has none.
        if self.marks_missing or (by_class and weight is None):
            weight = tf.TensorSpec((), tf.float32)
        loader = Loader(
            self.source,
            plan,
            first=first,
            part=part,
            weights=np.array([*(self.class_weight or {}).values()]) if by_class else None,
            skip=settings["on_error"] == "skip",
            quarantine=self.quarantine,
            marks_missing=self.marks_missing,
        )
        return make_dataset(
            loader,
            (x, y, weight),
            steps=plan.steps_until(first, stop),
            size=None if self.may_lose_examples else plan.static_size(part, first.start),
            augment=self.augment,
        )

    def _in_stages(
        self, stages: dict[int, Source], first: Place, stop: int | None, part: Part
    ) -> tf.data.Dataset:
        """The epochs of each stage one after another; each has static shapes for `augment`."""
        datasets = []
        for low, high in zip(stages, [*[*stages][1:], stop], strict=True):
            begin = max(first, Place(low, 0))
            ends = [end for end in (high, stop) if end is not None]
            end = min(ends, default=None)
            if end is None or begin.epoch < end:
                stage = dataclasses.replace(self, original=stages[low])
                datasets.append(stage.dataset_from(begin, end, part))
        return functools.reduce(tf.data.Dataset.concatenate, datasets)

    def _plan(self) -> Plan:
        assert self.source.num_examples is not None
        # In evaluation, a repeated example would count twice in the metrics.
        oversample = self.training and self.settings["balance"] == "oversample"
        order = Order(
            self.source.num_examples,
            seed=self.settings["seed"],
            shuffle=self.settings["shuffle"],
            classes=self.labels if oversample else None,
        )
        return Plan(order, self.global_batch_size, self.settings["remainder"])

    # Copies.

    def with_(self, **changes: Any) -> Self:
        """As `Batches.with_`."""
        sizes = dict.fromkeys(("global_batch_size", "replica_batch_size"))
        settings = {**self.settings, **(sizes if sizes.keys() & changes.keys() else {}), **changes}
        return dataclasses.replace(self, settings=fill_defaults(settings))

    def for_replicas(self, replicas: int, here: range | None = None) -> Self:
        """The same for a `DistributedModel`.

        Args:
            replicas: The number of replicas in all processes.
            here: The indices of this process's replicas, if there are several processes.
        """
        require_positive_integer("replicas", replicas)
        return dataclasses.replace(self, replicas=replicas, here=here)

    def evaluation(self, marks_missing: bool = False) -> Self:
        """As `Batches.evaluation`; with `marks_missing` for predictions, which need every row."""
        settings: Any = {**self.settings, "shuffle": False, "remainder": "keep"}
        return dataclasses.replace(
            self,
            original=self.original.without_draws(),
            settings=settings,
            training=False,
            marks_missing=marks_missing and settings["on_error"] == "skip",
        )
