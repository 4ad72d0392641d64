"""A copy of the user's folders, made where a script writes: of links, until a file is written.

The functions that take a path are given the one in the copy, so a script may write by any path and
finds what it wrote. A mount would do that without them, but containers, as on Kaggle and Colab,
allow no mounts.
"""

import builtins
import contextlib
import errno
import functools
import inspect
import io
import os
import shutil
import sqlite3
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import tensorflow as tf

from keras_multigpu.keras_internals import path_internals
from keras_multigpu.rehearsal.findings import Notes
from keras_multigpu.writing import one_at_a_time

FREE = ("/dev", "/proc")
"""Where no files of the user's are."""

PACKAGE = os.path.dirname(os.path.dirname(__file__))
NOT_USERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), PACKAGE, "<frozen")

# `install` replaces them.
_listdir, _rmdir, _stat, _statvfs = os.listdir, os.rmdir, os.stat, os.statvfs


class Overlay:
    """The files that the script has written, between links to the user's.

    Args:
        folder: The folder of the rehearsal.
        worker: Which worker this process is.

    Attributes:
        by: The callback that runs now, if any.
    """

    def __init__(self, folder: Path, worker: int = 0) -> None:
        self.notes, self.by = Notes(folder), ""
        self._folder, self._files, self._worker = str(folder), f"{folder}/files", worker
        self._written: set[tuple[str, str]] = set()
        with one_at_a_time(folder / "lock", "copies a folder"):
            if not os.path.exists(self._files):
                os.symlink("/", self._files)
                self._copy(self._files)

    def place(self, path: Any) -> str | None:
        """The place in the copy; None for what is no path, and what may be written as it is."""
        path = path.numpy() if hasattr(path, "numpy") else path
        if not path or path == ":memory:" or not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        # Nothing is written into buckets, either.
        user = f"/{text}" if "://" in text else os.path.abspath(text)
        if any(f"{user}/".startswith(f"{each}/") for each in (self._folder, *FREE)):
            return None
        return self._files + user

    def to_read(self, path: Any) -> Any:
        own = self.place(path)
        if own is None or self._is_behind_link(own):
            return path
        # In a bucket all is the user's but what the script has written.
        return path if "://" in own and not os.path.exists(own) else alike(path, own)

    def _is_behind_link(self, own: str) -> bool:
        """Whether a place is in a folder without a copy, where all is the user's."""
        above, folder = self._files, os.path.dirname(own).removeprefix(self._files)
        for name in filter(None, folder.split("/")):
            above = f"{above}/{name}"
            if self._target(above) == above.removeprefix(self._files):
                return True
        return False

    def _target(self, own: str) -> str | None:
        """Where a link leads: to the user's file or folder, or to a copy; None for no link."""
        return os.readlink(own) if os.path.islink(own) else None

    def to_look_at(self, path: Any) -> Any:
        """A place to read which is no link unless the user's is."""
        own = self.to_read(path)
        target = None if own is path else self._target(os.fsdecode(own))
        if target == self._user(own):
            return path
        return own if target is None or not target.startswith(self._folder) else alike(path, target)

    def to_change(self, path: Any) -> Any:
        """A place in a copy of its folder, to make, remove or rename what is there."""
        own = self.place(path)
        if own is None:
            return path
        folder = os.path.dirname(own)
        if "://" in own:  # Buckets have no folders.
            os.makedirs(folder, exist_ok=True)
        if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self._copy_folder(folder)
        return alike(path, own)

    def to_write(self, path: Any, keeps: bool = True) -> Any:
        """A place to write to; `keeps` if it matters what the user's file holds."""
        own = self.to_change(path)
        if own is path:
            return path
        user, by = self._user(own), self.by or place_in_script()
        if os.path.isdir(own):
            self._copy_folder(os.fsdecode(own))
        elif os.path.islink(own):
            copy = alike(own, f"{self._folder}/tmp/{os.getpid()}")
            if keeps and os.path.exists(own):
                shutil.copyfile(own, copy)
                os.replace(copy, own)
            else:
                os.unlink(own)
        if (user, by) not in self._written:
            self._written.add((user, by))
            self.notes.add("written", user, by, self._worker)
        return own

    def hide(self, path: Any) -> None:
        """Let the script find nothing of the user's there."""
        own = self.to_change(path)
        if os.path.islink(own):
            os.unlink(own)

    def bytes_written(self, by: str) -> int:
        """The size of the files that a callback has written and not removed."""
        own = {self._files + user for user, other in self._written if other == by}
        return sum(os.path.getsize(each) for each in own if os.path.isfile(each))

    def disk_of(self, path: Any) -> tuple[int, int, str]:
        """The user's disk for a path: its number, its free bytes, and a folder on it."""
        place = os.path.abspath(path)
        while True:
            place = os.path.dirname(place)
            with contextlib.suppress(FileNotFoundError):
                found = _statvfs(place)
                return _stat(place).st_dev, found.f_bavail * found.f_frsize, place

    def _user(self, own: Any) -> str:
        return os.fsdecode(own).removeprefix(self._files)

    def _copy_folder(self, own: str) -> None:
        """Let a folder, and those above it, hold links to what is in the user's."""
        if own == self._files:
            return
        self._copy_folder(os.path.dirname(own))
        with one_at_a_time(Path(self._folder, "lock"), "copies a folder"):
            if self._target(own) == self._user(own) and os.path.isdir(own):
                self._copy(own)

    def _copy(self, own: str) -> None:
        copy, user = tempfile.mkdtemp(dir=self._folder), os.readlink(own)
        # Of the system itself: for this process the folder has a copy.
        for name in _listdir(user):
            os.symlink(os.path.join(user, name), os.path.join(copy, name))
        # At once, since another worker may read.
        os.symlink(copy, f"{copy}.link")
        os.replace(f"{copy}.link", own)

    def _remove_folder(self, path: Any, dir_fd: int | None = None) -> None:
        own = self.to_change(whole(path, {"dir_fd": dir_fd}))
        target = self._target(own)
        if target is None or _listdir(target):
            _rmdir(own if target is None else target)
        elif target.startswith(self._folder):
            _rmdir(target)
        if target is not None:
            os.unlink(own)

    def install(self) -> None:
        """Give the functions of this process other paths from now on."""
        files = path_internals.FILES
        read, change, write = self.to_read, self.to_change, self.to_write
        table: tuple[tuple[Any, str, dict[int, Callable[[Any], Any]]], ...] = (
            (os, "access chdir listdir scandir stat statvfs", {0: read}),
            (os, "lstat readlink", {0: self.to_look_at}),
            (os, "mkdir mkfifo remove unlink", {0: change}),
            (os, "rename replace", {0: change, 1: change}),
            (os, "link", {0: read, 1: change}),
            (os, "symlink", {1: change}),
            (os, "chmod truncate utime", {0: write}),
            (files, path_internals.READ, {0: read}),
            (files, path_internals.CHANGE, {0: change}),
            (files, path_internals.WRITE, {0: write}),
            (files, "RenameFile", {0: change, 1: change}),
            (files, "CopyFile", {0: read, 1: write}),
            (path_internals.SUMMARIES, path_internals.MAKE_WRITER, {1: write}),
            (sqlite3, "connect", {0: write}),
            (tf.train.Checkpoint, "read restore", {1: read}),
            (tf.train.Checkpoint, "save write", {1: write}),
            (tf.train.CheckpointManager, "__init__", {2: write}),
            (tf.data.Dataset, "cache save", {1: write}),
            (tf.io.TFRecordWriter, "__init__", {1: write}),
            (tf.profiler.experimental, "start", {0: write}),
            (path_internals.SAVES, path_internals.SAVE_MODEL, {1: write}),
            (path_internals.LOADS, path_internals.LOAD_MODEL, {0: read}),
        )
        for owner, names, paths in table:
            for name in names.split():
                give_other_paths(owner, name, paths)
        # It would follow links.
        files.DeleteRecursively = lambda path, *_: shutil.rmtree(os.fsdecode(path))
        os.rmdir = self._remove_folder
        builtins.open = io.open = self._opening(io.open, 0, "r")
        os.open = self._opening(os.open, 0, os.O_RDONLY)
        h5py.File.__init__ = self._opening(h5py.File.__init__, 1, "r")

    def _opening(self, original: Callable[..., Any], place: int, usual: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = args[place + 1] if len(args) > place + 1 else kwargs.get("mode", usual)
            if isinstance(mode, str):
                writes, keeps = bool({*mode} & {*"wax+"}), "w" not in mode
            else:
                writes, keeps = bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)), True
            path = whole(args[place], kwargs)
            path = self.to_write(path, keeps) if writes else self.to_read(path)
            return original(*args[:place], path, *args[place + 1 :], **kwargs)

        return call


