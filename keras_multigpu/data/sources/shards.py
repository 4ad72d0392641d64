"""Finds shards of records, and keeps an index of each in the user's cache folder."""

import glob
import hashlib
import json
import logging
import os
import weakref
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.checks import os_error, value_error
from keras_multigpu.data import addresses
from keras_multigpu.data.addresses import RemoteFile, is_address
from keras_multigpu.data.sources.file_table import FileTable, digest_of
from keras_multigpu.data.sources.items import Items
from keras_multigpu.data.sources.record_file import HEAD, File, Shard, begins_record, index_of
from keras_multigpu.writing import CAREFULLY, write_whole

# Raise it when the form of the index changes.
VERSION = 1

# How many bytes of a shard are compared, besides its size and time, to tell if an index fits.
BEGINNING = 4096

logger = logging.getLogger("keras_multigpu")


class Shards(Items):
    """The records of several shards, one shard after another."""

    def __init__(self, paths: list[str], threads: int) -> None:
        self._paths = paths
        unwritten: list[OSError] = []
        with ThreadPoolExecutor(threads) as pool:
            self._shards = list(pool.map(lambda path: open_shard(path, unwritten), paths))
        if unwritten:
            logger.warning(
                "%s of %s indices could not be stored (%s), so each run makes them again. Set "
                "XDG_CACHE_HOME to a folder that can be written.",
                len(unwritten),
                len(paths),
                unwritten[0],
            )
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        count = "1 shard" if len(paths) == 1 else f"{len(paths)} shards"
        self.name = os.path.basename(paths[0]) if len(paths) == 1 else count

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a record, and its number there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard - 1] if shard else 0)

    def get(self, index: int) -> Any:
        number, record = self._place(index)
        shard = self._shards[number]
        file: File = RemoteFile(shard.path) if is_address(shard.path) else LocalFile(shard.path)
        return shard.read(file, record)

    def item_name(self, index: int) -> str:
        number, record = self._place(index)
        return self._shards[number].name_of(record)

    def identity(self, exact: bool) -> dict[str, Any]:
        table = FileTable(map(addresses.split_path, self._paths))
        return {"shards": digest_of(table, exact)}


class LocalFile:
    """A file on a disk, closed when it is no longer referenced."""

    def __init__(self, path: str) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._number)

    def pread(self, size: int, start: int) -> bytes:
        return os.pread(self._number, size, start)

    def state(self) -> tuple[int, str]:
        """Its size, and a text that changes with its content."""
        status = os.fstat(self._number)
        return status.st_size, str(status.st_mtime_ns)


def find_shards(paths: Any) -> list[str]:
    """The shards at a path, a pattern, a folder or a list of these."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Iterable):
        raise value_error(
            "`paths` is not a path.",
            "Expected a folder, a file, a pattern such as 'train-*.tfrecord', or a list of these.",
            paths=paths,
        )
    found = [shard for path in given for shard in shards_at(os.path.expanduser(os.fspath(path)))]
    if not found:
        raise value_error(
            "There are no shards.",
            "Expected files whose names contain .tfrecord.",
            paths=paths,
        )
    twice = len(found) - len({absolute(path) for path in found})
    if twice:
        raise value_error(
            f"{twice} shards are named twice.",
            "Expected each once, since an epoch reads each example once.",
            paths=paths,
        )
    return found


def shards_at(path: str) -> list[str]:
    if is_address(path):
        if glob.has_magic(path):
            return addresses.find_matching(path)
        names = sorted(entry.name for entry in addresses.entries(path) if not entry.folder)
    elif os.path.isdir(path):
        names = sorted(os.listdir(path))
    elif os.path.exists(path) or not glob.has_magic(path):
        names = [""]
    else:
        return [each for each in sorted(glob.glob(path, recursive=True)) if os.path.isfile(each)]
    if names == [""]:  # A file.
        return [path]
    return [os.path.join(path, name) for name in names if is_shard(name)]


def absolute(path: str) -> str:
    return path if is_address(path) else os.path.abspath(path)


def is_shard(name: str) -> bool:
    # Compressed shards are refused later.
    return not name.startswith(".") and ".tfrecord" in name


def open_shard(path: str, unwritten: list[OSError]) -> Shard:
    """A shard with its index, which is made unless a stored one still fits."""
    try:
        file = addresses.SequentialFile(path) if is_address(path) else LocalFile(path)
        (size, version), beginning = file.state(), file.pread(BEGINNING, 0)
    except addresses.Unreachable:
        raise
    except OSError as error:
        raise os_error(
            error,
            f"The shard {path} cannot be read: {error.strerror}.",
            "Expected a file, a folder or a pattern that finds some.",
            path=path,
        ) from error
    digest = hashlib.sha256(beginning).hexdigest()[:32]
    about = json.dumps([VERSION, size, version, digest])
    place = index_path(path)
    require_records(path, beginning)
    starts = load_index(place, about)
    if starts is None:
        starts = index_of(file, size)
        try:
            store_index(place, about, starts)
        except OSError as error:
            unwritten.append(error)
    return Shard(path, starts)


def index_path(path: str) -> Path:
    """Not beside the shard, where the user did not ask for a file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # Shards in different folders may have the same name.
    key = hashlib.sha256(absolute(path).encode(errors="surrogateescape")).hexdigest()[:16]
    return cache / "keras_multigpu" / "records" / f"{key}.index.npz"


def store_index(place: Path, about: str, starts: np.ndarray) -> None:
    with write_whole(place) as partial, partial.open("wb") as file:
        np.savez(file, about=np.array(about), starts=starts)


def load_index(place: Path, about: str) -> np.ndarray | None:
    """A stored index; None if there is none, or it is outdated."""
    try:
        with open(os.open(place, os.O_RDONLY | CAREFULLY), "rb") as content:
            index = dict(np.load(content, allow_pickle=False))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return index["starts"] if str(index.get("about")) == about else None


def require_records(path: str, beginning: bytes) -> None:
    """Raise a `ValueError` unless a file is empty or begins as a TFRecord file does."""
    if not beginning or begins_record(beginning[:HEAD]):
        return
    name = os.path.basename(path)
    if beginning[:2] == b"\x1f\x8b":
        raise value_error(
            f"{name} is compressed.",
            "Expected shards in which each record can be read by itself.",
            "Decompress it with `gunzip`, or read it with `tf.data` and `from_dataset`.",
            path=path,
        )
    raise value_error(
        f"{name} is not a TFRecord file, or its beginning is damaged.",
        "Expected shards of this format.",
        "Repair it or leave it out. For tar archives, examples/train_from_records.py has a source "
        "for `from_source`.",
        path=path,
        begins=beginning[:16],
    )
