"""TFRecord files, or a packed folder, as `Batches`."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from keras_multigpu.data.addresses import FETCHED_AT_ONCE, is_address
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, with_settings
from keras_multigpu.data.sources.item_source import THREADS, ItemSource
from keras_multigpu.data.sources.items import Items
from keras_multigpu.data.sources.packed_folder import PackedFolder, shards_of
from keras_multigpu.data.sources.shards import Shards, find_shards, require_crc


@with_settings
def from_records(
    paths: Any,
    example: Callable[[Any], Any] | None = None,
    *,
    labels: Any = None,
    class_names: Sequence[str] | None = None,
    **batching: Unpack[Batching],
) -> Batches:
    """TFRecord files, or a packed folder, as `Batches`, read in any order.

    TFRecord files need google-crc32c. An index of each shard is made once, from the headers of its
    records, and kept in `~/.cache/keras_multigpu`. It is made again when the shard's size, time or
    first bytes change.

    Args:
        paths: A folder, a file, a pattern such as `"train-*.tfrecord"`, or a list of these, or
            addresses such as `gs://bucket/shards`. In a folder, files count whose names contain
            `.tfrecord`. Or the folder that `keras-multigpu pack` packed as `photos.array_record`:
            each item is a dict of `image` (the bytes of the file), `path` and `label`.
        example: A function that makes `x`, `(x, y)` or `(x, y, sample_weight)` from a record, as
            for `from_source`. It gets `bytes`, for example for `tf.io.parse_single_example`; a
            `tf.function` gets a tensor.
        labels: The class of each record, as for `from_source`.
        class_names: The names of the classes in the order of their numbers.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    def example(record):
        found = tf.io.parse_single_example(record, FEATURES)
        return tf.io.decode_jpeg(found["image"]), found["label"]

    train = kmg.data.from_records("shards/train-*.tfrecord", example)
    ```
    """
    items: Items
    threads = THREADS
    path = os.path.expanduser(paths) if isinstance(paths, str | os.PathLike) else ""
    if packed := shards_of(path):
        items = folder = PackedFolder(path, packed)
        known = folder.labels()
        # Images beside the class folders have no class.
        if labels is None and known.min() >= 0:
            labels, class_names = known, class_names or folder.classes
    else:
        require_crc()
        found = find_shards(paths)
        threads = FETCHED_AT_ONCE if any(map(is_address, found)) else THREADS
        items = Shards(found, threads)
    made = ItemSource(
        items,
        example,
        labels=labels,
        class_names=class_names,
        threads=threads,
        skips=batching.get("on_error") == "skip",
    )
    return Batches(made, **batching)
