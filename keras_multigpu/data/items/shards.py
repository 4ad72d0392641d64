"""Shards of records: which they are, and the index that is stored beside each."""

import contextlib
import glob
import hashlib
import io
import json
import logging
import os
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
    is_header,
)
from keras_multigpu.writing import CAREFULLY, whole

# To be raised when the index changes its form.
VERSION = 1

BEGINNING = 4096
"""How many bytes of a shard the index remembers, besides its size and time."""

MOST_OPEN = 256
"""How many shards are kept open: systems allow a process 1,024 files. Others open for each read."""

logger = logging.getLogger("keras_multigpu")


class Shards(Items):
    """The records of some shards, one after another."""

    def __init__(self, paths: list[str], index_dir: str | None, threads: int) -> None:
        self._paths = paths
        unwritten: list[OSError] = []
        with ThreadPoolExecutor(threads) as pool:
            made = pool.map(lambda path: shard_of(path, index_dir, unwritten), paths)
            self._shards = list(made)
        require_one_format(self._shards)
        if unwritten:
            logger.warning(
                "%s of %s indices could not be stored (%s): each run makes them again. Pass "
                "`index_dir`, a folder that can be written.",
                len(unwritten),
                len(paths),
                unwritten[0],
            )
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        count = "1 shard" if len(paths) == 1 else f"{len(paths)} shards"
        self.name = os.path.basename(paths[0]) if len(paths) == 1 else count
        self._files: dict[int, File] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a record, and its number there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard - 1] if shard else 0)

    def get(self, index: int) -> Any:
        number, record = self._place(index)
        shard = self._shards[number]
        file = self._files.get(number)
        if file is None:
            file = file_at(shard.path)
            # One that another thread has opened at the same time is closed when it is done.
            if len(self._files) < MOST_OPEN:
                file = self._files.setdefault(number, file)
        return shard.read(file, record)

    def item_name(self, index: int) -> str:
        number, record = self._place(index)
        return self._shards[number].name_of(record)

    def identity(self, exact: bool) -> dict[str, Any]:
        table = FileTable(map(addresses.split, self._paths))
        return {"shards": state_of(table, exact)}


class OpenFile:
    """A file that is closed when nobody reads it any more."""

    def __init__(self, path: str) -> None:
        self._number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # It was never opened.
            os.close(self._number)

    def pread(self, size: int, start: int) -> bytes:
        parts = []
        # Linux reads at most 2 GiB at a time.
        while size > 0 and (part := os.pread(self._number, size, start)):
            parts.append(part)
            size, start = size - len(part), start + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def state(self) -> tuple[int, str]:
        """Its size, and a text that changes when it does."""
        status = os.fstat(self._number)
        return status.st_size, str(status.st_mtime_ns)


def file_at(path: str, whole: bool = False) -> Any:
    """A shard to read from; `whole`, to index it."""
    if not is_address(path):
        return OpenFile(path)
    return addresses.SequentialFile(path) if whole else RemoteFile(path)


def listed_shards(paths: Any) -> list[str]:
    """The shards that a path, a pattern, a folder or a list of these names, each once."""
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
            "Expected files whose names end in .tar or have .tfrecord in them.",
            "Check the path, or pass the files themselves.",
            paths=paths,
        )
    twice = len(found) - len({absolute(path) for path in found})
    if twice:
        raise value_error(
            f"{twice} shards are named twice.",
            "Expected each once, as each example comes once in an epoch.",
            "Check for patterns that overlap.",
            paths=paths,
        )
    return found


def shards_at(path: str) -> list[str]:
    if is_address(path):
        if glob.has_magic(path):
            return addresses.matching(path)
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
    # A dot in front is that of what is stored beside them; what is compressed is refused later.
    return not name.startswith(".") and (
        name.endswith((".tar", ".tar.gz", ".tgz")) or ".tfrecord" in name
    )


def require_one_format(shards: list[Shard]) -> None:
    kinds = {type(shard): os.path.basename(shard.path) for shard in shards if len(shard)}
    if len(kinds) > 1:
        raise value_error(
            "Some shards are TFRecord files and others tar archives.",
            "Expected shards of one format: `example` gets bytes of one and a dict of the other.",
            "Read them apart.",
            **{kind.__name__: name for kind, name in kinds.items()},
        )


def shard_of(path: str, index_dir: str | None, unwritten: list[OSError]) -> Shard:
    """A shard with its index, which is made unless there is one that still fits."""
    try:
        file = file_at(path, whole=True)
    except OSError as error:
        raise os_error(
            error,
            f"The shard {path} cannot be read: {error.strerror}.",
            "Expected a file, a folder or a pattern that finds some.",
            "Check the path.",
            path=path,
        ) from error
    (size, version), beginning = file.state(), file.pread(BEGINNING, 0)
    digest = hashlib.sha256(beginning).hexdigest()[:32]
    about = json.dumps([VERSION, size, version, digest])
    place = place_of_index(path, index_dir)
    kind = kind_of(path, beginning)
    columns = loaded(place, about)
    if columns is None:
        columns = kind.index_of(file, size)
        try:
            store(place, {"about": np.array(about), **columns})
        except OSError as error:
            unwritten.append(error)
    return kind(path, columns)


def place_of_index(path: str, index_dir: str | None) -> str:
    folder, name = addresses.split(path)
    if index_dir is None:
        return os.path.join(folder, f".{name}.index.npz")
    # Shards in other folders may have the same names.
    key = hashlib.sha256(os.path.dirname(absolute(path)).encode(errors="surrogateescape"))
    return os.path.join(index_dir, f".{name}.{key.hexdigest()[:8]}.index.npz")


def store(place: str, columns: dict[str, Any]) -> None:
    content = io.BytesIO()
    np.savez(content, **columns)
    if is_address(place):
        addresses.stored(place, content.getvalue())
        return
    with whole(Path(place)) as partial:
        partial.write_bytes(content.getvalue())


def loaded(place: str, about: str) -> dict[str, np.ndarray] | None:
    """The columns of an index; None if it is not there, or not that of the file as it is now."""
    try:
        if is_address(place):
            content: Any = io.BytesIO(addresses.fetched(place))
        else:
            content = open(os.open(place, os.O_RDONLY | CAREFULLY), "rb")
        with content:
            index = dict(np.load(content, allow_pickle=False))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return index if str(index.pop("about", None)) == about else None


def kind_of(path: str, beginning: bytes) -> type[Shard]:
    name = os.path.basename(path)
    if not beginning or begins_record(beginning[:HEAD]):
        return TFRecords
    if beginning[:2] == b"\x1f\x8b":
        raise value_error(
            f"{name} is compressed.",
            "Expected shards in which a record can be read without those before it.",
            "Decompress it with `gunzip`, or read it with `tf.data` and `from_dataset`.",
            path=path,
        )
    # An archive may hold nothing but its end.
    if is_header(beginning[:BLOCK]) or beginning[:BLOCK] == bytes(BLOCK):
        return TarSamples
    raise value_error(
        f"{name} is neither a TFRecord file nor a tar archive, or its beginning is damaged.",
        "Expected shards of one of these formats.",
        "Repair it or leave it out.",
        path=path,
        begins=beginning[:16],
    )
