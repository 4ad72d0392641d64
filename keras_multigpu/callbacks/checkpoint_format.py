"""The format of a checkpoint: a tree of plain values and arrays as the bytes of one file.

    keras_multigpu checkpoint 1       the format's name and number, a line
    length of the header              eight bytes
    header                            JSON: the tree, in which an array is the number of its place
    arrays                            one after another, each from a multiple of 64 bytes on
    SHA-256                           of all bytes before it; whatever the number, it stands here

There is no pickle in it, so reading a file runs no code.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAME = b"keras_multigpu checkpoint "
NUMBER = 1
ALIGNMENT = 64
DIGEST = hashlib.sha256().digest_size
PLAIN = (bool, int, float, str, type(None))
KIND = "kind"
"""The key of a JSON object that stands for something that JSON has no word for."""


class Damaged(Exception):
    """A file that is not whole, or not as it was written."""


class Newer(Exception):
    """A file of a later format than this package knows."""


class Encoded:
    """A tree, ready to be written; later changes of its lists and dicts do not matter.

    Args:
        tree: Dicts, lists, tuples, arrays and plain values.
    """

    def __init__(self, tree: Any) -> None:
        self.arrays: list[np.ndarray] = []
        self._places: list[dict[str, Any]] = []
        self._size = 0
        described = self._described(tree, "the state")
        header = {"tree": described, "arrays": self._places}
        self._header = json.dumps(header).encode()

    @property
    def num_bytes(self) -> int:
        """About how long the file is."""
        return self._size + len(self._header)

    def parts(self) -> Iterator[bytes | memoryview]:
        """The file, in parts."""
        digest = hashlib.sha256()
        for part in self._body():
            digest.update(part)
            yield part
        yield digest.digest()

    def _body(self) -> Iterator[bytes | memoryview]:
        first = NAME + b"%d\n" % NUMBER
        header = first + len(self._header).to_bytes(8, "little") + self._header
        yield header + padding(len(header))
        for array in self.arrays:
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            yield content.data
            yield padding(content.nbytes)

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
        self._places.append({"offset": self._size, "shape": array.shape, "dtype": name_of(array)})
        self._size += array.nbytes + len(padding(array.nbytes))
        self.arrays.append(array)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {KIND: kind, "place": len(self._places) - 1}


def decoded(path: Path) -> Any:
    """The tree in a file.

    Raises:
        Damaged: The file is not as it was written.
        Newer: Its format is later than this one.
    """
    content = path.read_bytes()
    body, digest = memoryview(content)[:-DIGEST], content[-DIGEST:]
    line, _, _ = content[:64].partition(b"\n")
    if not line.startswith(NAME):
        raise Damaged("it does not begin as a checkpoint does")
    if hashlib.sha256(body).digest() != digest:
        raise Damaged("its checksum is not that of its content")
    number = int(line[len(NAME) :])
    if number > NUMBER:
        raise Newer(f"it has format {number}")
    start = len(line) + 9
    end = start + int.from_bytes(body[start - 8 : start], "little")
    header = json.loads(bytes(body[start:end]))
    first = end + len(padding(end))
    return rebuilt(header["tree"], [read(body, place, first) for place in header["arrays"]])


def read(body: memoryview, place: dict[str, Any], first: int) -> np.ndarray:
    """One array, without copying it."""
    dtype = np.dtype(place["dtype"])
    count = int(np.prod(place["shape"], dtype=np.int64))
    offset = first + place["offset"]
    content = np.frombuffer(body, np.uint8, count * dtype.itemsize, offset if count else 0)
    return content.view(dtype).reshape(place["shape"])


def rebuilt(described: Any, arrays: list[np.ndarray]) -> Any:
    """The tree that a header describes."""
    if isinstance(described, list):
        return [rebuilt(item, arrays) for item in described]
    if not isinstance(described, dict):
        return described
    kind = described.get(KIND)
    if kind is None:
        return {key: rebuilt(item, arrays) for key, item in described.items()}
    if kind in ("array", "scalar"):
        array = arrays[described["place"]]
        return array if kind == "array" else array[()]
    items = rebuilt(described["items"], arrays)
    if kind == "tuple":
        return tuple(items)
    return dict(zip(rebuilt(described["keys"], arrays), items, strict=True))


def name_of(array: np.ndarray) -> str:
    """The name under which NumPy finds a type again; types such as bfloat16 have only a name."""
    return array.dtype.name if array.dtype.kind == "V" else array.dtype.str


def padding(size: int) -> bytes:
    """Zeros up to the next multiple of 64 bytes."""
    return bytes(-size % ALIGNMENT)
