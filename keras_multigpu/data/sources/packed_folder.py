"""A folder of images in ArrayRecord files, as `keras-multigpu pack` writes them.

Each record is a file, byte by byte. The last record of a shard is a table in JSON: the paths and
sizes of its images, the names of all classes, and what tells the shards of one folder from others.
"""

import functools
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from keras_multigpu.checks import error_of, value_error
from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.sources.file_table import FileTable, digest_of
from keras_multigpu.data.sources.items import Items

ENDING = ".array_record"

# Raise it when the form of the table changes.
VERSION = 1


def import_array_record() -> ModuleType:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise error_of(
            ImportError,
            "The package array_record is not installed.",
            "Expected it for packed folders; there are wheels for Linux.",
            "Run `pip install array_record`, or use the folder itself.",
            package="array_record",
        ) from error
    return array_record_module


def shards_of(path: str) -> list[str]:
    """The file of a packed folder, or its shards; none if the path is something else."""
    if not path.endswith(ENDING) or os.path.isdir(path):
        return []
    parts = sorted(glob.glob(f"{glob.escape(path)}-?????-of-?????"))
    return [path, *parts] if os.path.isfile(path) else parts


def write_shard(path: Path, contents: Iterable[bytes], table: dict[str, Any]) -> None:
    """Write a shard; the file is not usable before this returns."""
    writer = import_array_record().ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    count = sum(writer.write(content) is None for content in contents)
    writer.write(json.dumps({"version": VERSION, **table}).encode())
    writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # A full disk raises no error.
    if open_reader(str(path)).num_records() != count + 1:
        raise error_of(
            OSError,
            "The shard could not be written whole.",
            "Expected a folder that can be written, with room for all images.",
            path=str(path),
        )


def open_reader(path: str) -> Any:
    options = "readahead_buffer_size:0,max_parallelism:0"
    return import_array_record().ArrayRecordReader(path, options)


def read_table(path: str, reader: Any = None) -> dict[str, Any]:
    """The table of a shard, which a reader may have open; a `ValueError` if it has none."""
    reader = open_reader(path) if reader is None else reader
    # The number is zero for a file that was cut off, or has another format.
    count = reader.num_records()
    try:
        table = json.loads(reader.read([count - 1])[0]) if count else {}
    except (ValueError, RuntimeError):
        table = {}
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise value_error(
            f"{os.path.basename(path)} is no packed folder, or it is damaged.",
            "Expected what `keras-multigpu pack` has written.",
            "Read other ArrayRecord files with `ArrayRecordDataSource` and `from_source`.",
            path=path,
        )
    return table


class PackedFolder(Items):
    """The images of a packed folder, and how they lay in it."""

    def __init__(self, path: str, shards: list[str]) -> None:
        self.name, self._readers = path, [open_reader(shard) for shard in shards]
        tables = [*map(read_table, shards, self._readers)]
        self.classes: list[str] = tables[0]["classes"]
        self._ends = np.cumsum([len(table["paths"]) for table in tables])
        # Their time is the version of the files in them, as a cache compares it.
        times = [os.stat(shard).st_mtime_ns for shard in shards]
        self.files = FileTable(
            (*os.path.split(f"{path}/{name}"), f"{size} {time}")
            for table, time in zip(tables, times, strict=True)
            for name, size in zip(table["paths"], table["sizes"], strict=True)
        )
        if len({table["listing"] for table in tables}) > 1 or len(self) != tables[0]["total"]:
            raise value_error(
                f"{path} has {len(self):,} of {tables[0]['total']:,} images, or those of several "
                "folders.",
                "Expected all shards of one folder.",
                "Run `keras-multigpu pack` again: it goes on where it stopped.",
                shards=len(shards),
            )

    def __str__(self) -> str:
        return self.name

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        """The content of an image file."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        number = index - int(self._ends[shard - 1] if shard else 0)
        try:
            content: bytes = self._readers[shard].read([number])[0]
        except RuntimeError as error:
            raise DamagedExample(f"its record is damaged: {str(error)[:100]}") from error
        return content

    def get(self, index: int) -> dict[str, Any]:
        """As `Items.get`: the content of a file with its path in the folder and its class."""
        label = int(self.labels([index])[0])
        return {"image": self.read(index), "path": self.path_in(index), "label": label}

    def labels(self, indices: Sequence[int] | None = None) -> np.ndarray:
        """The number of each image's class; -1 for one in no class."""
        numbers: dict[str | None, int] = {name: n for n, name in enumerate(self.classes)}
        indices = range(len(self)) if indices is None else indices
        return np.array([numbers.get(self.top_of(index), -1) for index in indices])

    def path_in(self, index: int) -> str:
        return self.files.path(index)[len(self.name) + 1 :]

    def top_of(self, index: int) -> str | None:
        """The subfolder of an image; None if it lies directly in the folder."""
        top, inside, _ = self.path_in(index).partition("/")
        return top if inside else None

    def item_name(self, index: int) -> str:
        return self.files.path(index)

    def identity(self, exact: bool) -> dict[str, Any]:
        return {"kind": "packed", "files": digest_of(self.files, exact)}

    def images_in(self, classes: Sequence[str] | None) -> tuple[FileTable, np.ndarray]:
        """As the function `images_in` for a folder."""
        if classes is None:
            return PackedTable(self, [*range(len(self))]), np.array([len(self)])
        places: dict[str | None, list[int]] = {name: [] for name in classes}
        for index in range(len(self)):
            places.setdefault(self.top_of(index), []).append(index)
        records = [index for name in classes for index in places[name]]
        return PackedTable(self, records), np.array([len(places[name]) for name in classes])


class PackedTable(FileTable):
    """Some files of a packed folder."""

    def __init__(self, folder: PackedFolder, records: list[int]) -> None:
        states = folder.files.states(records, exact=True)
        paths = map(folder.files.path, records)
        super().__init__((*os.path.split(path), s) for path, s in zip(paths, states, strict=True))
        self._folder, self._records = folder, np.array(records, np.int64)

    def contents(self, indices: np.ndarray) -> Iterator[Callable[[], bytes]]:
        for record in self._records[indices].tolist():
            yield functools.partial(self._folder.read, record)
