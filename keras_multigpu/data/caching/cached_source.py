"""Caches decoded examples in memory or in a folder, before augmentation.

The cache belongs to the source that the `from_*` function made. So all copies and parts of some
`Batches` (`with_`, `evaluation`, `split`, `take`) share it, each example is decoded once, and a
part fills in only its own examples.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import is_address
from keras_multigpu.data.caching.folder_cache import FolderCache
from keras_multigpu.data.caching.memory_cache import MemoryCache
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source
from keras_multigpu.data.pipeline.subsets import Subset


def cached(source: Source, where: str | Path) -> Source:
    """The source with a cache, so that each example is decoded once."""
    if isinstance(source, Subset):
        return Subset(cached(source.source, where), source.indices)
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
    place = None if where == "memory" else Path(os.path.expanduser(where)).absolute()
    # The source holds its cache. In turn, caches hold no source, so both are freed together.
    caches = vars(source).setdefault("_caches", {})
    if place not in caches:
        made = MemoryCache(source) if place is None else FolderCache(source, place)
        caches.setdefault(place, made)
    return CachedSource(source, caches[place])


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
