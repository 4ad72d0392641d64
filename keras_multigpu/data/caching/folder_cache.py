"""A cache in a folder, shared by all processes of a host.

The file `where/KEY.cache`, whose key is a hash of the source and its settings, starts with a
checksum for each example (zero while the example is missing). The examples follow, each the bytes
of its leaves. One process fills the file while others wait for its lock, `where/KEY.lock`, which
the operating system releases when the process ends. A checksum is written after its example, so
after a kill the next process continues where the last one stopped.

Every read verifies the checksum. A damaged file is deleted: its examples are read from the source,
and filled in anew before the next epoch.
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

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import os_error, value_error
from keras_multigpu.data.caching.filling import empty, fill, find_damaged, size_of_one
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.writing import CAREFULLY, one_at_a_time, size_text

# Part of the key. Raise it when the form of the file changes.
VERSION = 4

SUM = np.dtype(np.uint32)

# The file descriptor before the file is opened.
CLOSED = -1

logger = logging.getLogger("keras_multigpu")


class FolderCache:
    """Decoded examples in a folder, which may also hold the caches of other sources."""

    def __init__(self, source: Source, where: Path) -> None:
        self._leaves = present(source.spec)
        if any(leaf.dtype == tf.string for leaf in self._leaves):
            raise value_error(
                f"The examples of {source.name} hold text.",
                "Expected numbers: in a cache folder, all examples have the same size.",
                'Pass cache="memory", or encode the texts as numbers.',
                cache=str(where),
            )
        self._where = self._path = where
        self._header = b""
        self._size = size_of_one(self._leaves)
        self._sums = np.zeros(source.num_examples, SUM)
        self._damaged: dict[int, str] = {}
        # Not memory-mapped: if another process truncated the file, SIGBUS would kill readers.
        self._file = CLOSED
        self._is_read_only = False
        self._lock = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        with self._lock:
            if self._file == CLOSED:
                name = key(source)
                self._path = self._where / f"{name}.cache"
                self._header = f"keras_multigpu cache {name}\n".encode()
                self._open()
            missing = self._missing(rows)
            if not missing.size or self._is_read_only:
                return
            if self._path.exists() and not os.access(self._path, os.W_OK):
                self._is_read_only = True
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
        """Copy examples, missing ones from the source; returns the same as `Source.read`."""
        damaged = find_damaged(indices, self._damaged)
        known, lost = {row for row, _ in damaged}, []
        contents = [bytes_of(leaf) for leaf in out]
        for row, index in enumerate(indices.tolist()):
            parts = [content[row].data for content in contents]
            if row not in known and not self._copy(index, parts):
                lost.append(row)
        if lost:
            if self._sums[indices[lost]].any():
                self._discard()
            source.prepare()
            leaves = empty(self._leaves, len(lost))
            met = source.read(leaves, indices[lost], np.zeros((len(lost), 2), np.int32))
            for target, leaf in zip(out, leaves, strict=True):
                target[lost] = leaf
            damaged += [(lost[row], cause) for row, cause in met]
        return damaged

    def _copy(self, index: int, parts: list[memoryview]) -> bool:
        """Copy an example into `parts`; whether it is there and intact."""
        if not self._sums[index]:
            return False
        size = os.preadv(self._file, parts, self._place(index))
        return size == self._size and sum_of(parts) == int(self._sums[index])

    def _missing(self, rows: np.ndarray) -> np.ndarray:
        """The missing examples among these, sorted; other processes may still add some."""
        rows = np.unique(rows)
        rows = rows[self._sums[rows] == 0]
        return rows[~np.isin(rows, list(self._damaged))]

    def _place(self, index: int) -> int:
        return len(self._header) + self._sums.nbytes + index * self._size

    def _open(self) -> str | None:
        """Open the file; if it is damaged, return why, or an empty text if it does not exist."""
        flags = os.O_RDWR if os.access(self._path, os.W_OK) else os.O_RDONLY
        try:
            file = os.open(self._path, flags | CAREFULLY)
        except OSError as error:
            return "" if isinstance(error, FileNotFoundError) else str(error)
        # Not closed earlier, since threads may still read from it after `_open` opens another one.
        weakref.finalize(self, os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._place(len(self._sums)):
            return f"it is not a file of {self._place(len(self._sums)):,} bytes"
        if os.pread(file, len(self._header), 0) != self._header:
            return "it begins with other bytes"
        os.preadv(file, [self._sums.data], len(self._header))
        self._file = file
        return None

    def _create(self, wrong: str) -> None:
        """Make the file, and replace a damaged one."""
        if wrong:
            logger.warning("The cache %s is damaged and is rebuilt: %s", self._path, wrong)
            self._path.unlink()
        with self._path.open("xb") as file:
            file.write(self._header)
            # The zeros take no room on the disk until they are overwritten.
            file.truncate(self._place(len(self._sums)))
        self._open()

    def _discard(self) -> None:
        """Delete the file, which is damaged; threads may still read from it."""
        logger.warning("The cache %s is damaged and is rebuilt.", self._path)
        self._sums[:] = 0
        with suppress(OSError):  # The folder may be read-only.
            self._path.unlink()

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
        # `pwrite` takes an offset, so threads need no lock. The checksum is written last, since it
        # marks the example as present.
        total = SUM.type(sum_of(parts))
        with writing_to(self._path):
            write(self._file, b"".join(parts), self._place(index))
            write(self._file, total.tobytes(), len(self._header) + index * SUM.itemsize)
        self._sums[index] = total


def key(source: Source) -> str:
    # The exact identity, so that the cache never returns the content of a file since replaced.
    leaves = [f"{leaf.dtype.name}{leaf.shape}" for leaf in present(source.spec)]
    text = json.dumps([VERSION, source.num_examples, leaves, source.identity(exact=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bytes_of(leaf: np.ndarray) -> np.ndarray:
    """A view of an array as `uint8[examples, bytes]`."""
    return leaf.reshape(len(leaf), leaf[:1].size).view(np.uint8)


def sum_of(parts: list[memoryview]) -> int:
    """The checksum of an example; never zero, which marks a missing one."""
    total = 0
    for part in parts:
        # Takes half the time of SHA-256 (74 us instead of 154 for an image of 224x224). It guards
        # against failing disks, not against attackers, who could rewrite the checksum as well.
        total = zlib.crc32(part, total)
    return total or 1


def write(file: int, data: bytes, place: int) -> None:
    while data:
        # A full disk may write a part, and raise an error on the next call.
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Make an `OSError` say that it is about the cache."""
    try:
        yield
    except OSError as error:
        raise os_error(
            error,
            f"The cache cannot be written: {error.strerror or error}.",
            "Expected a folder that can be written, with room for the decoded examples.",
            "Choose another folder, or free some space and run again; what was written is kept.",
            path=str(path),
        ) from error


def require_disk(where: Path, needed: int, name: str) -> None:
    """Raise an `OSError` if the disk is too full; the folder need not exist yet."""
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
