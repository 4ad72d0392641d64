"""One shard: a TFRecord file or a tar archive, read through an index of its records.

Making the index takes one pass over the headers of the records; their content is not read.
"""

import abc
import tarfile
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.items.checksums import masked_crc, masked_crcs
from keras_multigpu.data.pipeline.damage import DamagedExample

# In a TFRecord file, the head of a record is its length and the checksum of that. The record's own
# checksum follows it.
HEAD = 12
AROUND = HEAD + 4

# The unit of tar archives.
BLOCK = tarfile.BLOCKSIZE


class File(Protocol):
    """A file from which several threads can read parts."""

    def pread(self, size: int, start: int) -> bytes:
        """Bytes from an offset on; fewer where the file ends."""


class Shard(abc.ABC):
    """The records of one file.

    Args:
        columns: The index, made by `index_of`.
    """

    def __init__(self, path: str, columns: dict[str, np.ndarray]) -> None:
        self.path = path
        self.columns = columns

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, file: File, number: int) -> Any:
        """One record."""

    @abc.abstractmethod
    def name_of(self, number: int) -> str: ...

    @staticmethod
    @abc.abstractmethod
    def index_of(file: File, size: int) -> dict[str, np.ndarray]:
        """The columns of the index of a file."""


class TFRecords(Shard):
    """The records of a TFRecord file, as bytes."""

    def __len__(self) -> int:
        return len(self.columns["starts"]) - 1

    def name_of(self, number: int) -> str:
        return f"record {number} of {self.path}"

    def read(self, file: File, number: int) -> bytes:
        start, end = self.columns["starts"][number : number + 2].tolist()
        found = file.pread(end - start, start)
        if not begins_record(found[:HEAD]):
            after = end - start - HEAD
            raise DamagedExample(f"its length is damaged, so {after} bytes after it are lost")
        length = int.from_bytes(found[:8], "little")
        if len(found) != AROUND + length:
            raise DamagedExample("its shard ends within it, or has changed since it was indexed")
        content = found[HEAD:-4]
        if masked_crc(content) != int.from_bytes(found[-4:], "little"):
            raise DamagedExample("its checksum differs")
        return content

    @staticmethod
    def index_of(file: File, size: int) -> dict[str, np.ndarray]:
        """Where each record starts, and where the last one ends.

        The last record may be unreadable: cut off by the end of the file, or with a damaged length,
        so that all that follows it is lost.
        """
        starts, heads = [0], []
        while starts[-1] < size:
            heads.append(file.pread(HEAD, starts[-1]).ljust(HEAD, b"\0"))
            end = starts[-1] + AROUND + int.from_bytes(heads[-1][:8], "little")
            starts.append(min(end, size))
        rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, HEAD)
        given = np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
        wrong = np.flatnonzero(masked_crcs(rows[:, :8]) != given)
        if wrong.size:
            starts[wrong[0] + 1 :] = [size]
        return {"starts": np.array(starts, np.int64)}


class TarSamples(Shard):
    """The samples of a tar archive: adjacent files whose names are equal up to the first dot.

    By WebDataset's convention, a sample is a dict from the rest of each name to the file's content,
    with the sample's own name under `__key__`.
    """

    def __len__(self) -> int:
        return len(self.columns["firsts"]) - 1

    def name_of(self, number: int) -> str:
        return f"sample {number} ({self._key(number)}) of {self.path}"

    def _key(self, number: int) -> str:
        low, high = self.columns["key_ends"][number : number + 2].tolist()
        return self.columns["keys"][low:high].tobytes().decode(errors="surrogateescape")

    def read(self, file: File, number: int) -> dict[str, Any]:
        first, last = self.columns["firsts"][number : number + 2].tolist()
        if first == last:
            raise DamagedExample("its archive is damaged or cut off from here on")
        sample: dict[str, Any] = {"__key__": self._key(number)}
        offsets, sizes = (self.columns[name][first:last].tolist() for name in ("offsets", "sizes"))
        # The members of a sample are adjacent, each preceded by its header.
        start = offsets[0] - BLOCK
        found = file.pread(offsets[-1] + sizes[-1] - start, start)
        for offset, size, kind in zip(
            offsets, sizes, self.columns["kinds"][first:last].tolist(), strict=True
        ):
            low = offset - start
            if len(found) < low + size or size_in(found[low - BLOCK : low]) != size:
                raise DamagedExample("its archive ends within it, or has changed since")
            sample[str(self.columns["names"][kind])] = found[low : low + size]
        return sample

    @staticmethod
    def index_of(file: File, size: int) -> dict[str, np.ndarray]:
        keys: list[str] = []
        firsts: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        kinds: list[int] = []
        names: dict[str, int] = {}
        seen: set[str] = set()
        for member in members(file):
            if member is None:  # The rest is damaged: a sample without members.
                keys.append("?")
                firsts.append(len(offsets))
                break
            folder, slash, base = member.name.rpartition("/")
            stem, dot, ending = base.partition(".")
            if not stem or not dot:  # As in WebDataset.
                continue
            key, kind = folder + slash + stem, ending.lower()
            if not keys or keys[-1] != key:
                keys.append(key)
                firsts.append(len(offsets))
                seen = set()
            if kind in seen:
                raise value_error(
                    f"Two files of a tar archive have the name {member.name!r}.",
                    "Expected files of one sample to differ after the first dot.",
                    "Rename one: the part before the first dot is the sample's name.",
                    name=member.name,
                )
            seen.add(kind)
            offsets.append(member.offset_data)
            sizes.append(member.size)
            kinds.append(names.setdefault(kind, len(names)))
        encoded = [key.encode(errors="surrogateescape") for key in keys]
        return {
            "firsts": np.array([*firsts, len(offsets)], np.int64),
            "offsets": np.array(offsets, np.int64),
            "sizes": np.array(sizes, np.int64),
            "kinds": np.array(kinds, np.uint32),
            "names": np.array([*names], str),
            "keys": np.frombuffer(b"".join(encoded), np.uint8),
            "key_ends": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        }


def begins_record(head: bytes) -> bool:
    """Whether some bytes are the head of a record in a TFRecord file."""
    return len(head) == HEAD and masked_crc(head[:8]) == int.from_bytes(head[8:], "little")


class Reader:
    """A `File` in the form that `tarfile` reads."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._place = 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, size: int) -> bytes:
        found = self._file.pread(size, self._place)
        self._place += len(found)
        return found


def members(file: File) -> Iterator[tarfile.TarInfo | None]:
    """The regular files of a tar archive; None where damage begins."""
    reader: Any = Reader(file)
    try:
        archive = tarfile.open(fileobj=reader, mode="r:", encoding="utf-8")
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # A kB each.
            if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                yield member
    except tarfile.TarError:
        yield None
        return
    # `tarfile` stops silently at a damaged header. An intact archive ends with a block of zeros.
    if file.pread(BLOCK, archive.offset) != bytes(BLOCK):
        yield None


def size_in(header: bytes) -> int | None:
    """The size in a tar header; None if it is damaged."""
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size
    except tarfile.HeaderError:
        return None
