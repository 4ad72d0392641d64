"""`BatchSource`, what the feed asks of every kind of data, and the kinds that Keras knows.

Keras's own adapters read arrays, datasets and `PyDataset`s. A batch of a generator is read only
when it is needed: whatever reads ahead loses batches when it stops.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import dataset_internals, graph_internals
from keras_multigpu.keras_internals.dataset_internals import batching_of, shuffled_by
from keras_multigpu.training.feed.cutter import Cutter, WaitingShares
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.shares import (
    Batch,
    Shares,
    batch_size_of,
    is_one_row,
    joined,
    length_of,
    normalized,
)


def knows_epochs(x: Any) -> bool:
    """Whether `x` offers its batches epoch by epoch, as `keras_multigpu.data.Batches` do."""
    # Not by its class: `data` and `training` never import each other.
    return hasattr(type(x), "reading") and hasattr(type(x), "epochs")


class Anchor(NamedTuple):
    """Where in the data an epoch of `fit` begins, when the batch size last changed.

    Attributes:
        epoch: The epoch of `fit`.
        data_epoch: The epoch of the data, which differs with `steps_per_epoch`.
        examples: How many examples of the data's epoch come before.
    """

    epoch: int
    data_epoch: int
    examples: int


class BatchSource:
    """Yields batches, cut into shares.

    Attributes:
        batch_size: The global batch size; None if only the batches know it.
        num_examples: The number of examples of the data; None if unknown.
        num_batches: The number of batches of an epoch; None if unknown.
        spec: The specs of all batches; None if each batch has its own.
        endless: Whether one iterator continues from epoch to epoch.
        is_countable: Whether the length of an iterator is known.
        may_be_empty: Whether batches may have lost all their examples.
        marks_missing: Whether sample weights say only which examples could be read.
        anchor: Where the data stood when the batch size last changed; None if a later step is
            reached only by reading all batches before it.
        reads_own_rows: Whether this process reads only the rows of its own replicas.
    """

    batch_size: int | None = None
    num_examples: int | None = None
    num_batches: int | None = None
    spec: Batch | None = None
    endless = False
    is_countable = False
    may_be_empty = False
    marks_missing = False
    anchor: Anchor | None = None
    reads_own_rows = False

    def start(self, epoch: int, step: int = 0) -> None:
        """Let the next iterator begin at this step of this epoch of `fit`."""

    def iterator(self) -> Iterator[Shares]:
        raise NotImplementedError

    def first_batches(self, batch_size: int | None) -> Iterator[Batch]:
        """Global batches from the beginning of the data; `fit` still reads all of them."""
        raise fixed_size("a generator", None)

    def resize(self, batch_size: int, epoch: int) -> None:
        """Change the batch size from this epoch of `fit` on; call `start` afterwards."""
        raise fixed_size("a generator", None)

    def on_epoch_begin(self) -> None:
        """Prepare for an epoch."""

    def on_epoch_end(self) -> None:
        """Finish an epoch, which may have stopped early."""

    def skip_order(self) -> None:
        """Skip one order of a reshuffled dataset, as Keras does after an epoch of known length."""

    def example_at(self, epoch: int, step: int, row: int) -> str | None:
        """The name of the example in a row of a batch, if known."""
        return None

    def cause(self, error: tf.errors.OpError) -> Exception | None:
        """The reason why reading failed, if `error` comes from that."""
        return None


def fixed_size(data: str, steps: int | None) -> ValueError:
    """The error for data whose batch size cannot change."""
    return value_error(
        "The batch size cannot change, because the data is already batched.",
        "Expected `keras_multigpu.data` batches; or arrays or a `tf.data.Dataset`, without "
        "`steps_per_epoch`.",
        "Make the data with one of the `keras_multigpu.data.from_*` functions.",
        data=data,
        steps_per_epoch=steps,
    )


class DatasetSource(BatchSource):
    """Batches from whatever Keras can turn into a `tf.data.Dataset`.

    Args:
        order_seed: Decides the order in which arrays are shuffled, in each epoch another one; by
            default TensorFlow does.
        **arguments: Those of Keras's `get_data_adapter`.
    """

    def __init__(self, cutter: Cutter, order_seed: int | None = None, **arguments: Any) -> None:
        self._cutter, self._order_seed = cutter, order_seed
        with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
            # A variable, so that one dataset serves all epochs.
            self._order = tf.Variable(0, dtype=tf.int64, trainable=False)
        x = arguments["x"]
        # Found without reading, which would change the order of a shuffled dataset.
        self._read(arguments, *(batching_of(x) if isinstance(x, tf.data.Dataset) else ()))

    def _in_order(self, values: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([tf.constant(self._order_seed, tf.int64), self._order])
        return tf.random.experimental.stateless_shuffle(values, seed)

    def _read(
        self, arguments: dict[str, Any], size: int | None = None, examples: int | None = None
    ) -> None:
        """Read these data; a dataset's batch size and number of examples, as far as known."""
        self._arguments = arguments
        x = arguments["x"]
        self._reshuffles = isinstance(x, tf.data.Dataset) and dataset_internals.reshuffles(x)
        self.adapter = dataset_internals.data_adapter(**arguments)
        is_ours = self._order_seed is not None
        with shuffled_by(self._in_order) if is_ours else contextlib.nullcontext():
            self.dataset = self.adapter.get_tf_dataset()
        endless = self.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self._shares: WaitingShares | None = None
        self.spec = normalized(self.dataset.element_spec)
        self.num_batches = self.adapter.num_batches
        # If all batches have a known size, the dataset has dropped its remainder.
        self._drops = batch_size_of(self.spec) is not None
        if self.num_batches is None and size is not None and examples is not None:
            self.num_batches = examples // size if self._drops else -(-examples // size)
        self.is_countable = endless or self.num_batches is not None
        if isinstance(x, tf.data.Dataset):
            self.batch_size = size or batch_size_of(self.spec)
        else:
            self.batch_size = self.adapter.batch_size
            if not isinstance(x, keras.utils.PyDataset):
                examples = int(keras.tree.flatten(x)[0].shape[0])
        self.num_examples = examples

    def start(self, epoch: int, step: int = 0) -> None:
        # As Keras does before training and evaluation.
        self.adapter.on_epoch_end()

    def on_epoch_begin(self) -> None:
        self.adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.adapter.on_epoch_end()

    def skip_order(self) -> None:
        # Keras makes an iterator that nobody reads, and each iterator has another order.
        if self._reshuffles and self.adapter.num_batches is not None:
            iter(self.dataset)

    def iterator(self) -> Iterator[Shares]:
        self._order.assign_add(1)
        if dataset_internals.has_workers(self.adapter):
            # Workers read ahead themselves. Keras stops them between epochs, when asking for a
            # batch would raise an error.
            return map(self._cutter, map(normalized, self.dataset))
        if self._shares is None:
            self._shares = self._cutter.ahead(self.dataset)
        return iter(self._shares)

    def resize(self, batch_size: int, epoch: int) -> None:
        x, steps = self._arguments["x"], self._arguments["steps_per_epoch"]
        if isinstance(x, keras.utils.PyDataset) or steps is not None:
            raise fixed_size(type(x).__name__, steps)
        if isinstance(x, tf.data.Dataset):
            x = x.rebatch(batch_size, drop_remainder=self._drops)
            self._read({**self._arguments, "x": x}, batch_size, self.num_examples)
        else:
            self._read({**self._arguments, "batch_size": batch_size})

    def first_batches(self, batch_size: int | None) -> Iterator[Batch]:
        # From another source, so that the order of `fit` stays the same.
        apart = DatasetSource(self._cutter, self._order_seed, **self._arguments)
        if batch_size is not None and batch_size != self.batch_size:
            apart.resize(batch_size, 0)
        if isinstance(self._arguments["x"], keras.utils.PyDataset):
            # Keras's dataset reads ahead, and would draw random numbers after the look.
            return map(normalized, apart.adapter.get_numpy_iterator())
        return map(normalized, apart.dataset)


