"""Caches decoded examples in memory or in a folder, before augmentation.

The cache belongs to the source that the `from_*` function made. So all copies and parts of some
`Batches` (`with_`, `evaluation`, `split`, `take`) share it, each example is decoded once, and a
part fills in only its own examples.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.checks import error_of, value_error
from keras_multigpu.data.addresses import is_address
from keras_multigpu.data.caching.filling import empty, fill, find_damaged, size_of_one
from keras_multigpu.data.caching.folder_cache import FolderCache
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.data.pipeline.subsets import Subset
from keras_multigpu.host_memory import available_bytes
from keras_multigpu.writing import size_text

# The fraction of the available memory that a cache may take; training needs the rest.
MOST_OF_MEMORY = 0.9


def add_cache(source: Source, where: str | Path) -> Source:
    """The source with a cache, so that each example is decoded once."""
    if isinstance(source, Subset):
        return Subset(add_cache(source.source, where), source.indices)
    is_path = isinstance(where, str | Path) and str(where) and "\0" not in str(where)
    if not is_path or is_address(where):
        raise value_error(
            '`cache` is neither "memory" nor a folder.',
            'Expected "memory" or the path of a folder.',
            'Pass cache="memory", a folder on a local disk, or leave it out.',
            cache=where,
        )
    if source.draws:
        raise value_error(
            f"Each example of {source.name} is drawn again whenever it is read.",
            "Expected examples that never change: a cache would freeze the first draw.",
            "Leave out `cache`, or decode whole images and crop them in `augment`, "
            "such as with `keras.layers.RandomCrop`.",
            cache=where,
        )
    if len(source.stages()) > 1:
        raise value_error(
            f"The examples of {source.name} change their size with the epoch.",
            "Expected one size: a cache holds each example once.",
            "Leave out `cache`, or decode images of one size and resize them in the model.",
            cache=where,
        )
    place = None if where == "memory" else Path(os.path.expanduser(where)).absolute()
    # The source holds its cache. In turn, caches hold no source, so both are freed together.
    caches = vars(source).setdefault("_caches", {})
    if place not in caches:
        made = MemoryCache(source) if place is None else FolderCache(source, place)
        caches.setdefault(place, made)
    return CachedSource(source, caches[place])


class MemoryCache:
    """Decoded examples, in one block of memory for each call of `prepare` that adds some."""

    def __init__(self, source: Source) -> None:
        self._leaves = present(source.spec)
        self._slots = np.full(source.num_examples, -1, np.int64)
        # Joining blocks would take twice the memory for a moment.
        self._blocks: list[list[np.ndarray]] = []
        self._starts: list[int] = []
        self._length = 0
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        with self._lock:
            rows = np.unique(rows[self._slots[rows] < 0])
            if rows.size:
                self._fill(source, rows)

    def read(self, source: Source, out: Sequence[np.ndarray], indices: np.ndarray) -> Damaged:
        """Copy prepared examples; returns the same as `Source.read`."""
        slots = self._slots[indices]
        assert slots.min(initial=0) >= 0, "An example was not prepared."
        blocks = np.searchsorted(self._starts, slots, side="right") - 1
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            places = slots[chosen] - self._starts[block]
            for target, array in zip(out, self._blocks[block], strict=True):
                if chosen.all():
                    # With "clip", `take` writes into `target` without a temporary copy.
                    np.take(array, places, axis=0, out=target, mode="clip")
                else:
                    target[chosen] = array[places]
        return find_damaged(indices, self._damaged)

    def _fill(self, source: Source, rows: np.ndarray) -> None:
        require_memory(len(rows) * size_of_one(self._leaves), source.name)
        arrays, start = empty(self._leaves, len(rows)), self._length
        self._blocks.append(arrays)
        self._starts.append(start)
        self._length += len(rows)
        # A source that draws is not cached, so seeds do not matter.
        seeds = np.zeros((len(rows), 2), np.int32)

        def read(low: int, high: int) -> None:
            part = slice(low, high)
            damaged = source.read([array[part] for array in arrays], rows[part], seeds[part])
            self._damaged.update((int(rows[low + row]), cause) for row, cause in damaged)
            self._slots[rows[part]] = np.arange(start + low, start + high)

        fill(source, rows, "in memory", read)


class CachedSource(Source):
    """A source with a cache."""

    def __init__(self, source: Source, cache: MemoryCache | FolderCache) -> None:
        self._source = source
        self._cache = cache
        self.describe_as(source)

    @property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        return self._source.labels

    def prepare(self, rows: np.ndarray | None = None) -> None:
        self._cache.prepare(self._source, np.arange(self.num_examples) if rows is None else rows)

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        return self._cache.read(self._source, out, indices)

    def example_name(self, index: int) -> str:
        return self._source.example_name(index)

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return self._source.identity(exact)


def require_memory(needed: int, name: str) -> None:
    available = available_bytes()
    if needed > MOST_OF_MEMORY * available:
        raise error_of(
            MemoryError,
            f"The decoded examples of {name} take {size_text(needed)}, and "
            f"{size_text(available)} of memory are available.",
            f"Expected at most {MOST_OF_MEMORY:.0%} of it: training needs the rest.",
            "Pass a folder as `cache`, choose smaller images, or leave `cache` out.",
            cache="memory",
        )
