"""The format of a checkpoint: a tree of plain values and arrays as one file.

    checkpoint-000018.kmg          a ZIP archive without compression, as `numpy.savez` writes
      tree.json                    the format's number, and the tree; arrays stand in it by name
      model.weights.0.1.npy        an array
      ...

`numpy.load` opens it, and any program for ZIP archives. Each part has a CRC-32. There is no pickle
in it, so reading a file runs no code.
"""

import errno
import json
import re
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

# Nobody has files of format 1, which was never released.
NUMBER = 2
TREE = "tree.json"
PLAIN = (bool, int, float, str, type(None))
KIND = "kind"
"""The key of a JSON object that stands for something that JSON has no word for."""

BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,  # Among them are too deep a recursion, and features that no ZIP file here has.
    TypeError,
    ValueError,
)
"""What reading a file raises that is not as it was written."""


class Damaged(Exception):
    """A file that is not whole, or not as it was written."""


class OtherFormat(Exception):
    """A file of another format than this package knows."""


class Encoded:
    """A tree, ready to be written; later changes of its lists and dicts do not matter."""

    def __init__(self, tree: Any) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        described = self._described(tree, "the state")
        self._header = json.dumps({"format": NUMBER, "tree": described}).encode()

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + len(self._header)

    def write_to(self, file: BinaryIO) -> None:
        # Not compressed: for a MobileNet with Adam, 39 MB, that would save 8 % and take 2.5
        # seconds, where writing takes 0.1.
        archive = zipfile.ZipFile(file, "w")
        try:
            archive.writestr(TREE, self._header)
            for name, array in self.arrays.items():
                with archive.open(name, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            archive.close()
        finally:
            archive.fp = None  # After an error it would write its end when it is collected.

    def _described(self, value: Any, where: str) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return self._place(value, where)
        if isinstance(value, (list, tuple)):
            items = [self._described(item, f"{where}[{n}]") for n, item in enumerate(value)]
            return items if isinstance(value, list) else {KIND: "tuple", "items": items}
        if isinstance(value, dict):
            pairs = {key: self._described(item, f"{where}[{key!r}]") for key, item in value.items()}
            if all(type(key) is str for key in pairs) and KIND not in pairs:
                return pairs
            keys = [self._described(key, f"a key of {where}") for key in pairs]
            items = list(pairs.values())
            return {KIND: "dict", "keys": keys, "items": items}
        raise TypeError(f"{where} is a {type(value).__name__}")

    def _place(self, value: Any, where: str) -> dict[str, Any]:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names:
            raise TypeError(f"{where} is an array of {array.dtype}")
        words = re.findall("[A-Za-z0-9_]+", where.removeprefix("the state"))
        name = ".".join([*words, str(len(self.arrays)), "npy"])
        place = {KIND: "array" if isinstance(value, np.ndarray) else "scalar", "name": name}
        if array.dtype.kind == "V":
            # NumPy's files do not know types such as bfloat16.
            place["dtype"] = array.dtype.name
            array = array.view(f"u{array.itemsize}")
        self.arrays[name] = array
        return place


def decoded(file: BinaryIO) -> Any:
    """The tree in a file; raises `Damaged`, or `OtherFormat`."""
    size = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            if any(info.compress_type or info.file_size > size for info in archive.infolist()):
                raise Damaged("a part of it is longer than the file")
            header = json.loads(archive.read(TREE))
            if header["format"] != NUMBER:
                raise OtherFormat(f"it has format {header['format']}")
            return rebuilt(header["tree"], archive)
    except BROKEN as error:
        raise Damaged(f"{type(error).__name__}: {str(error)[:200]}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # A place before the file's beginning.
            raise
        raise Damaged("a part of it is outside of the file") from error


def rebuilt(described: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(described, list):
        return [rebuilt(item, archive) for item in described]
    if not isinstance(described, dict):
        return described
    kind = described.get(KIND)
    if kind is None:
        return {key: rebuilt(item, archive) for key, item in described.items()}
    if kind in ("array", "scalar"):
        array = read(archive, described["name"])
        array = array.view(described.get("dtype", array.dtype))
        return array if kind == "array" else array[()]
    items = rebuilt(described["items"], archive)
    if kind == "tuple":
        return tuple(items)
    return dict(zip(rebuilt(described["keys"], archive), items, strict=True))


def read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array; a `ValueError` if there is more or less of it than its shape says."""
    with archive.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        # The checksum is looked at when all is read.
        if member.read(1):
            raise ValueError(f"{name} is longer than its array")
    return array
