"""How a `tf.data.Dataset` was made: TensorFlow documents only its element spec and cardinality."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

from keras_multigpu.keras_internals.replacing import replaced

_exchanging = threading.RLock()

BATCHES = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset"}
"""Steps whose elements are batches."""

SINGLE = {
    "_RangeDataset",
    "_TensorSliceDataset",
    "_UnbatchDataset",
    "FixedLengthRecordDatasetV2",
    "TFRecordDatasetV2",
    "TextLineDatasetV2",
}
"""Steps whose elements are examples."""

ONE_TO_ONE = {
    "_AssertCardinalityDataset",
    "CacheDataset",
    "_MapDataset",
    "_OptionsDataset",
    "_ParallelMapDataset",
    "_PrefetchDataset",
    "_ShuffleDataset",
}
"""Steps that change neither the number of elements nor whether they are batches."""

PASSING = ONE_TO_ONE | {
    "_ConcatenateDataset",
    "_FilterDataset",
    "_IgnoreErrorsDataset",
    "_RepeatDataset",
    "_ShardDataset",
    "_SkipDataset",
    "_TakeDataset",
    "_ZipDataset",
}
"""Steps that do not change whether elements are batches."""


def gives_batches(dataset: tf.data.Dataset) -> bool | None:
    """Whether the elements of a dataset are batches; None if unknown."""
    kind = type(dataset).__name__
    if kind in BATCHES:
        return True
    if kind in SINGLE:
        return False
    if kind not in PASSING:
        return None
    answers = {gives_batches(part) for part in dataset._inputs()}
    return answers.pop() if len(answers) == 1 else None


def batching_of(dataset: tf.data.Dataset) -> tuple[int | None, int | None]:
    """The batch size and the number of examples of a batched dataset; None if unknown."""
    step, count = dataset, int(dataset.cardinality())
    whole = True
    while type(step).__name__ in PASSING - {"_ConcatenateDataset", "_ZipDataset"}:
        whole = whole and type(step).__name__ in ONE_TO_ONE
        (step,) = step._inputs()
    if type(step).__name__ not in BATCHES - {"_RebatchDataset"}:
        return None, None
    size = constant(step._batch_size)
    (single,) = step._inputs()
    examples = int(single.cardinality())
    # Fewer come out than go in if the last batch was dropped.
    if size is None or not whole or examples < 0 or count != -(-examples // size):
        return size, None
    return size, examples


UNSEEN = {"_OptionsDataset", "_PrefetchDataset"}
"""Steps that change neither the elements nor their order."""


UNSEEDED = ["_ShuffleDataset", [0, 0]]
"""The recipe of a shuffle without a seed, whose order differs between processes."""


def recipe(dataset: tf.data.Dataset) -> list[Any]:
    """How a dataset was made: its element spec, its cardinality, and its steps from the last on."""
    return [str(dataset.element_spec), int(dataset.cardinality()), steps_of(dataset)]


def steps_of(dataset: tf.data.Dataset) -> list[Any]:
    """The kinds of a dataset's steps, with the settings of those that shuffle."""
    kind = type(dataset).__name__
    before = [step for part in dataset._inputs() for step in steps_of(part)]
    shuffles = any(step[0] == "_ShuffleDataset" for step in before)
    if kind in UNSEEN or (kind == "CacheDataset" and not shuffles):
        return before
    if kind == "_ShuffleDataset":
        # Seeds of zero are none.
        seeds = [constant(dataset._seed), constant(dataset._seed2)]
        return [[kind, seeds, constant(dataset._buffer_size)], *before]
    return [[kind], *before]


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions that a dataset's steps call, TensorFlow's among them, from the last step on."""
    before = [function for part in dataset._inputs() for function in functions_of(part)]
    return [*(each._func for each in dataset._functions()), *before]


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has another order each time it is read."""
    kind = type(dataset).__name__
    own = kind == "_ShuffleDataset" and dataset._reshuffle_each_iteration is not False
    # Steps before a cache are read once.
    return kind != "CacheDataset" and (own or any(map(reshuffles, dataset._inputs())))


def caches(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset caches its elements."""
    return type(dataset).__name__ == "CacheDataset" or any(map(caches, dataset._inputs()))


def constant(value: Any) -> int | None:
    """The integer in a tensor; None if only a running graph knows it."""
    number = tf.get_static_value(value)
    return None if number is None else int(number)


def multi_device_iterator(
    dataset: tf.data.Dataset, devices: list[str], host: str, ahead: int
) -> OwnedMultiDeviceIterator:
    """An iterator that deals a dataset's elements to devices in turn, and copies some ahead."""
    # A strategy's own iterator adds a `cond` for each replica if the size of the last batch is
    # unknown. With `tf.data.experimental.copy_to_device` each device would read all the data.
    return OwnedMultiDeviceIterator(dataset, devices, ahead, ahead, host)


@contextlib.contextmanager
def shuffled_by(shuffle: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Replace the shuffling while Keras's adapter for arrays makes its dataset."""
    adapter = data_adapters.ArrayDataAdapter
    if hasattr(adapter, "_tf_shuffle"):  # From Keras 3.16 on.
        exchanged = replaced(adapter, "_tf_shuffle", lambda self, values: shuffle(values))
    else:  # Called without a seed.
        exchanged = replaced(tf.random, "shuffle", shuffle)
    # Models in other threads wait.
    with _exchanging, exchanged:
        yield


data_adapter = data_adapters.get_data_adapter
"""Returns Keras's adapter for arrays, datasets, `PyDataset`s and generators."""


def has_workers(adapter: Any) -> bool:
    """Whether threads or processes read the `PyDataset` of a Keras adapter."""
    # `PyDataset.workers` is not enough: a single worker has a thread only with multiprocessing.
    return getattr(adapter, "enqueuer", None) is not None


def split_validation(arrays: Any, fraction: float) -> Any:
    """Cut the validation split off the end of arrays, as `fit` does."""
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


class_weights_of_labels = data_adapter_utils.class_weight_to_sample_weights
"""Returns the sample weights of an array of labels."""


class_weights_of_batch = make_class_weight_map_fn
"""Returns a function that turns class weights into sample weights, in a graph."""
