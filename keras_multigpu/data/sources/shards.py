"""TFRecord files, read in any order through an index of each, which the user's cache folder keeps.

Making an index takes one pass over the heads of the records; their content is not read.
"""

import fnmatch
import glob
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.checks import error_of, os_error, value_error
from keras_multigpu.data import addresses
from keras_multigpu.data.addresses import is_address
from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.sources.file_table import FileTable, digest_of, state_of_file
from keras_multigpu.data.sources.items import Items
from keras_multigpu.writing import CAREFULLY, write_whole

# Raise it when the form of the index changes.
VERSION = 2

# How many bytes of a shard are compared, besides its size and time, to tell if an index fits.
BEGINNING = 4096

# The head of a record is its length and the checksum of that. The record's own checksum follows it.
HEAD = 12
AROUND = HEAD + 4

logger = logging.getLogger("keras_multigpu")


class Shards(Items):
    """The records of several shards, one shard after another."""

    def __init__(self, paths: list[str], threads: int) -> None:
        self._paths = paths
        unwritten: list[OSError] = []
        with ThreadPoolExecutor(threads) as pool:
            self._starts = list(pool.map(lambda path: index_of(path, unwritten), paths))
        if unwritten:
            logger.warning(
                "%s of %s indices could not be stored (%s), so each run makes them again. Set "
                "XDG_CACHE_HOME to a folder that can be written.",
                len(unwritten),
                len(paths),
                unwritten[0],
            )
        self._ends = np.cumsum([len(starts) - 1 for starts in self._starts])
        self.name = os.path.basename(paths[0]) if len(paths) == 1 else f"{len(paths)} shards"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a record, and its number there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard - 1] if shard else 0)

    def get(self, index: int) -> bytes:
        shard, number = self._place(index)
        start, end = self._starts[shard][number : number + 2].tolist()
        found = read_part(self._paths[shard], start, end)
        if not begins_record(found[:HEAD]):
            after = end - start - HEAD
            raise DamagedExample(f"its length is damaged, so {after} bytes after it are lost")
        if len(found) != AROUND + int.from_bytes(found[:8], "little"):
            raise DamagedExample("its shard ends within it, or has changed since it was indexed")
        content = found[HEAD:-4]
        if masked_crc(content) != int.from_bytes(found[-4:], "little"):
            raise DamagedExample("its checksum differs")
        return content

    def item_name(self, index: int) -> str:
        shard, number = self._place(index)
        return f"record {number} of {self._paths[shard]}"

    def identity(self, exact: bool) -> dict[str, Any]:
        table = FileTable(map(addresses.split_path, self._paths))
        return {"shards": digest_of(table, exact)}


# Finding shards.


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
    twice = len(found) - len(set(map(place_of, found)))
    if twice:
        raise value_error(
            f"{twice} shards are named twice.",
            "Expected each once, since an epoch reads each example once.",
            paths=paths,
        )
    return found


def shards_at(path: str) -> list[str]:
    names = [""]  # A file.
    if is_address(path):
        folder, pattern = addresses.split_path(path)
        if glob.has_magic(pattern):
            names = [entry.name for entry in addresses.entries(folder) if not entry.folder]
            return [os.path.join(folder, name) for name in sorted(fnmatch.filter(names, pattern))]
        names = sorted(entry.name for entry in addresses.entries(path) if not entry.folder)
    elif os.path.isdir(path):
        names = sorted(os.listdir(path))
    elif glob.has_magic(path) and not os.path.exists(path):
        return [each for each in sorted(glob.glob(path, recursive=True)) if os.path.isfile(each)]
    if names == [""]:
        return [path]
    # Compressed shards are refused later.
    shards = (name for name in names if ".tfrecord" in name and not name.startswith("."))
    return [os.path.join(path, name) for name in shards]


def place_of(path: str) -> str:
    return path if is_address(path) else os.path.abspath(path)


# Records and their index.


def open_local(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # A pipe must not block.


def read_part(path: str, start: int, end: int) -> bytes:
    if is_address(path):
        return addresses.fetch(path, start, end)
    file = open_local(path)
    try:
        return os.pread(file, end - start, start)
    finally:
        os.close(file)


def index_of(path: str, unwritten: list[OSError]) -> np.ndarray:
    """Where each record starts, and where the last one ends; read anew unless a stored one fits."""
    try:
        if is_address(path):
            return load_or_make(path, addresses.SequentialFile(path).read, unwritten)
        file = open_local(path)
        try:
            return load_or_make(path, lambda start, size: os.pread(file, size, start), unwritten)
        finally:
            os.close(file)
    except addresses.Unreachable:
        raise
    except OSError as error:
        raise os_error(
            error,
            f"The shard {path} cannot be read: {error.strerror}.",
            "Expected a file, a folder or a pattern that finds some.",
            path=path,
        ) from error


def load_or_make(
    path: str, read: Callable[[int, int], bytes], unwritten: list[OSError]
) -> np.ndarray:
    state, beginning = state_of_file(path), read(0, BEGINNING)
    require_records(path, beginning)
    digest = hashlib.sha256(beginning).hexdigest()[:32]
    about = json.dumps([VERSION, state, digest])
    place = index_path(path)
    starts = load_index(place, about)
    if starts is None:
        starts = find_records(read, int(state.partition(" ")[0]))
        try:
            with write_whole(place) as partial, partial.open("wb") as file:
                np.savez(file, about=np.array(about), starts=starts)
        except OSError as error:
            unwritten.append(error)
    return starts


def find_records(read: Callable[[int, int], bytes], size: int) -> np.ndarray:
    """The index of a file.

    The last record may be unreadable: cut off by the end of the file, or with a damaged length, so
    that all that follows it is lost.
    """
    starts = [0]
    while starts[-1] < size:
        head = read(starts[-1], HEAD)
        end = starts[-1] + AROUND + int.from_bytes(head[:8], "little")
        starts.append(min(end, size) if begins_record(head) else size)
    return np.array(starts, np.int64)


def index_path(path: str) -> Path:
    """Not beside the shard, where the user did not ask for a file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # Shards in different folders may have the same name.
    key = hashlib.sha256(place_of(path).encode(errors="surrogateescape")).hexdigest()[:16]
    return cache / "keras_multigpu" / "records" / f"{key}.index.npz"


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


def begins_record(head: bytes) -> bool:
    """Whether some bytes are the head of a record."""
    return len(head) == HEAD and masked_crc(head[:8]) == int.from_bytes(head[8:], "little")


def masked_crc(content: bytes) -> int:
    """The checksum of some bytes in the form that TFRecord files store."""
    from google_crc32c import value

    crc: int = value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def require_crc() -> None:
    try:
        import google_crc32c  # noqa: F401
    except ImportError as error:
        raise error_of(
            ImportError,
            "The package google-crc32c is not installed.",
            "Expected it to verify the records of TFRecord files.",
            "Run `pip install google-crc32c`, or read them with `tf.data` and `from_dataset`.",
            package="google-crc32c",
        ) from error
