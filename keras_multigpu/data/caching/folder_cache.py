"""Decoded examples in a folder, shared by all processes of a host.

`where/key/` holds one `.npy` file for each leaf of the examples, in the order of the source, and
`sums.npy`: a checksum of each example that is there, zero for the others. A process compares the
checksum of an example when it first reads it, and again after the files have changed. The key is a
hash of the source and its settings.

One process fills a cache and holds the lock `where/key.lock`, while others wait; the operating
system frees it when the process ends, however it ends. The checksum is written after the example,
so the next process continues where another was killed.

A damaged cache is not mended. It is removed, what it lacks is read from the source, and the next
run makes it anew.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import os_error, value_error
from keras_multigpu.data.caching.filling import damaged_among, empty, fill, size_of_one
from keras_multigpu.data.caching.rows import Rows, unwritable, write_empty
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.writing import one_at_a_time, size_text

# Part of the key; to be raised when the files change their form.
VERSION = 3

SUM = np.dtype(np.uint32)
"""The type of a checksum."""

logger = logging.getLogger("keras_multigpu")


class FolderCache:
    """Decoded examples in a folder, where other sources may have theirs; the source is not held."""

    def __init__(self, source: Source, where: Path) -> None:
        self._leaves = present(source.spec)
        if any(leaf.dtype == tf.string for leaf in self._leaves):
            raise value_error(
                f"The examples of {source.name} hold texts.",
                "Expected numbers: a cache folder has the same room for each example.",
                'Pass cache="memory", or turn the texts into numbers before.',
                cache=str(where),
            )
        self._count = int(source.num_examples)
        self._where = where
        self._folder = Path()
        self._files: list[Rows] = []
        self._sums = np.zeros(self._count, SUM)
        self._checked: tuple[list[tuple[int, int, int]], np.ndarray] = ([], self._sums)
        self._damaged: dict[int, str] = {}
        # Nothing is added any more: it is removed, or cannot be written.
        self._is_complete = False
        self._removed = False
        self._lock = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        with self._lock:
            if not self._files:
                self._folder = self._where / key(source)
                if self._folder.exists():
                    self._open()
            missing = self._missing(rows)
            if not missing.size or self._is_complete:
                return
            if self._files and not self._is_writable:
                self._is_complete = True
                logger.warning(
                    "The cache %s cannot be written: %s of its examples are decoded each time.",
                    self._folder,
                    f"{missing.size:,}",
                )
                return
            require_disk(self._where, len(missing) * size_of_one(self._leaves), source.name)
            with locked(self._folder):
                # Others may have filled it, or made it anew, while this process waited.
                wrong = self._open() if self._folder.exists() else ""
                if wrong is not None:
                    self._create(wrong)
                if (missing := self._missing(rows)).size:
                    self._fill(source, missing)

    def read(self, source: Source, out: Sequence[np.ndarray], indices: np.ndarray) -> Damaged:
        """Copy examples, those that are not there from the source; `(row, cause)` of damaged."""
        intact = self._copied(out, indices)
        if (~intact & (self._sums[indices] != 0)).any():
            self._remove()
        damaged = damaged_among(indices, self._damaged)
        intact[[row for row, _ in damaged]] = True
        rows = np.flatnonzero(~intact)
        if rows.size:
            source.prepare()
            leaves = empty(self._leaves, len(rows))
            met = source.read(leaves, indices[rows], np.zeros((len(rows), 2), np.int32))
            for target, leaf in zip(out, leaves, strict=True):
                target[rows] = leaf
            damaged += [(int(rows[row]), cause) for row, cause in met]
        return damaged

    def _copied(self, out: Sequence[np.ndarray], indices: np.ndarray) -> np.ndarray:
        """Copy examples; which of them are there and what was written."""
        state = [file.state() for file in self._files]
        if state != self._checked[0]:
            # A new array: what a thread has read before the change, it marks in the old one.
            self._checked = state, np.zeros(self._count, bool)
        checked, there = self._checked[1], self._sums[indices] != 0
        try:
            for target, file in zip(out, self._files[:-1], strict=True):
                file.read(target, indices)
        except ValueError:
            return np.zeros(len(indices), bool)
        rows = np.flatnonzero(there & ~checked[indices])
        fits = sums_of([leaf[rows] for leaf in out]) == self._sums[indices[rows]]
        checked[indices[rows[fits]]] = True
        there[rows[~fits]] = False
        return there

    def _missing(self, rows: np.ndarray) -> np.ndarray:
        """Those of the examples that are not here, in order; other processes may add some."""
        rows = np.unique(rows)
        rows = rows[self._sums[rows] == 0]
        return rows[~np.isin(rows, list(self._damaged))]

    @property
    def _is_writable(self) -> bool:
        return os.access(self._folder, os.W_OK)

    def _open(self) -> str | None:
        """Open the files, if they are all there and whole; otherwise what is wrong."""
        flags = os.O_RDWR if self._is_writable else os.O_RDONLY
        try:
            files = [Rows(*one, flags) for one in self._contents()]
            files[-1].read(self._sums, np.arange(self._count))
        except (OSError, ValueError) as error:
            return str(error)
        self._files = files
        return None

    def _create(self, wrong: str) -> None:
        """Make the files, in the place of what may be there, in which something is wrong."""
        if wrong:
            logger.warning("The cache %s is not whole and is made anew: %s", self._folder, wrong)
            shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir()
            for one in self._contents():
                write_empty(*one)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        self._open()

    def _remove(self) -> None:
        """Remove a cache whose bytes have changed, unless another process has made it anew."""
        with self._lock:
            if self._removed:
                return
            self._removed = self._is_complete = True
            sums = self._folder / "sums.npy"
            if sums.exists() and sums.stat().st_ino == self._files[-1].state()[0]:
                shutil.rmtree(self._folder, ignore_errors=True)
        logger.warning(
            "The cache %s holds other bytes than were written. It is removed: this run decodes "
            "the examples that changed, and the next run makes the cache anew.",
            self._folder,
        )

    def _contents(self) -> list[tuple[Path, tuple[int, ...], np.dtype]]:
        """Path, shape and type of each file; the last one is that of the checksums."""
        leaves = [
            (
                self._folder / f"leaf_{number}.npy",
                (self._count, *leaf.shape),
                np.dtype(leaf.dtype.as_numpy_dtype),
            )
            for number, leaf in enumerate(self._leaves)
        ]
        return [*leaves, (self._folder / "sums.npy", (self._count,), SUM)]

    def _fill(self, source: Source, rows: np.ndarray) -> None:
        """Read the missing examples; this process holds the lock."""

        def read(low: int, high: int) -> None:
            leaves, some = empty(self._leaves, high - low), rows[low:high]
            damaged = source.read(leaves, some, np.zeros((high - low, 2), np.int32))
            if damaged:
                self._damaged.update((int(some[row]), cause) for row, cause in damaged)
                intact = np.delete(np.arange(high - low), [row for row, _ in damaged])
                leaves, some = [leaf[intact] for leaf in leaves], some[intact]
            sums = sums_of(leaves)
            # The checksums last: until then the examples are not there.
            for file, values in zip(self._files, [*leaves, sums], strict=True):
                file.write(some, values)
            self._sums[some] = sums

        fill(source, rows, f"in {self._folder}", read)


def key(source: Source) -> str:
    # Exactly: of a file that was replaced since, or lies elsewhere under its name, the cache must
    # not show what the other one held.
    leaves = [f"{leaf.dtype.name}{leaf.shape}" for leaf in present(source.spec)]
    text = json.dumps([VERSION, source.num_examples, leaves, source.identity(exact=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sums_of(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """A checksum of each example; never zero, which means that an example is missing."""
    sums = np.zeros(len(leaves[0]), SUM)
    for row in range(len(sums)):
        total = 0
        for leaf in leaves:
            # Half the time of SHA-256 (74 against 154 us for an image of 224x224), and enough: it
            # is against disks that fail, not against attackers, who could write the checksum as
            # well.
            total = zlib.crc32(leaf[row].tobytes(), total)
        sums[row] = total or 1
    return sums


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; waits while another process fills it."""
    lock = folder.with_suffix(".lock")
    with ExitStack() as held:
        try:
            held.enter_context(one_at_a_time(lock, f"is filling the cache {folder}"))
        except OSError as error:
            raise unwritable(lock, error) from error
        yield


def require_disk(where: Path, needed: int, name: str) -> None:
    """Raise an `OSError` unless there is enough room; the folder need not exist yet."""
    there = next(folder for folder in [where, *where.absolute().parents] if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise os_error(
            OSError(errno.ENOSPC, ""),
            f"The decoded examples of {name} take {size_text(needed)}, and {size_text(free)} are "
            "free on the disk.",
            "Expected room for all of them.",
            "Choose a folder on another disk or smaller images, or leave `cache` out.",
            cache=str(where),
        )
