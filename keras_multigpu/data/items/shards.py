"""Finds shards of records, and stores an index beside each."""

import glob
import hashlib
import io
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
from keras_multigpu.data.files.image_files import FileTable, state_of
from keras_multigpu.data.items.items import Items
from keras_multigpu.data.items.shard import (
    BLOCK,
    HEAD,
    File,
    Shard,
    TarSamples,
    TFRecords,
    begins_record,
    size_in,
)
from keras_multigpu.writing import CAREFULLY, whole

# Raise it when the form of the index changes.
VERSION = 1

# How many bytes of a shard are compared, besides its size and time, to tell if an index fits.
BEGINNING = 4096

logger = logging.getLogger("keras_multigpu")


class Shards(Items):
    """The records of several shards, one shard after another."""

    def __init__(self, paths: list[str], index_dir: str | None, threads: int) -> None:
        self._paths = paths
        unwritten: list[OSError] = []
        with ThreadPoolExecutor(threads) as pool:
            made = pool.map(lambda path: open_shard(path, index_dir, unwritten), paths)
            self._shards = list(made)
        require_one_format(self._shards)
        if unwritten:
            logger.warning(
                "%s of %s indices could not be stored (%s), so each run makes them again. Pass "
                "`index_dir`, a folder that can be written.",
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
        table = FileTable(map(addresses.split, self._paths))
        return {"shards": state_of(table, exact)}


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
            "Expected a folder, a file, a pattern such as 'train-*.tar', or a list of these.",
            "Pass the place of the shards.",
            paths=paths,
        )
    found = [shard for path in given for shard in shards_at(os.path.expanduser(os.fspath(path)))]
    if not found:
        raise value_error(
            "There are no shards.",
            "Expected files whose names end in .tar or contain .tfrecord.",
            "Check the path, or pass the files themselves.",
            paths=paths,
        )
    twice = len(found) - len({absolute(path) for path in found})
    if twice:
        raise value_error(
            f"{twice} shards are named twice.",
            "Expected each once, since an epoch reads each example once.",
            "Check for patterns that overlap.",
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
    # Indices begin with a dot. Compressed shards are refused later.
    return not name.startswith(".") and (
        name.endswith((".tar", ".tar.gz", ".tgz")) or ".tfrecord" in name
    )


def require_one_format(shards: list[Shard]) -> None:
    kinds = {type(shard): os.path.basename(shard.path) for shard in shards if len(shard)}
    if len(kinds) > 1:
        raise value_error(
            "Some shards are TFRecord files and others tar archives.",
            "Expected one format: `example` gets bytes from the first and a dict from the second.",
            "Read them separately.",
            **{kind.__name__: name for kind, name in kinds.items()},
        )


def open_shard(path: str, index_dir: str | None, unwritten: list[OSError]) -> Shard:
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
            "Check the path.",
            path=path,
        ) from error
    digest = hashlib.sha256(beginning).hexdigest()[:32]
    about = json.dumps([VERSION, size, version, digest])
    place = index_path(path, index_dir)
    kind = detect_format(path, beginning)
    columns = load_index(place, about)
    if columns is None:
        columns = kind.index_of(file, size)
        try:
            store_index(place, {"about": np.array(about), **columns})
        except OSError as error:
            unwritten.append(error)
    return kind(path, columns)


def index_path(path: str, index_dir: str | None) -> str:
    folder, name = addresses.split(path)
    if index_dir is None:
        return os.path.join(folder, f".{name}.index.npz")
    # Shards in different folders may have the same name.
    key = hashlib.sha256(os.path.dirname(absolute(path)).encode(errors="surrogateescape"))
    return os.path.join(index_dir, f".{name}.{key.hexdigest()[:8]}.index.npz")


def store_index(place: str, columns: dict[str, Any]) -> None:
    content = io.BytesIO()
    np.savez(content, **columns)
    if is_address(place):
        addresses.write(place, content.getvalue())
        return
    with whole(Path(place)) as partial:
        partial.write_bytes(content.getvalue())


def load_index(place: str, about: str) -> dict[str, np.ndarray] | None:
    """The columns of a stored index; None if there is none, or it is outdated."""
    try:
        if is_address(place):
            content: Any = io.BytesIO(addresses.fetch(place))
        else:
            content = open(os.open(place, os.O_RDONLY | CAREFULLY), "rb")
        with content:
            index = dict(np.load(content, allow_pickle=False))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return index if str(index.pop("about", None)) == about else None


def detect_format(path: str, beginning: bytes) -> type[Shard]:
    name = os.path.basename(path)
    if not beginning or begins_record(beginning[:HEAD]):
        return TFRecords
    if beginning[:2] == b"\x1f\x8b":
        raise value_error(
            f"{name} is compressed.",
            "Expected shards in which each record can be read by itself.",
            "Decompress it with `gunzip`, or read it with `tf.data` and `from_dataset`.",
            path=path,
        )
    # An empty archive is a block of zeros.
    if size_in(beginning[:BLOCK]) is not None or beginning[:BLOCK] == bytes(BLOCK):
        return TarSamples
    raise value_error(
        f"{name} is neither a TFRecord file nor a tar archive, or its beginning is damaged.",
        "Expected shards of one of these formats.",
        "Repair it or leave it out.",
        path=path,
        begins=beginning[:16],
    )