class PythonSource(BatchSource):
    """Batches from a Python iterator, each read when it is needed, and then cut."""

    def __init__(
        self,
        cutter: Cutter,
        make: Callable[[], Iterator[Any]],
        class_weight: dict[int, float] | None,
    ) -> None:
        self._cutter = cutter
        self._make = make
        self._class_weight = class_weight

    def iterator(self) -> Iterator[Shares]:
        # Not read ahead: a run may stop early and would lose batches. While a GPU runs a step,
        # Python already reads the next batch.
        return (self._cutter(self._weighted(normalized(batch))) for batch in self._make())

    def _weighted(self, batch: Batch) -> Batch:
        if self._class_weight is None:
            return batch
        weigh = dataset_internals.class_weights_of_batch(self._class_weight)
        # A GPU would weigh a class that is out of range with zero, and not raise an error.
        with tf.device(HOST):
            return weigh(*(part for part in batch if part is not None))


def whole(batch: Any) -> Any:
    """The global batch of which a strategy has made a part for each replica."""

    def parts_of(leaf: Any) -> list[Any]:
        is_cut = isinstance(leaf, tf.distribute.DistributedValues)
        return list(leaf.values) if is_cut and leaf.values[0].shape.rank else []

    every_part = [part for leaf in keras.tree.flatten(batch) for part in parts_of(leaf)]
    one_example = all(int(length_of(part) or 0) <= 1 for part in every_part)

    def joined_leaf(leaf: Any) -> Any:
        parts = parts_of(leaf)
        # In parts of several examples, a leaf of one row belongs to all of them.
        if not parts or (all(map(is_one_row, parts)) and not one_example):
            return getattr(leaf, "values", [leaf])[0]
        with tf.device(HOST):
            return joined(parts)

    return keras.tree.map_structure(joined_leaf, batch)
