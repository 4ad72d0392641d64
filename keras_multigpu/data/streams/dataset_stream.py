"""The single examples of a `tf.data.Dataset`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import require_choice, type_error, value_error
from keras_multigpu.data.pipeline.arrays import weight_type
from keras_multigpu.data.pipeline.source import Stream, three_parts
from keras_multigpu.data.streams.stream import (
    buffer_shuffled,
    in_python,
    map_leaves,
    require_sliceable,
)
from keras_multigpu.identities import identify_dataset
from keras_multigpu.keras_internals import dataset_internals


class DatasetStream(Stream):
    """The single examples of a `tf.data.Dataset`; `batch_size` is its own if it is known."""

    name = "a dataset"

    def __init__(self, dataset: tf.data.Dataset, batched: bool | None) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise type_error(
                "`dataset` is not a `tf.data.Dataset`.",
                "Expected one that is not distributed yet.",
                "Use `from_arrays` for arrays and `from_flow` for generators.",
                dataset=dataset,
            )
        require_choice("batched", batched, (None, True, False))
        if isinstance(dataset.element_spec, tuple):
            three_parts(dataset.element_spec, "An element of `dataset`")
        require_sliceable(dataset.element_spec, self)
        self._dataset = dataset
        self._batched = is_batched(dataset) if batched is None else batched
        self._reshuffles = dataset_internals.reshuffles(dataset)
        self._caches = dataset_internals.caches(dataset)
        self._readings = 0
        self.class_names = getattr(dataset, "class_names", None)
        self.infinite = bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
        self.batch_size, self.num_examples = count_examples(dataset, self._batched)

    def identity(self) -> dict[str, Any]:
        """As `Stream.identity`: how the dataset was made, not its content."""
        made = identify_dataset(self._dataset)
        return {**super().identity(), **made}

    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        dataset = self._in_order_of(epoch) if self._reshuffles else self._dataset
        examples = dataset.map(tf.autograph.experimental.do_not_convert(as_example))
        if self._batched:
            examples = examples.unbatch()
        return buffer_shuffled(examples, epoch, seed) if shuffle else examples

    def _in_order_of(self, epoch: tf.Tensor) -> tf.data.Dataset:
        """The dataset in its own order for this epoch."""
        # Its own shuffles count how often it is read, so reading is started once for each earlier
        # epoch that this process has not read. A dataset with a cache must be read completely, or
        # it would be cached in another order.

        def missing(epoch: np.ndarray) -> np.ndarray:
            count = max(int(epoch) - self._readings, 0)
            self._readings += count + 1
            return np.array(count)

        count = in_python(missing, [epoch], tf.int64, [])
        before = self._dataset if self._caches else self._dataset.take(1)
        begun = tf.data.Dataset.range(count).flat_map(lambda _: before)
        return begun.filter(lambda *_: False).concatenate(self._dataset)


def as_example(*element: Any) -> tuple[Any, Any, Any]:
    x, y, weight = (*element, None, None)[:3]

    def as_float(leaf: Any) -> Any:  # Other weights may multiply it.
        is_whole = leaf.dtype.is_integer or leaf.dtype.is_bool
        return tf.cast(leaf, weight_type()) if is_whole else leaf

    return x, y, map_leaves(as_float, weight)


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Whether the elements of a dataset are batches; a `ValueError` if that is unknown."""
    made = dataset_internals.gives_batches(dataset)
    shapes = [leaf.shape for leaf in keras.tree.flatten(dataset.element_spec) if has_shape(leaf)]
    sizes = {shape[0] for shape in shapes if shape.rank} - {None}
    # All parts of a batch have the same number of rows.
    impossible = any(shape.rank == 0 for shape in shapes) or len(sizes) > 1
    if impossible and not made:
        return False
    if made is None or impossible:
        raise value_error(
            "The elements of `dataset` may be batches or single examples.",
            "Expected a dataset made by `batch`, or one with a part that is a scalar.",
            "Pass batched=True if each element is a batch, batched=False if it is an example.",
            element_spec=dataset.element_spec,
        )
    return made


def has_shape(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec)


def count_examples(dataset: tf.data.Dataset, batched: bool) -> tuple[int | None, int | None]:
    """The dataset's own batch size and its number of examples; None if unknown."""
    if not batched:
        return None, known_cardinality(dataset)
    size, examples = dataset_internals.batching_of(dataset)
    for leaf in keras.tree.flatten(dataset.element_spec):
        if has_shape(leaf) and leaf.shape.rank and leaf.shape[0] is not None:
            return leaf.shape[0], known_cardinality(dataset.unbatch())
    return size, examples


def known_cardinality(dataset: tf.data.Dataset) -> int | None:
    """The number of elements; None if unknown or infinite."""
    count = int(dataset.cardinality())
    return count if count >= 0 else None
