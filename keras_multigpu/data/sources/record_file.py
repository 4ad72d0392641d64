"""One shard: a TFRecord file, read through an index of its records.

Making the index takes one pass over the heads of the records; their content is not read.
"""

from typing import Protocol

import numpy as np

from keras_multigpu.checks import error_of
from keras_multigpu.data.pipeline.damage import DamagedExample

# The head of a record is its length and the checksum of that. The record's own checksum follows it.
HEAD = 12
AROUND = HEAD + 4


class File(Protocol):
    """A file from which several threads can read parts."""

    def pread(self, size: int, start: int) -> bytes:
        """Bytes from an offset on; fewer where the file ends."""


class Shard:
    """The records of a TFRecord file, as bytes.

    Args:
        path: The file.
        starts: Its index, made by `index_of`.
    """

    def __init__(self, path: str, starts: np.ndarray) -> None:
        self.path = path
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name_of(self, number: int) -> str:
        return f"record {number} of {self.path}"

    def read(self, file: File, number: int) -> bytes:
        """One record."""
        start, end = self.starts[number : number + 2].tolist()
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


def index_of(file: File, size: int) -> np.ndarray:
    """Where each record starts, and where the last one ends.

    The last record may be unreadable: cut off by the end of the file, or with a damaged length, so
    that all that follows it is lost.
    """
    starts = [0]
    while starts[-1] < size:
        head = file.pread(HEAD, starts[-1])
        end = starts[-1] + AROUND + int.from_bytes(head[:8], "little")
        starts.append(min(end, size) if begins_record(head) else size)
    return np.array(starts, np.int64)


def begins_record(head: bytes) -> bool:
    """Whether some bytes are the head of a record in a TFRecord file."""
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
