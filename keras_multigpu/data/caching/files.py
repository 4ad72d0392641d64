"""The files of a cache folder: how they are made, mapped, written and locked."""

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from keras_multigpu.checks import os_error
from keras_multigpu.writing import one_at_a_time, size_text, whole

_log = logging.getLogger("keras_multigpu")


class Writer:
    """Writes rows into `.npy` files, from several threads at once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[int] = []

    def __enter__(self) -> Self:
        for path in self._paths:
            try:
                self._files.append(os.open(path, os.O_WRONLY))
            except OSError as error:
                self.__exit__()
                raise unwritable(path, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            os.close(file)

    def write(self, number: int, array: Any, rows: np.ndarray, values: np.ndarray) -> None:
        """Write some rows of a file, where its `numpy.memmap` says that they are."""
        for low, high in runs(rows):
            data = memoryview(values[low:high].tobytes())
            offset = array.offset + int(rows[low]) * array.strides[0]
            try:
                # Not through the mapping: on a full disk that ends the process by SIGBUS. Each call
                # says where it writes, so threads need no lock for a position in the file.
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


def runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """The parts `low:high` of ascending numbers that follow one another without a gap."""
    if rows.size:
        bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        # Each run is one write.
        yield from zip(bounds[:-1], bounds[1:], strict=True)


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


def mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """A file that `write_empty` made, not loaded; a `ValueError` if it is another or not whole."""
    # The header is compared and not read: whatever stands there does no harm.
    start = header(shape, dtype)
    with regular(path).open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if file.read(len(start)) != start or length != len(start) + size_of(shape, dtype):
            raise ValueError(f"{path.name} is not the whole file of {dtype}{shape} that was made")
    return np.memmap(path, dtype, "r", len(start), shape)


def regular(path: Path) -> Path:
    """The path of a regular file; a `ValueError` if it is not one. A pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    return path


def header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    file = io.BytesIO()
    # NumPy's own, so that `numpy.load` opens the file; the same shape and type give the same bytes.
    content = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, content)
    return file.getvalue()


def size_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def write_empty(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Make a file of zeros, which take no room on the disk until they are written."""
    with path.open("wb") as file:
        file.write(header(shape, dtype))
        file.truncate(file.tell() + size_of(shape, dtype))


def write_about(folder: Path, name: str, damaged: dict[int, str]) -> None:
    with whole(folder / "cache.json") as partial:
        partial.write_text(json.dumps({"source": name, "damaged": damaged}, indent=1))


def read_about(folder: Path, count: int) -> dict[int, str]:
    """The cause of each damaged example that `write_about` wrote; a `ValueError` if it did not."""
    try:
        damaged = json.loads(regular(folder / "cache.json").read_text())["damaged"]
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
        f"The cache cannot be written: {error.strerror}.",
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
