"""One shard: a TFRecord file or a tar archive, whose records are found through an index.

The index is made in one pass over the heads of the records, of which nothing else is read.
"""

import abc
import tarfile
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.items.checksums import masked_crc, masked_crcs
from keras_multigpu.data.pipeline.damage import DamagedExample

# In a TFRecord file a record has its length and the checksum of that before it, and its own
# checksum behind it.
HEAD = 12
AROUND = HEAD + 4

# The unit of tar archives.
BLOCK = 512


class File(Protocol):
    """What can be read in parts, by several threads."""

    def pread(self, size: int, start: int) -> bytes:
        """Bytes from a place on; less where the file ends."""


class Shard(abc.ABC):
    """The records of one file.

    Args:
        columns: The index, as `index_of` has made it.
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

        The last may be one that cannot be read: where a file ends within a record, or the length of
        one is damaged, which is also that of all that follows.
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
    """The samples of a tar archive: neighbouring files whose names are equal up to the first dot.

    Each is a dict from what follows the dot to the content of the file, and has its own name under
    `__key__`: the convention of WebDataset.
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
        # The members of a sample are neighbours, each with its header before it.
        start = offsets[0] - BLOCK
        found = file.pread(offsets[-1] + sizes[-1] - start, start)
        for offset, size, kind in zip(
            offsets, sizes, self.columns["kinds"][first:last].tolist(), strict=True
        ):
            low = offset - start
            header = found[low - BLOCK : low]
            if len(found) < low + size or not is_header(header) or size_in(header) != size:
                raise DamagedExample("its archive ends within it, or has changed since")
            sample[str(self.columns["names"][kind])] = found[low : low + size]
        return sample

    @staticmethod
    def index_of(file: File, size: int) -> dict[str, np.ndarray]:
        keys: list[bytes] = []
        firsts: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        kinds: list[int] = []
        names: dict[str, int] = {}
        of_sample: set[str] = set()
        for name, offset, length in members(file):
            if name is None:  # What follows is damaged: a sample without members.
                keys.append(b"?")
                firsts.append(len(offsets))
                break
            folder, _, base = name.rpartition(b"/")
            stem, dot, ending = base.partition(b".")
            if not stem or not dot:  # As WebDataset does.
                continue
            key = folder + b"/" + stem if folder else stem
            kind = ending.decode(errors="replace").lower()
            if not keys or keys[-1] != key:
                keys.append(key)
                firsts.append(len(offsets))
                of_sample = set()
            if kind in of_sample:
                raise value_error(
                    f"Two files of a tar archive have the name {name.decode(errors='replace')!r}.",
                    "Expected files of one sample to differ behind the first dot.",
                    "Rename one: what precedes the first dot is the sample's name.",
                    name=name,
                )
            of_sample.add(kind)
            offsets.append(offset)
            sizes.append(length)
            kinds.append(names.setdefault(kind, len(names)))
        return {
            "firsts": np.array([*firsts, len(offsets)], np.int64),
            "offsets": np.array(offsets, np.int64),
            "sizes": np.array(sizes, np.int64),
            "kinds": np.array(kinds, np.uint32),
            "names": np.array([*names], str),
            "keys": np.frombuffer(b"".join(keys), np.uint8),
            "key_ends": np.cumsum([0, *map(len, keys)], dtype=np.int64),
        }


def begins_record(head: bytes) -> bool:
    """Whether some bytes are the head of a record in a TFRecord file."""
    return len(head) == HEAD and masked_crc(head[:8]) == int.from_bytes(head[8:], "little")


def members(file: File) -> Iterator[tuple[bytes | None, int, int]]:
    """Name, place and size of each file in a tar archive; None as name where damage begins.

    An archive ends with a block of zeros, and one that does not was cut off.
    """
    # `tarfile` takes several times as long, as it makes an object of each header.
    start, long_name = 0, None
    while True:
        header = file.pread(BLOCK, start)
        if not header.strip(b"\0") and len(header) == BLOCK:
            return
        if not is_header(header):
            yield None, start, 0
            return
        length, kind = size_in(header), header[156:157]
        if kind == b"L":  # GNU's long names.
            long_name = file.pread(length, start + BLOCK).rstrip(b"\0")
        elif kind == b"x":  # Those of POSIX.
            try:
                long_name = path_in(file.pread(length, start + BLOCK)) or long_name
            except ValueError:
                yield None, start, 0
                return
        elif kind in b"0\0":
            yield long_name or name_in(header), start + BLOCK, length
        if kind not in b"Lxg":
            long_name = None
        start += BLOCK + -(-length // BLOCK) * BLOCK


def is_header(header: bytes) -> bool:
    """Whether a block is a header: it has a checksum, in which its own place counts as blanks."""
    if len(header) < BLOCK:
        return False
    try:
        given = tarfile.nti(header[148:156])  # type: ignore[attr-defined]
    except tarfile.TarError:
        return False
    return sum(header) - sum(header[148:156]) + 8 * 32 == given


def size_in(header: bytes) -> int:
    return tarfile.nti(header[124:136])  # type: ignore[attr-defined]


def name_in(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    # GNU has other things at that place.
    return prefix + b"/" + name if header[257:263] == b"ustar\0" and prefix else name


def path_in(records: bytes) -> bytes | None:
    """The path in a header of POSIX, whose records are `LENGTH NAME=VALUE` and a new line."""
    found = None
    while records:
        length = int(records.split(b" ", 1)[0])
        if not 0 < length <= len(records):
            raise ValueError(records)
        name, _, value = records[:length].split(b" ", 1)[1].partition(b"=")
        found = value.rstrip(b"\n") if name == b"path" else found
        records = records[length:]
    return found
