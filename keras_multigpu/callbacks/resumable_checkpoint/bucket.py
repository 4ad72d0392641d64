"""Checkpoints in a bucket: at `gs://`, `s3://` or any other address that fsspec writes.

Objects have the names of a folder's files. A storage shows an object when all of it has arrived,
so each is put under its own name, and nothing is renamed. Where half of one shows nevertheless, its
checksum is wrong, as that of a damaged file.

There are no locks that a killed process would release. So the run that started last has the folder:
it writes its name into the object `lock`, and an earlier one that is still alive ends at its next
save, before it writes.
"""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from typing import Any

from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded, decode
from keras_multigpu.callbacks.resumable_checkpoint.local_files import in_use, note_of
from keras_multigpu.data.addresses import locate, missing_package

_held: set[str] = set()
"""The addresses that this process writes to."""


class Bucket:
    """The objects below an address."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._is_open = False

    def open(self, run: str, takes_over: bool) -> None:
        if self._address in _held:
            raise in_use(self._address, "this process")
        with reaching(self._address) as (system, path):
            system.pipe_file(f"{path}/lock", note_of(run))
        _held.add(self._address)
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            _held.discard(self._address)
        self._is_open = False

    def _require_lock(self, run: str) -> None:
        with reaching(self._address) as (system, path):
            holder = system.cat_file(f"{path}/lock").decode(errors="replace").strip()
        if run not in holder:
            raise in_use(self._address, holder)

    def names(self) -> list[str]:
        with reaching(self._address) as (system, path):
            # Another process may have written since the last listing.
            system.invalidate_cache(path)
            try:
                found = system.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def at(self, name: str) -> str:
        return f"{self._address}/{name}"

    # Objects pass through local files: reading one where it is could not tell a lost connection
    # from damage.

    def read(self, name: str) -> Any:
        with tempfile.NamedTemporaryFile() as file:
            with reaching(self._address) as (system, path):
                system.get_file(f"{path}/{name}", file.name)
            return decode(file.file)

    def write(self, name: str, content: Encoded, run: str) -> None:
        with tempfile.NamedTemporaryFile() as file:
            content.write_to(file.file)
            file.flush()
            self._require_lock(run)
            with reaching(self._address) as (system, path):
                system.put_file(file.name, f"{path}/{name}")

    def rename(self, name: str, other: str) -> None:
        with reaching(self._address) as (system, path):
            system.mv(f"{path}/{name}", f"{path}/{other}")

    def remove(self, name: str) -> None:
        with reaching(self._address) as (system, path):
            system.rm_file(f"{path}/{name}")


@contextlib.contextmanager
def reaching(address: str) -> Iterator[tuple[Any, str]]:
    """The file system of an address and the path in it; whatever fails is a `ConnectionError`."""
    try:
        yield locate(address)
    except ImportError as error:
        raise missing_package(address, error) from error
    except Exception as error:  # Each storage has errors of its own; some report EIO for all.
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
        raise ConnectionError(errno.ECONNABORTED, words) from error
