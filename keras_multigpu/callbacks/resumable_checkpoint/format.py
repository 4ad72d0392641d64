"""The format of a checkpoint: a tree of plain values and arrays in one file.

    checkpoint-000018.kmg          a ZIP archive without compression, as `numpy.savez` writes
      tree.json                    the format's number, and the tree, with arrays by name
      model.weights.0.1.npy        an array
      ...

`numpy.load` opens it, and any ZIP program. Each part has a CRC-32. Reading a file
runs no code, because it contains no pickle.
"""

import errno
import json
import re
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

# Format 1 was never released.
NUMBER = 2
TREE = "tree.json"
PLAIN = (bool, int, float, str, type(None))
KIND = "kind"
"""The key of a JSON object that represents something JSON has no type for."""

DEEPEST = 150
"""How deep lists and dicts may be nested, so that recursion ends."""

BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,  # Such as too deep a recursion, and features of ZIP files that are not used.
    TypeError,
    ValueError,
)
"""What reading a damaged file raises."""


class Damaged(Exception):
    """A file that is incomplete, or not as it was written."""


class OtherFormat(Exception):
    """A file of a format that this package does not know."""


class Encoded:
    """A tree, ready to be written; later changes of its lists and dicts have no effect."""

    def __init__(self, tree: Any) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        described = self._described(tree, "the state")
        self._header = json.dumps({"format": NUMBER, "tree": described}).encode()

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + len(self._header)

    def write_to(self, file: BinaryIO) -> None:
        # Not compressed: for a MobileNet with Adam, 39 MB, that would save 8 % and take 2.5
        # seconds instead of 0.1.
        archive = zipfile.ZipFile(file, "w")
        try:
            archive.writestr(TREE, self._header)
            for name, array in self.arrays.items():
                with archive.open(name, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            archive.close()
        finally:
            archive.fp = None  # After an error it would write its end when collected.

    def _described(self, value: Any, where: str, depth: int = 0) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return self._place(value, where)
        if depth > DEEPEST:
            raise TypeError(f"{where[:200]}... is nested deeper than {DEEPEST} lists and dicts")
        if isinstance(value, (list, tuple)):
            items = [
                self._described(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)
            ]
            return items if isinstance(value, list) else {KIND: "tuple", "items": items}
        if isinstance(value, dict):
            pairs = {
                key: self._described(item, f"{where}[{key!r}]", depth + 1)
                for key, item in value.items()
            }
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
            # NumPy's files do not support types such as bfloat16.
            place["dtype"] = array.dtype.name
            array = array.view(f"u{array.itemsize}")
        self.arrays[name] = array
        return place


def decoded(file: BinaryIO) -> Any:
    """The tree in a file; raises `Damaged`, or `OtherFormat`."""
    size = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            # All parts together, because several may share the same bytes.
            if any(part.compress_type for part in parts) or sum(p.file_size for p in parts) > size:
                raise Damaged("a part of it is longer than the file")
            header = json.loads(archive.read(TREE))
            if header["format"] != NUMBER:
                raise OtherFormat(f"it has format {header['format']}")
            return Rebuilding(archive).rebuilt(header["tree"])
    except BROKEN as error:
        raise Damaged(f"{type(error).__name__}: {str(error)[:200]}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # A position before the start of the file.
            raise
        raise Damaged("a part of it is outside the file") from error


class Rebuilding:
    """Rebuilds a tree from its description; each array of the archive is read once."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = {part.filename for part in archive.infolist()}

    def rebuilt(self, described: Any, depth: int = 0) -> Any:
        if depth > 2 * DEEPEST:  # Tuples, and dicts with other keys, take two levels.
            raise ValueError("it is too deep")
        if isinstance(described, list):
            return [self.rebuilt(item, depth + 1) for item in described]
        if not isinstance(described, dict):
            return described
        kind = described.get(KIND)
        if kind is None:
            return {key: self.rebuilt(item, depth + 1) for key, item in described.items()}
        if kind in ("array", "scalar"):
            array = self._array(described["name"], described.get("dtype"))
            return array if kind == "array" else array[()]
        items = self.rebuilt(described["items"], depth + 1)
        if kind == "tuple":
            return tuple(items)
        return dict(zip(self.rebuilt(described["keys"], depth + 1), items, strict=True))

    def _array(self, name: str, dtype: str | None) -> np.ndarray:
        # Reading one again for each place that names it could take any amount of memory.
        self._names.remove(name)
        with self._archive.open(name) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            # The checksum is verified once everything is read.
            if member.read(1):
                raise ValueError(f"{name} is longer than its array")
        if dtype is None:
            return array
        kind = np.dtype(str(dtype))
        if kind.kind != "V" or kind.type is np.void:
            raise ValueError(f"{name} is to be of type {dtype}")
        return array.view(kind)
