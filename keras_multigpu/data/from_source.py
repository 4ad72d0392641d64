"""Anything with a length whose items have numbers as `Batches`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.items.item_source import THREADS, ItemSource
from keras_multigpu.data.items.items import items_of
from keras_multigpu.data.pipeline.settings import Batching, require_known, with_settings


@with_settings
def from_source(
    source: Any,
    example: Callable[[Any], Any] | None = None,
    *,
    labels: Any = None,
    class_names: Sequence[str] | None = None,
    threads: int = THREADS,
    version: str | None = None,
    **batching: Unpack[Batching],
) -> Batches:
    """Any object with `len(source)` and `source[i]` as `Batches`.

    A Hugging Face `Dataset`, a map-style `Dataset` of PyTorch, a grain `MapDataset` or data source,
    `array_record`, a local MDS, a pandas table (a row is a dict of its columns), a list. Threads
    read the items, by `__getitems__` where the source has it. An item that raises an error, or is
    None, counts as damaged. All examples need one structure and shape.

    Args:
        source: An item's number decides what it is; random draws belong to `augment`.
        example: A function that makes `x`, `(x, y)` or `(x, y, sample_weight)` of an item, each of
            them a number, a text, an array, an image or a tensor, or a dict or tuple of those.
            Lists become arrays. It may use NumPy or TensorFlow. None: an item is that already.
        labels: The class of each item. None: if `split`, `balance` or `class_counts` need classes,
            all items are read once.
        class_names: The names of the classes in the order of their numbers.
        threads: How many items are read at a time. 1 for a source that is not thread-safe, such as
            one that seeks in a file that it shares: a single thread then reads everything.
        version: A text that changes when the items do: what a checkpoint compares, and a cache
            folder needs. A pandas table is known by its values.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    photos = datasets.load_dataset("imagefolder", data_dir="photos", split="train")
    train = kmg.data.from_source(photos, lambda item: (item["image"], item["label"]))
    ```
    """
    require_known(batching)
    made = ItemSource(
        items_of(source, version),
        example,
        labels=labels,
        class_names=class_names,
        threads=threads,
        skips=batching.get("on_error") == "skip",
    )
    if batching.get("cache") not in (None, "memory"):
        made.identity(exact=True)  # Where a version is missing, it is asked for now.
    return Batches(made, **batching)
