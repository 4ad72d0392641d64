"""An existing `tf.data.Dataset` as `Batches`."""

from typing import Unpack

import tensorflow as tf

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, with_settings
from keras_multigpu.data.streams.dataset_stream import DatasetStream


@with_settings
def from_dataset(
    dataset: tf.data.Dataset,
    *,
    batched: bool | None = None,
    **batching: Unpack[Batching],
) -> Batches:
    """A `tf.data.Dataset` as `Batches`.

    A batched dataset is unbatched and batched again, by default to the same size. Examples can only
    be read in order, so they are shuffled within a buffer of 1,024, or fully with `cache="memory"`;
    `shuffle=False` keeps the dataset's own order. An infinite dataset needs `steps_per_epoch` in
    `fit`. For imbalanced classes, pass `class_weight` to `fit`.

    Args:
        dataset: Its elements are `x`, `(x, y)` or `(x, y, sample_weight)`, each a tensor or a
            structure of tensors.
        batched: Whether its elements are batches. None infers it, or raises an error that asks for
            this argument.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    dataset = keras.utils.image_dataset_from_directory("photos")
    train = kmg.data.from_dataset(dataset, replica_batch_size=64)
    ```
    """
    stream = DatasetStream(dataset, batched)
    sizes = batching.get("global_batch_size"), batching.get("replica_batch_size")
    if sizes == (None, None):
        batching["global_batch_size"] = stream.batch_size
    return Batches(stream, **batching)
