"""Reads batches from datasets, arrays and Python iterators, as Keras does."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.keras_internals.dataset_internals import batching_of
from keras_multigpu.training.shares import batch_size_of

Batch = tuple[Any, Any, Any]

Cut = tuple[int | None, int | None]
"""A dataset's batch size and number of examples, as far as they are known."""

ABSENT = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
"""What stands in a dataset for a missing array."""


class DatasetSource:
    """Batches from whatever Keras can turn into a `tf.data.Dataset`.

    Args:
        **arguments: The arguments of Keras's `get_data_adapter`.
    """

    endless = False
    may_be_empty = False

    def __init__(self, **arguments: Any) -> None:
        self._read(arguments)

    def _read(self, arguments: dict[str, Any], cut: Cut | None = None) -> None:
        self._arguments = arguments
        x = arguments["x"]
        if cut is None and isinstance(x, tf.data.Dataset):
            # Not found by reading: a shuffled dataset gives its next reader another order.
            cut = batching_of(x)
        self._cut = cut
        self._adapter = keras_internals.data_adapter(**arguments)
        self._dataset = self._adapter.get_tf_dataset()
        endless = self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self.spec: Any = self._dataset.element_spec
        self.num_batches = self._adapter.num_batches
        if self.num_batches is None and cut is not None:
            self.num_batches = steps_of(
                *cut, dropped=batch_size_of(normalized(self.spec)) is not None
            )
        self.is_countable = endless or self.num_batches is not None
        self.on_epoch_begin: Callable[[], None] = self._adapter.on_epoch_begin
        self.on_epoch_end: Callable[[], None] = self._adapter.on_epoch_end

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None if unknown."""
        if self._cut is not None:
            return self._cut[0] or batch_size_of(normalized(self.spec))
        return self._adapter.batch_size

    @property
    def num_examples(self) -> int | None:
        """The number of examples; None if unknown."""
        x = self._arguments["x"]
        if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
            return None if self._cut is None else self._cut[1]
        return int(keras.tree.flatten(x)[0].shape[0])

    def iterator(self) -> Any:
        """A new iterator."""
        return iter(self._dataset)

    def resize(self, batch_size: int, epoch: int) -> None:
        """Take batches of another size from the next iterator on."""
        x, steps = self._arguments["x"], self._arguments["steps_per_epoch"]
        if isinstance(x, keras.utils.PyDataset) or steps is not None:
            raise_fixed_size(x, steps)
        if isinstance(x, tf.data.Dataset):
            whole = batch_size_of(normalized(self.spec)) is not None
            examples = (self._cut or (None, None))[1]
            x = x.rebatch(batch_size, drop_remainder=whole)
            self._read({**self._arguments, "x": x}, (batch_size, examples))
        else:
            self._read({**self._arguments, "batch_size": batch_size})

    def first_batches(self, batch_size: int | None) -> Iterator[Any]:
        """Batches from the beginning on, of any size, apart from what `fit` reads."""
        apart = DatasetSource(**self._arguments)
        if batch_size is not None and batch_size != self.batch_size:
            apart.resize(batch_size, 0)
        return apart.iterator()


class PythonSource:
    """Batches from a Python iterator, each taken when it is needed.

    Args:
        make: Returns the iterator.
        class_weight: Weights of classes, which become sample weights.
    """

    num_batches = None
    is_countable = False
    spec = None
    batch_size = None
    num_examples = None
    endless = False
    may_be_empty = False

    def __init__(
        self, make: Callable[[], Iterator[Any]], class_weight: dict[int, float] | None
    ) -> None:
        self._make = make
        self._class_weight = class_weight

    def iterator(self) -> Iterator[Batch]:
        """An iterator over what is left."""
        return (self._weighted(normalized(batch)) for batch in self._make())

    def _weighted(self, batch: Batch) -> Batch:
        return batch if self._class_weight is None else weighted(batch, self._class_weight)

    def resize(self, batch_size: int, epoch: int) -> None:
        """Raise, because whoever makes these batches decides their size."""
        raise_fixed_size("a generator", None)

    def first_batches(self, batch_size: int | None) -> Iterator[Any]:
        """Raise, because a batch of a generator that is read is gone."""
        raise_fixed_size("a generator", None)

    def on_epoch_begin(self) -> None:
        """Nothing to do."""

    def on_epoch_end(self) -> None:
        """Nothing to do."""


def steps_of(size: int | None, examples: int | None, dropped: bool) -> int | None:
    """The number of batches in an epoch, if it follows from how the data were cut."""
    if size is None or examples is None:
        return None
    return examples // size if dropped else -(-examples // size)


def raise_fixed_size(x: Any, steps: int | None) -> NoReturn:
    """Raise because the batches of this source cannot be cut anew."""
    raise ValueError(
        problem(
            "Batches of another size are wanted from data that come in batches of their own.",
            "Expected `keras_multigpu.data` batches; or arrays or a `tf.data.Dataset`, without "
            "`steps_per_epoch`.",
            "Make the data with one of the `keras_multigpu.data.from_*` functions.",
            data=x if isinstance(x, str) else type(x).__name__,
            steps_per_epoch=steps,
        )
    )


def normalized(batch: Any) -> Batch:
    """A batch as `(x, y, sample_weight)` of tensors or specs; missing parts are None."""
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    return keras.tree.map_structure(as_tensor, tuple(keras.tree.lists_to_tuples(parts)))


def as_tensor(leaf: Any) -> Any:
    """A leaf of a batch as a tensor, in Keras's float type where it is a float array."""
    if leaf is None or isinstance(leaf, ABSENT):
        return None
    if tf.is_tensor(leaf) or isinstance(leaf, tf.TypeSpec):
        return leaf
    if hasattr(leaf, "tocoo"):
        return sparse_tensor(leaf.tocoo())
    leaf = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    if np.issubdtype(leaf.dtype, np.floating) and leaf.dtype.itemsize > 2:
        return tf.convert_to_tensor(leaf, keras.config.floatx())
    return tf.convert_to_tensor(leaf)


def sparse_tensor(matrix: Any) -> tf.SparseTensor:
    """A SciPy matrix in coordinates as a tensor."""
    indices = np.stack([matrix.row, matrix.col], axis=1).astype("int64")
    return tf.sparse.reorder(tf.SparseTensor(indices, as_tensor(matrix.data), matrix.shape))


def weighted(batch: Batch, class_weight: dict[int, float]) -> Batch:
    """A batch whose classes' weights have become sample weights."""
    return keras_internals.class_weights_of_batch(class_weight)(
        *(part for part in batch if part is not None)
    )
