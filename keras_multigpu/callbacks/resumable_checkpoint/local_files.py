"""Checkpoints in a folder: written whole, locked, and never through a link.

A file is written under another name, flushed to disk, and then renamed, so a process that is
killed at any moment leaves the earlier ones intact.
"""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded, decode
from keras_multigpu.checks import value_error
from keras_multigpu.writing import CAREFULLY, try_lock

NOTE = 200
"""The size limit of the note in a lock, in bytes."""

_held: dict[Path, int] = {}
"""The folders that this process holds and their locks, which only exclude other processes."""


class LocalFiles:
    """The files of a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: int | None = None

    def open(self, run: str, takes_over: bool) -> None:
        if not takes_over:
            self._path.mkdir(parents=True, exist_ok=True)
        self._take_lock(run, takes_over)
        for partial in self._path.glob("checkpoint-*.kmg.partial"):
            partial.unlink()

    def close(self) -> None:
        # A forked process does not hold it, see `close_forked_locks`.
        for path in [path for path, lock in _held.items() if lock == self._lock]:
            os.close(_held.pop(path))
        self._lock = None

    def _take_lock(self, run: str, takes_over: bool) -> None:
        path = self._path.resolve()
        if path in _held:
            raise in_use(path, "this process")
        file = open_plain(path / "lock", os.O_RDWR | (0 if takes_over else os.O_CREAT))
        try:
            if not try_lock(file) or (takes_over and run not in holder_in(file)):
                raise in_use(path, holder_in(file))
            os.ftruncate(file, 0)
            os.pwrite(file, note_of(run)[:NOTE], 0)
        except BaseException:
            os.close(file)
            raise
        self._lock = _held[path] = file

    def names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()]

    def at(self, name: str) -> Path:
        return self._path / name

    def read(self, name: str) -> Any:
        with os.fdopen(open_plain(self._path / name, os.O_RDONLY), "rb") as file:
            return decode(file)

    def write(self, name: str, content: Encoded, run: str) -> None:
        path, partial = self._path / name, self._path / f"{name}.partial"
        try:
            made = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666)
            with os.fdopen(made, "wb") as file:
                content.write_to(file)
                file.flush()
                # Before the rename: a file system may write names before contents.
                os.fsync(file.fileno())
            os.replace(partial, path)
            # Without this, a power failure could undo the rename.
            names = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(names)
            finally:
                os.close(names)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def rename(self, name: str, other: str) -> None:
        os.replace(self._path / name, self._path / other)

    def remove(self, name: str) -> None:
        (self._path / name).unlink()


def open_plain(path: Path, flags: int) -> int:
    """Open a file; a `ValueError` unless it is a plain one."""
    try:
        file = os.open(path, flags | CAREFULLY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise not_plain(path) from error
        raise
    # Check the open file, because the path may lead to another one by now.
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise not_plain(path)
    return file


def close_forked_locks() -> None:
    """Close the locks in a forked process, which may outlive the run."""
    for lock in _held.values():
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=close_forked_locks)


def note_of(run: str) -> bytes:
    """Names this process; the run distinguishes processes of the same name, as in containers."""
    return f"process {os.getpid()} on {socket.gethostname()}, run {run}\n".encode()


def holder_in(lock: int) -> str:
    """Who holds a folder, according to its lock."""
    return os.pread(lock, NOTE, 0).decode(errors="replace").strip() or "another process"


def not_plain(path: Path) -> ValueError:
    return value_error(
        f"{path} is a link, a pipe or a folder.",
        "Expected a plain file: nothing else is read, written or waited for.",
        "Check where it comes from and remove it, or choose another folder.",
        file=str(path),
    )


def in_use(folder: Path | str, holder: str) -> ValueError:
    return value_error(
        f"Another run keeps its checkpoints in this folder: {holder}.",
        "Expected a folder for each run.",
        "Wait until the other run has ended, or choose another folder.",
        folder=str(folder),
    )
