"""The folder of a run: numbered checkpoints, each whole or not there, and a lock.

    photos_run/
      checkpoint-000017.kmg           the last ones; the greatest number is the newest
      checkpoint-000018.kmg
      checkpoint-000016.kmg.damaged   set aside because its checksum was wrong
      lock                            names the process that trains here

A checkpoint is written under another name, brought to the disk, and then renamed. So a process
that is killed at any moment leaves the earlier ones as they were. Before each one the folder and
the lock are looked at: they are still those of this run.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import stat
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from keras_multigpu.callbacks.resumable_checkpoint.format import (
    NUMBER,
    Damaged,
    Encoded,
    OtherFormat,
    decoded,
)
from keras_multigpu.checks import os_error, value_error
from keras_multigpu.writing import CAREFULLY

_log = logging.getLogger("keras_multigpu")

ENDING = ".kmg"
NAME = re.compile(rf"checkpoint-([0-9]{{1,18}}){ENDING}(\..*)?")
"""A checkpoint's name, or that of one which is half written, or set aside."""
NOTE = 200
"""So many bytes of a lock are read and written."""

LOCKED = (errno.EACCES, errno.EAGAIN)
"""What the system says of a file that another one has locked."""

_held: dict[Path, int] = {}
"""The folders that this process holds, and their locks: its own would not keep it out."""


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._lock: int | None = None
        self._note = b""
        self._place: tuple[int, int] | None = None

    def open(self) -> None:
        """Lock the folder for this process, and remove what a killed one has left half written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for partial in self.path.glob(f"checkpoint-*{ENDING}.partial"):
                partial.unlink()
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        # In a process that was forked it is not held any more, see `let_go`.
        for path in [path for path, lock in _held.items() if lock == self._lock]:
            os.close(_held.pop(path))
        self._lock = None

    def _take_lock(self) -> None:
        path = self.path.resolve()
        if path in _held:
            raise in_use(path, "this process")
        file = opened(path / "lock", os.O_RDWR | os.O_CREAT, most_names=1)
        try:
            if not locked(file):
                raise in_use(path, holder_in(file))
            # The number keeps processes of one name apart, as those in containers are.
            note = f"process {os.getpid()} on {socket.gethostname()}, run {secrets.token_hex(4)}\n"
            self._note = note.encode()[:NOTE]
            os.ftruncate(file, 0)
            os.write(file, self._note)
        except BaseException:
            os.close(file)
            raise
        self._lock, self._place = file, place_of(self.path)
        _held[path] = file

    def _require_own(self) -> None:
        """Raise an error where the folder, or its lock, is not this run's any more."""
        if place_of(self.path) != self._place:
            raise moved(self.path)
        assert self._lock is not None
        if note_in(self._lock) != self._note:  # Where locks do not hold, or are lost.
            raise in_use(self.path, holder_in(self._lock))
        if place_of(self.path / "lock") != place_of(self._lock):
            # Somebody has removed the file, and with it what keeps others out.
            self.close()
            self._take_lock()

    def checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest first; what has such a name and no number is not one."""
        found = self.path.glob(f"checkpoint-*{ENDING}")
        return sorted((path for path in found if NAME.fullmatch(path.name)), key=number_of)

    def newest(self) -> tuple[Path, Any] | None:
        """The newest checkpoint that is whole, and what is in it; None if there are none at all.

        Damaged ones are set aside, and named in the log.
        """
        found = self.checkpoints()
        for path in {*self.path.glob(f"checkpoint-*{ENDING}")}.difference(found):
            _log.warning("%s has no number, and is left alone.", path)
        for path in reversed(found):
            try:
                with os.fdopen(opened(path, os.O_RDONLY), "rb") as file:
                    return path, decoded(file)
            except OtherFormat as cause:
                raise value_error(
                    f"Another version of keras_multigpu has written this checkpoint: {cause}.",
                    f"Expected format {NUMBER}.",
                    "Use that version, or choose another folder to begin anew.",
                    file=str(path),
                ) from cause
            except Damaged as cause:
                self._set_aside(path, str(cause))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise os_error(
                        error,
                        f"The newest checkpoint cannot be read: {error.strerror}.",
                        "Expected a file that this user may read.",
                        "Allow reading, or choose another folder to begin anew.",
                        file=str(path),
                    ) from error
                self._set_aside(path, "the disk cannot read it")
        if found:
            raise value_error(
                "All checkpoints of this run are damaged, and now end in .damaged.",
                "Expected at least one that is whole.",
                "Run again to begin anew in this folder, and check the disk.",
                folder=str(self.path),
                checkpoints=[path.name for path in found],
            )
        return None

    def read(self, number: int) -> tuple[Path, Any]:
        """The checkpoint that another worker has found here, and what is in it."""
        path = self.path / f"checkpoint-{number:06}{ENDING}"
        try:
            with os.fdopen(opened(path, os.O_RDONLY), "rb") as file:
                return path, decoded(file)
        except (OSError, Damaged) as error:
            raise value_error(
                "A worker cannot read the checkpoint that the chief goes on from.",
                "Expected a folder that all workers reach.",
                "Put it on a file system that the machines share.",
                checkpoint=str(path),
            ) from error

    def _set_aside(self, path: Path, cause: str) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        try:
            while os.path.lexists(aside):
                aside = aside.with_name(f"{aside.name}.again")
            os.replace(path, aside)
        except OSError as error:
            raise unwritable(self.path, error) from error
        _log.warning("%s is damaged: %s. It is now %s.", path, cause, aside.name)

    def write(self, content: Encoded) -> Path:
        """Add a checkpoint, and then drop those that are too many."""
        self._require_own()
        partial: Path | None = None
        try:
            taken = [path for path in self.path.iterdir() if NAME.fullmatch(path.name)]
            numbers = [number_of(path) for path in taken]
            path = self.path / f"checkpoint-{max(numbers, default=0) + 1:06}{ENDING}"
            partial = path.with_name(f"{path.name}.partial")
            made = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666)
            with os.fdopen(made, "wb") as file:
                write_through(file, content)
            os.replace(partial, path)
            # Without this a power cut may take the new name back, with the content on the disk.
            bring_to_disk(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                if partial is not None:
                    partial.unlink(missing_ok=True)
            if place_of(self.path) != self._place:
                raise moved(self.path) from error
            raise unwritable(self.path, error, content.num_bytes) from error
        for old in self.checkpoints()[: -self._keep]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path


def opened(path: Path, flags: int, most_names: int | None = None) -> int:
    """An open file; a `ValueError` unless it is a plain one, with no more names than that."""
    try:
        file = os.open(path, flags | CAREFULLY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise not_plain(path) from error
        raise
    state = os.fstat(file)
    # Asked of the open file: the path may be another file by now.
    if not stat.S_ISREG(state.st_mode) or (most_names and state.st_nlink > most_names):
        os.close(file)
        raise not_plain(path)
    return file


def write_through(file: BinaryIO, content: Encoded) -> None:
    content.write_to(file)
    file.flush()
    # Before the rename: a file system may write names before contents.
    os.fsync(file.fileno())


def bring_to_disk(folder: Path) -> None:
    """Wait until the disk has a folder's names."""
    if os.name != "posix":  # Elsewhere a folder cannot be opened.
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def locked(file: int) -> bool:
    """Whether a file could be locked; the system lets go when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        _log.info("This system has no fcntl: two runs in one folder are not noticed.")
        return True
    try:
        try:
            # A lock that belongs to the open file. One that belongs to the process is lost as soon
            # as anything in it has opened and closed the file, as a backup of the folder does.
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, 0, 0, 0))
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in LOCKED:
                raise
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # A system without such locks.
    except OSError as error:
        if error.errno in LOCKED:
            return False
        _log.info("%s: two runs in one folder are not noticed.", error.strerror)
    return True


def let_go() -> None:
    """Close the locks in a process that was forked: it may live longer than the run."""
    for lock in _held.values():
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=let_go)


def note_in(lock: int) -> bytes:
    os.lseek(lock, 0, os.SEEK_SET)
    return os.read(lock, NOTE)


def holder_in(lock: int) -> str:
    """Who holds a folder, as its lock says."""
    return note_in(lock).decode(errors="replace").strip() or "another process"


def place_of(file: Path | int) -> tuple[int, int] | None:
    """What a file or folder is, whatever it is called; None if it cannot be found."""
    with contextlib.suppress(OSError):
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return None


def number_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def not_plain(path: Path) -> ValueError:
    return value_error(
        f"{path} is a link, a pipe or a folder, or a file that has other names.",
        "Expected a file of its own: nothing else is read, written or waited for.",
        "Look at where it comes from and remove it, or choose another folder.",
        file=str(path),
    )


def in_use(folder: Path, holder: str) -> ValueError:
    return value_error(
        f"Another run keeps its checkpoints in this folder: {holder}.",
        "Expected a folder for each run.",
        "Wait until the other run has ended, or choose another folder.",
        folder=str(folder),
    )


def moved(folder: Path) -> OSError:
    return os_error(
        FileNotFoundError(errno.ENOENT, ""),
        "The folder of this run was renamed, replaced or removed while it trained.",
        "Expected it to stay as it is until `fit` has ended.",
        "Give it its name back, and run the same command again to go on. Or choose another folder.",
        folder=str(folder),
    )


def unwritable(folder: Path, error: OSError, needed: int | None = None) -> OSError:
    room = "" if needed is None else f" with room for {needed / 1e6:,.1f} MB"
    return os_error(
        error,
        f"The checkpoint cannot be written: {error.strerror}.",
        f"Expected a folder that can be written{room}.",
        "Make room or allow writing, and run the same command again: what was saved before is "
        "still there. Or choose another folder.",
        folder=str(folder),
    )


class BackgroundWriter:
    """One thread that writes one checkpoint at a time."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(1, "keras_multigpu checkpoint")
        self._under_way: Future[Path] | None = None

    def write(self, content: Encoded) -> None:
        """Begin to write; waits for the checkpoint before, so that at most one is in memory."""
        self.wait()
        self._under_way = self._threads.submit(self._folder.write, content)

    def raise_error(self) -> None:
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is written; raises what went wrong."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> Exception | None:
        """Wait, and end the thread; what went wrong, if anything did."""
        try:
            self.wait()
        except Exception as error:  # Whatever it is, the thread ends.
            return error
        finally:
            self._threads.shutdown()
        return None
