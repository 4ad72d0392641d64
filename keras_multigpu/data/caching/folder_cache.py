"""Decoded examples in a folder, shared by all processes of a host.

`where/KEY.cache`, whose key is a hash of the source and its settings, has a checksum for each
example (zero where there is none yet), and then the examples, each the bytes of its leaves. One
process fills it and holds `where/KEY.lock`, while others wait; the operating system frees the lock
when the process ends, however it ends. A checksum is written after its example, so the next process
continues where another was killed.

A process compares the checksum of an example when it first reads it, and again after the file has
changed. A damaged cache is not mended. It is removed, what it lacks is read from the source, and
the next run rebuilds it.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import os_error, value_error
from keras_multigpu.data.caching.filling import damaged_among, empty, fill, size_of_one
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.writing import CAREFULLY, one_at_a_time, size_text

# Part of the key; to be raised when the file changes its form.
VERSION = 4

SUM = np.dtype(np.uint32)
"""The type of a checksum."""

CLOSED = -1
"""The file descriptor of a cache that is not open."""

logger = logging.getLogger("keras_multigpu")


class FolderCache:
    """Decoded examples in a folder, where other sources may have theirs; the source is not held."""

    def __init__(self, source: Source, where: Path) -> None:
        self._leaves = present(source.spec)
        if any(leaf.dtype == tf.string for leaf in self._leaves):
            raise value_error(
                f"The examples of {source.name} hold texts.",
                "Expected numbers: a cache folder has the same room for each example.",
                'Pass cache="memory", or encode the texts as numbers.',
                cache=str(where),
            )
        self._where = self._path = where
        self._header = b""
        self._size = size_of_one(self._leaves)
        self._sums = np.zeros(source.num_examples, SUM)
        # The file as it was when these examples fitted their checksums.
        self._state: Any = None
        self._checked = np.zeros(len(self._sums), bool)
        self._damaged: dict[int, str] = {}
        # Not a map: where another process truncates a mapped file, SIGBUS kills the readers.
        self._file = CLOSED
        self._is_removed = False
        # Nothing is added any more: it is removed, or cannot be written.
        self._is_complete = False
        self._lock = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        with self._lock:
            if self._file == CLOSED:
                name = key(source)
                self._path = self._where / f"{name}.cache"
                self._header = f"keras_multigpu cache {name}\n".encode()
                self._open()
            missing = self._missing(rows)
            if not missing.size or self._is_complete:
                return
            if self._file != CLOSED and not os.access(self._path, os.W_OK):
                self._is_complete = True
                logger.warning(
                    "The cache %s cannot be written: %s of its examples are decoded each time.",
                    self._path,
                    f"{missing.size:,}",
                )
                return
            require_disk(self._where, len(missing) * self._size, source.name)
            with ExitStack() as held:
                with writing_to(self._path):
                    lock = self._path.with_suffix(".lock")
                    held.enter_context(one_at_a_time(lock, f"is filling the cache {self._path}"))
                    # Others may have filled or rebuilt it while this process waited.
                    if (wrong := self._open()) is not None:
                        self._create(wrong)
                if (missing := self._missing(rows)).size:
                    self._fill(source, missing)

    def read(self, source: Source, out: Sequence[np.ndarray], indices: np.ndarray) -> Damaged:
        """Copy examples, those that are not there from the source; `(row, cause)` of damaged."""
        damaged = damaged_among(indices, self._damaged)
        known, lost = {row for row, _ in damaged}, []
        status = os.fstat(self._file)
        state = status.st_size, status.st_mtime_ns
        if state != self._state:
            # A new array: what a thread has read before the change, it marks in the old one.
            self._state, self._checked = state, np.zeros(len(self._sums), bool)
        contents, checked = [bytes_of(leaf) for leaf in out], self._checked
        for row, index in enumerate(indices.tolist()):
            parts = [content[row].data for content in contents]
            if row not in known and not self._copied(index, parts, checked):
                lost.append(row)
        if lost:
            if self._sums[indices[lost]].any():
                self._remove()
            source.prepare()
            leaves = empty(self._leaves, len(lost))
            met = source.read(leaves, indices[lost], np.zeros((len(lost), 2), np.int32))
            for target, leaf in zip(out, leaves, strict=True):
                target[lost] = leaf
            damaged += [(lost[row], cause) for row, cause in met]
        return damaged

    def _copied(self, index: int, parts: list[memoryview], checked: np.ndarray) -> bool:
        """Whether an example is there, and what was written; it is in `parts` then."""
        if not self._sums[index]:
            return False
        if os.preadv(self._file, parts, self._place(index)) < self._size:
            return False
        checked[index] = checked[index] or sum_of(parts) == self._sums[index]
        return bool(checked[index])

    def _missing(self, rows: np.ndarray) -> np.ndarray:
        """Those of the examples that are not here, in order; other processes may add some."""
        rows = np.unique(rows)
        rows = rows[self._sums[rows] == 0]
        return rows[~np.isin(rows, list(self._damaged))]

    def _place(self, index: int) -> int:
        return len(self._header) + self._sums.nbytes + index * self._size

    def _open(self) -> str | None:
        """Open the file, if it is there and whole; otherwise what is wrong, or an empty text."""
        flags = os.O_RDWR if os.access(self._path, os.W_OK) else os.O_RDONLY
        try:
            file = os.open(self._path, flags | CAREFULLY)
        except OSError as error:
            return "" if isinstance(error, FileNotFoundError) else str(error)
        # Threads may read from it when it is not the cache's any more.
        weakref.finalize(self, os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._place(len(self._sums)):
            return f"it is not a file of {self._place(len(self._sums)):,} bytes"
        # The header is compared and not read: whatever it holds does no harm.
        if os.pread(file, len(self._header), 0) != self._header:
            return "it begins with other bytes"
        os.preadv(file, [self._sums.data], len(self._header))
        self._file = file
        return None

    def _create(self, wrong: str) -> None:
        """Make the file; what is there is damaged, and goes."""
        if wrong:
            logger.warning("The cache %s is damaged and is rebuilt: %s", self._path, wrong)
            self._path.unlink()
        with self._path.open("xb") as file:
            file.write(self._header)
            # Zeros take no room on the disk until they are overwritten.
            file.truncate(self._place(len(self._sums)))
        self._open()

    def _remove(self) -> None:
        """Remove a cache whose bytes have changed, unless another process has rebuilt it."""
        with self._lock:
            if self._is_removed:
                return
            self._is_removed = self._is_complete = True
            # It may be gone, or in a folder where nothing can be removed.
            with suppress(OSError):
                if self._path.stat().st_ino == os.fstat(self._file).st_ino:
                    self._path.unlink()
        logger.warning(
            "The cache %s contains other bytes than were written. It is removed: this run decodes "
            "the examples that changed, and the next run rebuilds it.",
            self._path,
        )

    def _fill(self, source: Source, rows: np.ndarray) -> None:
        """Read the missing examples; this process holds the lock."""

        def read(low: int, high: int) -> None:
            leaves, some = empty(self._leaves, high - low), rows[low:high]
            causes = source.read(leaves, some, np.zeros((high - low, 2), np.int32))
            damaged = {int(some[row]): cause for row, cause in causes}
            self._damaged.update(damaged)
            contents = [bytes_of(leaf) for leaf in leaves]
            for row, index in enumerate(some.tolist()):
                if index not in damaged:
                    self._write(index, [content[row].data for content in contents])

        fill(source, rows, f"in {self._where}", read)

    def _write(self, index: int, parts: list[memoryview]) -> None:
        # Each call says where it writes, so threads need no lock. The checksum comes last: until
        # then the example is not there.
        total = SUM.type(sum_of(parts))
        with writing_to(self._path):
            write(self._file, b"".join(parts), self._place(index))
            write(self._file, total.tobytes(), len(self._header) + index * SUM.itemsize)
        self._sums[index] = total


def key(source: Source) -> str:
    # Exactly: of a file that was replaced since, or lies elsewhere under its name, the cache must
    # not show what the other one held.
    leaves = [f"{leaf.dtype.name}{leaf.shape}" for leaf in present(source.spec)]
    text = json.dumps([VERSION, source.num_examples, leaves, source.identity(exact=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bytes_of(leaf: np.ndarray) -> np.ndarray:
    """A view of an array as `uint8[examples, bytes]`."""
    return leaf.reshape(len(leaf), leaf[:1].size).view(np.uint8)


def sum_of(parts: list[memoryview]) -> int:
    """A checksum of an example; never zero, which means that it is missing."""
    total = 0
    for part in parts:
        # Half the time of SHA-256 (74 against 154 us for an image of 224x224), and enough: it is
        # against disks that fail, not against attackers, who could write the checksum as well.
        total = zlib.crc32(part, total)
    return total or 1


def write(file: int, data: bytes, place: int) -> None:
    while data:
        # A full disk may take a part of it, and fails the next time.
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Let an error say that it is about the cache."""
    try:
        yield
    except OSError as error:
        raise os_error(
            error,
            f"The cache cannot be written: {error.strerror or error}.",
            "Expected a folder that can be written, with room for the decoded examples.",
            "Choose another folder, or free some space and run again: what was written is kept.",
            path=str(path),
        ) from error


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