def give_other_paths(owner: Any, name: str, paths: dict[int, Callable[[Any], Any]]) -> None:
    """Let the arguments of a function at these places be other paths."""
    original = getattr(owner, name)
    try:
        names = [*inspect.signature(original).parameters]
    except ValueError:  # Functions of C++ take them by place.
        names = []

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # `os.listdir()` is of the working folder.
        given = list(args) if args or kwargs else ["."]
        for place, path in paths.items():
            if place < len(given):
                given[place] = path(whole(given[place], kwargs))
            elif place < len(names) and names[place] in kwargs:
                kwargs[names[place]] = path(kwargs[names[place]])
        return original(*given, **kwargs)

    setattr(owner, name, call)


def whole(path: Any, kwargs: dict[str, Any]) -> Any:
    """A path that may be relative to the folder of `dir_fd`."""
    folder = kwargs.pop("dir_fd", None)
    return path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def alike(path: Any, text: str) -> Any:
    """A text in the form of a path: bytes if that is."""
    return os.fsencode(text) if isinstance(path, bytes) else text


def is_users(file: str) -> bool:
    """Whether code of this file is the user's own."""
    return not file.startswith(NOT_USERS)


def place_in_script() -> str:
    """Where the user's code is now: its innermost line."""
    frame = inspect.currentframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "a library"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
