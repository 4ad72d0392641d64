"""The folder of a run: numbered checkpoints, each complete or absent, and a lock.

    photos_run/
      checkpoint-000017.kmg           the last ones; the highest number is the newest
      checkpoint-000018.kmg
      checkpoint-000016.kmg.damaged   set aside because its checksum was wrong
      lock                            names the process that uses the folder

A checkpoint is written under another name, flushed to disk, and then renamed, so a process that is
killed at any moment leaves the earlier ones intact.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

from keras_multigpu.callbacks.resumable_checkpoint.format import (
    NUMBER,
    DamagedFile,
    Encoded,
    OtherFormat,
    decode,
)
from keras_multigpu.checks import os_error, value_error
from keras_multigpu.writing import CAREFULLY

logger = logging.getLogger("keras_multigpu")

ENDING = ".kmg"
NAME = re.compile(rf"checkpoint-([0-9]{{1,18}}){ENDING}(\..*)?")
"""The name of a checkpoint, also of one that is half written or set aside."""
NOTE = 200
"""The size limit of the note in a lock, in bytes."""

_held: dict[Path, int] = {}
"""The folders that this process holds and their locks, which only exclude other processes."""


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._lock: int | None = None
        self.run = ""

    def open(self, run: str | None = None) -> None:
        """Lock the folder for this process, and remove what a killed one left half written.

        Args:
            run: The `run` of a failed worker, to take over its folder.
        """
        self.run = run or secrets.token_hex(4)
        try:
            if run is None:
                self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock(run)
            for partial in self.path.glob(f"checkpoint-*{ENDING}.partial"):
                partial.unlink()
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        # A forked process does not hold it, see `close_forked_locks`.
        for path in [path for path, lock in _held.items() if lock == self._lock]:
            os.close(_held.pop(path))
        self._lock = None

    def _take_lock(self, run: str | None = None) -> None:
        path = self.path.resolve()
        if path in _held:
            raise in_use(path, "this process")
        file = open_plain(path / "lock", os.O_RDWR | (0 if run else os.O_CREAT))
        try:
            if not try_lock(file) or (run and run not in holder_in(file)):
                raise in_use(path, holder_in(file))
            # The number distinguishes processes of the same name, as in containers.
            note = f"process {os.getpid()} on {socket.gethostname()}, run {self.run}\n"
            os.ftruncate(file, 0)
            os.pwrite(file, note.encode()[:NOTE], 0)
        except BaseException:
            os.close(file)
            raise
        self._lock = _held[path] = file

    def checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        found = self.path.glob(f"checkpoint-*{ENDING}")
        return sorted((path for path in found if NAME.fullmatch(path.name)), key=number_of)

    def newest(self) -> tuple[Path, Any] | None:
        """The newest complete checkpoint and its content; None if there are none at all.

        Damaged ones are logged and renamed.
        """
        found = self.checkpoints()
        for path in {*self.path.glob(f"checkpoint-*{ENDING}")}.difference(found):
            logger.warning("%s has no number, and is ignored.", path)
        for path in reversed(found):
            try:
                return path, content_of(path)
            except OtherFormat as cause:
                raise value_error(
                    f"Another version of keras_multigpu wrote this checkpoint: {cause}.",
                    f"Expected format {NUMBER}.",
                    "Use that version, or choose another folder to start over.",
                    file=str(path),
                ) from cause
            except DamagedFile as cause:
                self._set_aside(path, str(cause))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise os_error(
                        error,
                        f"The newest checkpoint cannot be read: {error.strerror}.",
                        "Expected a file that this user may read.",
                        "Allow reading, or choose another folder to start over.",
                        file=str(path),
                    ) from error
                self._set_aside(path, "the disk cannot read it")
        if found:
            raise value_error(
                "All checkpoints of this run are damaged, and were renamed to end in .damaged.",
                "Expected at least one that is complete.",
                "Run again to start over in this folder, and check the disk.",
                folder=str(self.path),
                checkpoints=[path.name for path in found],
            )
        return None

    def read(self, number: int) -> tuple[Path, Any]:
        """The checkpoint that the chief found here, and its content."""
        path = self.path / f"checkpoint-{number:06}{ENDING}"
        try:
            return path, content_of(path)
        except (OSError, DamagedFile) as error:
            raise value_error(
                "A worker cannot read the checkpoint that the chief resumes from.",
                "Expected a folder that all workers can read.",
                "Put it on a file system shared by the machines.",
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
        logger.warning("%s is damaged: %s. It is now %s.", path, cause, aside.name)

    def write(self, content: Encoded) -> Path:
        """Add a checkpoint, and remove the oldest ones beyond `keep`."""
        partial: Path | None = None
        try:
            taken = [path for path in self.path.iterdir() if NAME.fullmatch(path.name)]
            numbers = [number_of(path) for path in taken]
            path = self.path / f"checkpoint-{max(numbers, default=0) + 1:06}{ENDING}"
            partial = path.with_name(f"{path.name}.partial")
            made = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666)
            with os.fdopen(made, "wb") as file:
                content.write_to(file)
                file.flush()
                # Before the rename: a file system may write names before contents.
                os.fsync(file.fileno())
            os.replace(partial, path)
            # Without this, a power failure could undo the rename.
            names = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(names)
            finally:
                os.close(names)
        except OSError as error:
            with contextlib.suppress(OSError):
                if partial is not None:
                    partial.unlink(missing_ok=True)
            raise unwritable(self.path, error, content.num_bytes) from error
        for old in self.checkpoints()[: -self._keep]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path


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


def content_of(checkpoint: Path) -> Any:
    with os.fdopen(open_plain(checkpoint, os.O_RDONLY), "rb") as file:
        return decode(file)


def try_lock(file: int) -> bool:
    """Try to lock a file, which the system unlocks when the process ends in any way."""
    try:
        # `flock` locks the open file. `lockf` loses the lock when anything in the process opens and
        # closes the file, such as a backup.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.info("%s: two runs in one folder are not detected.", error.strerror)
    return True


def close_forked_locks() -> None:
    """Close the locks in a forked process, which may outlive the run."""
    for lock in _held.values():
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=close_forked_locks)


def holder_in(lock: int) -> str:
    """Who holds a folder, according to its lock."""
    return os.pread(lock, NOTE, 0).decode(errors="replace").strip() or "another process"


def number_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def not_plain(path: Path) -> ValueError:
    return value_error(
        f"{path} is a link, a pipe or a folder.",
        "Expected a plain file: nothing else is read, written or waited for.",
        "Check where it comes from and remove it, or choose another folder.",
        file=str(path),
    )


def in_use(folder: Path, holder: str) -> ValueError:
    return value_error(
        f"Another run keeps its checkpoints in this folder: {holder}.",
        "Expected a folder for each run.",
        "Wait until the other run has ended, or choose another folder.",
        folder=str(folder),
    )


def unwritable(folder: Path, error: OSError, needed: int | None = None) -> OSError:
    space = "" if needed is None else f" with {needed / 1e6:,.1f} MB of free space"
    return os_error(
        error,
        f"The checkpoint cannot be written: {error.strerror}.",
        f"Expected a folder that can be written{space}.",
        "Free space or allow writing, and run the same command again: what was saved before is "
        "still there. Or choose another folder.",
        folder=str(folder),
    )
