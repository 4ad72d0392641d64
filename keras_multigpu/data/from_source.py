"""Any object with a length and numbered items as `Batches`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.settings import Batching, with_settings
from keras_multigpu.data.sources.item_source import THREADS, ItemSource
from keras_multigpu.data.sources.items import AnyItems


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

    For example a Hugging Face `Dataset`, a map-style PyTorch `Dataset`, a grain `MapDataset` or
    data source, `array_record`, a local MDS, or a list, such as `table.to_dict("records")`.
    Threads read the items, with `__getitems__` if the source has it. An item that is None or raises
    an error counts as damaged. All examples need one structure and shape.

    Args:
        source: Its items must not change from call to call; random draws belong in `augment`.
        example: A function that makes `x`, `(x, y)` or `(x, y, sample_weight)` from an item. Each
            is a number, a text, an array, an image or a tensor, or a dict or tuple of those. Lists
            become arrays. It may use NumPy or TensorFlow. None if items are already examples.
        labels: The class of each item. None: if `split`, `balance` or `class_counts` need classes,
            all items are read once.
        class_names: The names of the classes in the order of their numbers.
        threads: How many items are read at a time. With 1, a single thread reads everything, as
            sources that are not thread-safe need, such as one that seeks in a shared file.
        version: A text that changes when the items do. Checkpoints compare it, and a cache folder
            requires it.
        **batching: `global_batch_size`, `replica_batch_size`, `shuffle`, `seed`, `remainder`,
            `augment`, `cache`, `balance` and `on_error`, as in `Batches`.

    Example:

    ```python
    photos = datasets.load_dataset("imagefolder", data_dir="photos", split="train")
    train = kmg.data.from_source(photos, lambda item: (item["image"], item["label"]))
    ```
    """
    made = ItemSource(
        AnyItems(source, version),
        example,
        labels=labels,
        class_names=class_names,
        threads=threads,
        skips=batching.get("on_error") == "skip",
    )
    if batching.get("cache") not in (None, "memory"):
        made.identity(exact=True)  # Raises now if `version` is missing.
    return Batches(made, **batching)
