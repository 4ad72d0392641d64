"""The files of a cache folder: how they are made, written and locked."""

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from keras_multigpu.checks import os_error
from keras_multigpu.data.caching.rows import Rows, opened, runs
from keras_multigpu.writing import CAREFULLY, one_at_a_time, size_text, whole

_log = logging.getLogger("keras_multigpu")


class Writer:
    """Writes rows into `.npy` files, from several threads at once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[int] = []

    def __enter__(self) -> Self:
        for path in self._paths:
            try:
                self._files.append(os.open(path, os.O_WRONLY | CAREFULLY))
            except OSError as error:
                self.__exit__()
                raise unwritable(path, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            os.close(file)

    def write(self, number: int, file: Rows, rows: np.ndarray, values: np.ndarray) -> None:
        """Write some rows of a file, which is open for reading, too."""
        for low, high in runs(rows):
            data = memoryview(values[low:high].tobytes())
            offset = file.place(int(rows[low]))
            try:
                # Each call says where it writes, so threads need no lock.
                while data:
                    written = os.pwrite(self._files[number], data, offset)
                    data, offset = data[written:], offset + written
            except OSError as error:
                raise unwritable(self._paths[number], error) from error

    def flush(self) -> None:
        for path, file in zip(self._paths, self._files, strict=True):
            try:
                os.fsync(file)
            except OSError as error:
                raise unwritable(path, error) from error


def sums_of(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """A checksum of each example; never zero, which stands for an example that is not there."""
    sums = np.zeros(len(leaves[0]), np.uint32)
    for row in range(len(sums)):
        total = 0
        for leaf in leaves:
            # Half the time of SHA-256 (74 against 154 us for an image of 224x224), and enough: it
            # is against disks that fail, not against attackers, who could write the checksum as
            # well.
            total = zlib.crc32(leaf[row].tobytes(), total)
        sums[row] = total or 1
    return sums


def write_about(folder: Path, name: str, damaged: dict[int, str]) -> None:
    with whole(folder / "cache.json") as partial:
        partial.write_text(json.dumps({"source": name, "damaged": damaged}, indent=1))


def read_about(folder: Path, count: int) -> dict[int, str]:
    """The cause of each damaged example that `write_about` wrote; a `ValueError` if it did not."""
    try:
        with os.fdopen(opened(folder / "cache.json", os.O_RDONLY)) as file:
            damaged = json.load(file)["damaged"]
        causes = {int(row): str(cause) for row, cause in damaged.items()}
    # The last one is what JSON of a thousand brackets ends in.
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("cache.json holds something else") from error
    if any(not 0 <= row < count for row in causes):
        raise ValueError("cache.json holds examples that do not exist")
    return causes


def create(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder, whole or not at all, in the place of what may be there."""
    partial = folder.with_suffix(".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        if folder.exists():
            # A folder can take the place of an empty one only.
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except OSError as error:
        raise unwritable(folder, error) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; waits while another process fills it."""
    lock = folder.with_suffix(".lock")
    try:
        held = contextlib.ExitStack()
        held.enter_context(one_at_a_time(lock, f"is filling the cache {folder}"))
    except OSError as error:
        raise unwritable(lock, error) from error
    with held:
        yield


def unwritable(path: Path, error: OSError) -> OSError:
    return os_error(
        error,
        f"The cache cannot be written: {error.strerror or error}.",
        "Expected a folder that can be written, with room for the decoded examples.",
        "Choose another folder, or free this one and run again: what is there stays.",
        path=str(path),
    )


def require_disk(where: Path, needed: int, name: str) -> None:
    """Raise an `OSError` unless there is room for so many bytes; the folder need not exist yet."""
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
