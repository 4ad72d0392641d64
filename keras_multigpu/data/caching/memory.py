"""Decoded examples in memory."""

import contextlib
import os
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_multigpu.checks import problem
from keras_multigpu.data.caching import filling as cache_filling
from keras_multigpu.data.road.source import Source
from keras_multigpu.data.road.source import present

MOST_OF_MEMORY = 0.9
"""The share of the available memory that a cache may take: the training needs some, too."""

CGROUPS = (
    # Version 2, then version 1: where the groups are, their limit, their use, what can be freed.
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


class MemoryCache:
    """Decoded examples in memory, in one block for all that are first asked for together.

    Args:
        source: Where the examples come from; it is not held.
    """

    def __init__(self, source: Source) -> None:
        self._leaves = present(source.spec)
        self._slots = np.full(source.num_examples, -1, np.int64)
        self._blocks: list[list[np.ndarray]] = []
        self._starts: list[int] = []
        self._length = 0
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        """Read those examples that are not here yet.

        Args:
            source: Where the examples come from.
            rows: The examples.
        """
        with self._lock:
            rows = np.unique(rows[self._slots[rows] < 0])
            if rows.size:
                source.prepare()
                self._fill(source, rows)

    def read(
        self, source: Source, out: Sequence[np.ndarray], indices: np.ndarray
    ) -> list[tuple[int, str]]:
        """Copy examples that have been prepared.

        Args:
            source: Where the examples come from.
            out: One array for each leaf.
            indices: The examples.

        Returns:
            `(row, cause)` of each damaged one.
        """
        slots = self._slots[indices]
        blocks = np.searchsorted(self._starts, slots, side="right") - 1
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            places = slots[chosen] - self._starts[block]
            for target, array in zip(out, self._blocks[block], strict=True):
                if chosen.all():
                    # "clip" lets `take` write into `target` at once; the places are all valid.
                    np.take(array, places, axis=0, out=target, mode="clip")
                else:
                    target[chosen] = array[places]
        return damaged_among(indices, self._damaged)

    def _fill(self, source: Source, rows: np.ndarray) -> None:
        size = cache_filling.size_of_one(self._leaves)
        require_memory(len(rows) * size, source.name)
        arrays = [
            np.empty((len(rows), *leaf.shape), leaf.dtype.as_numpy_dtype) for leaf in self._leaves
        ]
        start = self._length
        self._blocks.append(arrays)
        self._starts.append(start)
        self._length += len(rows)
        # The same for every example: a source that draws is not cached.
        seeds = np.zeros((len(rows), 2), np.int32)

        def read(low: int, high: int) -> list[tuple[int, str]]:
            part = slice(low, high)
            return source.read([array[part] for array in arrays], rows[part], seeds[part])

        what = (
            f"Caching {len(rows):,} examples of {source.name} in memory "
            f"({cache_filling.size_text(len(rows) * size)})."
        )
        with contextlib.closing(cache_filling.in_pieces(read, len(rows), size)) as pieces:
            for low, high, damaged in cache_filling.shown(pieces, len(rows), what):
                self._damaged.update((int(rows[low + row]), cause) for row, cause in damaged)
                self._slots[rows[low:high]] = np.arange(start + low, start + high)


def damaged_among(indices: np.ndarray, damaged: dict[int, str]) -> list[tuple[int, str]]:
    """`(row, cause)` of each of the examples that is damaged.

    Args:
        indices: The examples.
        damaged: The cause of each damaged one.
    """
    if not damaged:
        return []
    return [(row, damaged[index]) for row, index in enumerate(indices.tolist()) if index in damaged]


def require_memory(needed: int, name: str) -> None:
    """Raise a `MemoryError` unless so many bytes can be had.

    Args:
        needed: Bytes.
        name: The source's.
    """
    available = available_memory()
    if needed > MOST_OF_MEMORY * available:
        text = cache_filling.size_text
        raise MemoryError(
            problem(
                f"The decoded examples of {name} take {text(needed)}, and {text(available)} of "
                "memory are available.",
                f"Expected at most {MOST_OF_MEMORY:.0%} of it, as the training needs some, too.",
                "Pass a folder as `cache`, choose smaller images, or leave `cache` out.",
                cache="memory",
            )
        )


def available_memory(root: Path = Path("/")) -> int:
    """How many bytes this process can still use: of the machine, and of its control group.

    Args:
        root: Where the files of the system are.
    """
    return min(machine_memory(root), *cgroup_memory(root), 2**63)


def machine_memory(root: Path) -> int:
    """The available bytes of the machine."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**63


def cgroup_memory(root: Path) -> Iterator[int]:
    """The bytes left in each control group of this process that has a limit."""
    for controller, limit, used, freeable in CGROUPS:
        top = root / "sys/fs/cgroup" / controller
        own = top / cgroup_path(root, controller)
        for group in [own, *own.parents]:
            if not group.is_relative_to(top):
                break
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                lines = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):
                # No such group, or a limit of "max".
                continue
            parts = dict(line.split(maxsplit=1) for line in lines)
            yield max(most - now + sum(int(parts.get(name, 0)) for name in freeable), 0)


def cgroup_path(root: Path, controller: str) -> str:
    """The control group of this process, as a path below the groups of a controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""
