"""The checkpoints of a run, each complete or absent, in a folder or in a bucket.

    photos_run/
      checkpoint-000017.kmg           the last ones; the highest number is the newest
      checkpoint-000018.kmg
      checkpoint-000016.kmg.damaged   set aside because its checksum was wrong
      lock                            names the process that uses the folder

`local_files` and `bucket` write, read and lock them.
"""

import contextlib
import errno
import logging
import re
import secrets
from pathlib import Path
from typing import Any

from keras_multigpu.callbacks.resumable_checkpoint.bucket import Bucket
from keras_multigpu.callbacks.resumable_checkpoint.format import (
    NUMBER,
    DamagedFile,
    Encoded,
    OtherFormat,
)
from keras_multigpu.callbacks.resumable_checkpoint.local_files import LocalFiles
from keras_multigpu.checks import os_error, value_error

logger = logging.getLogger("keras_multigpu")

NAME = re.compile(r"checkpoint-([0-9]{1,18})\.kmg(\..*)?")
"""The name of a checkpoint, also of one that is half written or set aside."""


class CheckpointFolder:
    """The checkpoints of one run, at a path or, as text, at an address."""

    def __init__(self, path: Path | str, keep: int) -> None:
        self.path = path
        self._files = Bucket(path) if isinstance(path, str) else LocalFiles(path)
        self._keep = keep
        self._failed = ""
        self.run = ""

    def open(self, run: str | None = None) -> None:
        """Lock the folder for this process, and remove what a killed one left half written.

        Args:
            run: The `run` of a failed worker, to take over its folder.
        """
        self.run, self._failed = run or secrets.token_hex(4), ""
        try:
            self._files.open(self.run, takes_over=run is not None)
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        self._files.close()

    def checkpoints(self) -> list[str]:
        """The names of the checkpoints, the oldest first."""
        found = [name for name in self._files.names() if is_checkpoint(name)]
        return sorted(found, key=number_of)

    def newest(self) -> tuple[int, Any] | None:
        """The number of the newest complete checkpoint and its content; None if there is none.

        Damaged ones are logged and renamed.
        """
        try:
            names = self._files.names()
        except OSError as error:
            raise unreadable(self.path, error) from error
        for name in names:
            if name.startswith("checkpoint-") and name.endswith(".kmg") and not is_checkpoint(name):
                logger.warning("%s has no number, and is ignored.", self._files.at(name))
        found = sorted(filter(is_checkpoint, names), key=number_of)
        for name in reversed(found):
            place = self._files.at(name)
            try:
                return number_of(name), self._files.read(name)
            except OtherFormat as cause:
                raise value_error(
                    f"Another version of keras_multigpu wrote this checkpoint: {cause}.",
                    f"Expected format {NUMBER}.",
                    "Use that version, or choose another folder to start over.",
                    file=str(place),
                ) from cause
            except DamagedFile as cause:
                self._set_aside(name, str(cause))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise unreadable(place, error) from error
                self._set_aside(name, "the disk cannot read it")
        if found:
            raise value_error(
                "All checkpoints of this run are damaged, and were renamed to end in .damaged.",
                "Expected at least one that is complete.",
                "Run again to start over in this folder, and check the disk.",
                folder=str(self.path),
                checkpoints=found,
            )
        return None

    def read(self, number: int) -> Any:
        """The content of the checkpoint that the chief found here."""
        try:
            return self._files.read(name_of(number))
        except (OSError, DamagedFile) as error:
            raise value_error(
                "A worker cannot read the checkpoint that the chief resumes from.",
                "Expected a folder that all workers can read.",
                "Put it on a file system shared by the machines, or in a bucket.",
                checkpoint=str(self.at(number)),
            ) from error

    def at(self, number: int) -> Path | str:
        return self._files.at(name_of(number))

    def _set_aside(self, name: str, cause: str) -> None:
        # There is none of this name, because its number is not used again.
        aside = f"{name}.damaged"
        try:
            self._files.rename(name, aside)
        except OSError as error:
            raise unwritable(self.path, error) from error
        logger.warning("%s is damaged: %s. It is now %s.", self._files.at(name), cause, aside)

    def write(self, content: Encoded) -> int:
        """Add a checkpoint, remove the oldest ones beyond `keep`, and return its number."""
        try:
            taken = [name for name in self._files.names() if NAME.fullmatch(name)]
            # What a lost connection may have left of the last one is replaced.
            name = self._failed or name_of(1 + max(map(number_of, taken), default=0))
            self._failed = name
            self._files.write(name, content, self.run)
        except OSError as error:
            raise unwritable(self.path, error, content.num_bytes) from error
        self._failed = ""
        with contextlib.suppress(OSError):
            for old in self.checkpoints()[: -self._keep]:
                self._files.remove(old)
        return number_of(name)


def is_checkpoint(name: str) -> bool:
    return NAME.fullmatch(name) is not None and name.endswith(".kmg")


def name_of(number: int) -> str:
    return f"checkpoint-{number:06}.kmg"


def number_of(name: str) -> int:
    found = NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


def unreadable(place: Path | str, error: OSError) -> OSError:
    return os_error(
        error,
        f"The newest checkpoint cannot be read: {error.strerror or error}.",
        "Expected a file that this user may read.",
        "Allow reading, or choose another folder to start over.",
        file=str(place),
    )


def unwritable(folder: Path | str, error: OSError, needed: int | None = None) -> OSError:
    is_far = isinstance(folder, str)
    space = "" if is_far or needed is None else f" with {needed / 1e6:,.1f} MB of free space"
    remedy = "Check network and credentials" if is_far else "Free space or allow writing"
    return os_error(
        error,
        f"The checkpoint cannot be written: {error.strerror or error}.",
        f"Expected a folder that can be written{space}.",
        f"{remedy}, and run the same command again: what was saved before is still there. Or "
        "choose another folder.",
        folder=str(folder),
    )
