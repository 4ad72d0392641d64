"""TFRecord and tar shards as `Batches`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from keras_multigpu.checks import require_positive_integer
from keras_multigpu.data.addresses import AT_ONCE, is_address
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.items.item_source import THREADS, ItemSource
from keras_multigpu.data.items.shards import Shards, listed_shards
from keras_multigpu.data.pipeline.settings import Batching, require_known, with_settings


@with_settings
def from_records(
    paths: Any,
    example: Callable[[Any], Any] | None = None,
    *,
    labels: Any = None,
    class_names: Sequence[str] | None = None,
    threads: int | None = None,
    index_dir: str | Path | None = None,
    **batching: Unpack[Batching],
) -> Batches:
    """TFRecord files or tar archives (WebDataset) as `Batches`, read in any order.

    An index of each shard is made once, in a pass over the heads of its records, and stored beside
    it as `.NAME.index.npz`. It is made again when the shard's size, time or first bytes change.

    Args:
        paths: A folder, a file, a pattern such as `"train-*.tar"`, or a list of these; also at an
            address such as `gs://bucket/shards`. Of a folder those files count that end in `.tar`
            or have `.tfrecord` in their names.
        example: A function that makes `x`, `(x, y)` or `(x, y, sample_weight)` of a record, as for
            `from_source`. Of a TFRecord file it gets `bytes`, which
            `tf.io.parse_single_example` takes, too; a `tf.function` gets a tensor. Of a tar archive
            it gets a dict of `bytes`: files whose names are equal up to the first dot are a sample,
            what follows the dot is the entry's name, and `__key__` the sample's.
        labels: The class of each record, as for `from_source`.
        class_names: The names of the classes in the order of their numbers.
        threads: How many records are read at a time. None for 16, or 64 at an address.
        index_dir: A folder for the indices, if that of the shards cannot be written.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    def example(sample):
        return tf.io.decode_jpeg(sample["jpg"]), int(sample["cls"])

    train = kmg.data.from_records("shards/train-*.tar", example)
    ```
    """
    require_known(batching)
    found = listed_shards(paths)
    if threads is None:
        threads = AT_ONCE if any(map(is_address, found)) else THREADS
    require_positive_integer("threads", threads)
    folder = None if index_dir is None else os.path.expanduser(index_dir)
    made = ItemSource(
        Shards(found, folder, threads),
        example,
        labels=labels,
        class_names=class_names,
        threads=threads,
        skips=batching.get("on_error") == "skip",
    )
    return Batches(made, **batching)
