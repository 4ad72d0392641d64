"""`Rows`: one file of a cache folder, with a row for each example."""

import io
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keras_multigpu.checks import os_error
from keras_multigpu.writing import CAREFULLY


class Rows:
    """An `.npy` file that `write_empty` made; a `ValueError` if it is another or not whole.

    It is not mapped: where another process truncates a mapped file, SIGBUS kills the readers.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype, flags: int) -> None:
        start = header(shape, dtype)
        self._path = path
        self._start = len(start)
        self._size = size_of(shape[1:], dtype)
        self._file = os.open(path, flags | CAREFULLY)
        # Threads may read from it when it is not the cache's any more.
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        whole = stat.S_ISREG(status.st_mode) and status.st_size == self._place(shape[0])
        # The header is compared and not read: whatever it holds does no harm.
        if not whole or os.pread(self._file, len(start), 0) != start:
            raise ValueError(f"{path.name} is not the whole file of {dtype}{shape} that was made")

    def _place(self, row: int) -> int:
        return self._start + row * self._size

    def state(self) -> tuple[int, int, int]:
        """What changes whenever the file does; the first number identifies it."""
        status = os.fstat(self._file)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, out: np.ndarray, rows: np.ndarray) -> None:
        """Fill an array with rows; a `ValueError` if the file ends before one of them."""
        assert out.flags.c_contiguous
        content = out.reshape(-1).view(np.uint8).data
        for low, high in runs(rows):
            part, place = content[low * self._size : high * self._size], self._place(int(rows[low]))
            while part:
                count = os.preadv(self._file, [part], place)
                if not count:
                    raise ValueError(f"{self._path.name} was cut off")
                part, place = part[count:], place + count

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write some rows. Each call says where it writes, so threads need no lock."""
        for low, high in runs(rows):
            data, place = memoryview(values[low:high].tobytes()), self._place(int(rows[low]))
            try:
                while data:
                    written = os.pwrite(self._file, data, place)
                    data, place = data[written:], place + written
            except OSError as error:
                raise unwritable(self._path, error) from error


def write_empty(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Make a file of zeros, which take no room on the disk until they are written."""
    with path.open("xb") as file:
        file.write(header(shape, dtype))
        file.truncate(file.tell() + size_of(shape, dtype))


def unwritable(path: Path, error: OSError) -> OSError:
    return os_error(
        error,
        f"The cache cannot be written: {error.strerror or error}.",
        "Expected a folder that can be written, with room for the decoded examples.",
        "Choose another folder, or free this one and run again: what is there stays.",
        path=str(path),
    )


def header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    file = io.BytesIO()
    # NumPy's own, so that `numpy.load` opens the file; the same shape and type give the same bytes.
    content = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, content)
    return file.getvalue()


def size_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """The parts `low:high` of numbers of rows in which one follows another without a gap."""
    if rows.size:
        bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        # Each run is one call of the system.
        yield from zip(bounds[:-1], bounds[1:], strict=True)
