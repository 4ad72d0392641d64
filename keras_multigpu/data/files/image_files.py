"""Image files with their targets, as a source.

Paths take little memory: about 32 bytes a file, less than 50 MB for a million.
"""

import abc
import array
import copy
import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import require_choice, value_error
from keras_multigpu.data.addresses import AT_ONCE, is_address, state_at
from keras_multigpu.data.decoding.decoder import ImageDecoder, read_file
from keras_multigpu.data.pipeline.damage import Damaged, is_of_machine, unread
from keras_multigpu.data.pipeline.loader import submit
from keras_multigpu.data.pipeline.source import Source, read_rows
from keras_multigpu.identities import identify_array

# An identity includes the sizes of at most this many files. A slow disk takes 0.1 ms for each.
MOST_SIZES = 10_000

LABEL_MODES = ("int", "categorical", "binary", None)

# File names need not be valid Unicode, and paths in a list need not be possible file names.
_ENCODING = "utf-8", "surrogatepass"

_FETCHING = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="keras_multigpu_fetch")


class FileTable:
    """Paths in compact form: each folder is stored once, and all names in one block of memory.

    Args:
        files: The folder and name of each file, and for a remote file its state if it is known.
    """

    def __init__(self, files: Iterable[Sequence[str]] = ()) -> None:
        # A list of a million Python strings would take well over 100 MB in each process.
        self._names = Texts()
        self._folders = Texts()
        # Four bytes a file. Eight more say where its name ends; the name takes the rest.
        self._folder_of = array.array("I")
        self._states = Texts()
        numbers: dict[str, int] = {}
        for folder, name, *state in files:
            number = numbers.get(folder)
            if number is None:
                number = numbers[folder] = self._folders.add(folder)
            self._folder_of.append(number)
            self._names.add(name)
            if any(state):
                self._states.add(*state)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> str:
        return os.path.join(self._folders[self._folder_of[index]], self._names[index])

    def common_folder(self) -> str:
        """The innermost folder that contains all files; an empty text if there is none."""
        folders = self._all_folders()
        if folders and is_address(folders[0]):  # In an address every slash counts.
            parts = os.path.commonprefix([folder.split("/") for folder in folders])
            return "/".join(parts).removesuffix("/")
        try:
            return os.path.commonpath(folders)
        except ValueError:  # No files, or both absolute and relative paths.
            return ""

    def _all_folders(self) -> list[str]:
        return [self._folders[number] for number in range(len(self._folders))]

    def states(self, indices: range, exact: bool) -> Iterator[str]:
        """The size of each file; if `exact`, also a text that changes with its content."""
        paths = map(self.path, indices)
        states: Iterator[str]
        if self._states:
            states = map(self._states.__getitem__, indices)
        elif any(map(is_address, self._all_folders())):
            states = _FETCHING.map(state_of_file, paths)
        else:
            states = map(state_of_file, paths)
        for index, state in zip(indices, states, strict=True):
            size, _, version = state.partition(" ")
            if exact and not version and size != "missing":
                raise value_error(
                    "A cache folder cannot tell whether a file has changed.",
                    "Expected a storage that gives files a time or an ETag.",
                    'Pass cache="memory", or copy the files to a disk.',
                    file=self.path(index),
                )
            yield state if exact else size


class Texts:
    """A list of short texts in one block of memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array.array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return self._bytes[self._ends[index] : self._ends[index + 1]].decode(*_ENCODING)

    def add(self, text: str) -> int:
        self._bytes += text.encode(*_ENCODING)
        self._ends.append(len(self._bytes))
        return len(self._ends) - 2


class Targets(abc.ABC):
    """The targets of image files; the attributes are those of a `Source`, for targets alone."""

    spec: tf.TensorSpec
    labels: np.ndarray | None = None
    class_names: list[str] | None = None

    @abc.abstractmethod
    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        """Fill `out` with the targets of some examples; returns the same as `Source.read`."""

    def still(self) -> "Targets":
        """The same targets without random draws, for evaluation."""
        return self

    @abc.abstractmethod
    def identity(self, exact: bool = False) -> dict[str, Any]:
        """As `Source.identity`."""


class ClassTargets(Targets):
    """One class for each example, in Keras's form for each `label_mode`."""

    def __init__(
        self, labels: np.ndarray, label_mode: str, class_names: list[str] | None = None
    ) -> None:
        require_choice("label_mode", label_mode, LABEL_MODES)
        self.labels = np.asarray(labels, np.int32)
        self.class_names = class_names
        self._mode = label_mode
        self._classes = len(class_names) if class_names else int(self.labels.max(initial=-1)) + 1
        if label_mode == "binary" and self._classes != 2:
            raise value_error(
                f"There are {self._classes} classes.",
                'Expected exactly two for label_mode="binary".',
                'Choose two with `class_names`, or pass label_mode="int".',
                class_names=class_names,
            )
        shapes = {"int": (), "categorical": (self._classes,), "binary": (1,)}
        self.spec = tf.TensorSpec(
            shapes[label_mode], tf.int32 if label_mode == "int" else tf.float32
        )

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        assert self.labels is not None
        labels = self.labels[indices]
        if self._mode == "categorical":
            out[...] = 0
            out[np.arange(len(labels)), labels] = 1
        else:
            out[...] = labels.reshape(out.shape)
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        labels = identify_array(self.labels, whole=exact)
        return {"mode": self._mode, "classes": self._classes, "labels": labels}


class ValueTargets(Targets):
    """An array of numbers for each example: several labels, or regression targets."""

    def __init__(
        self,
        values: np.ndarray,
        class_names: list[str] | None = None,
        labels: np.ndarray | None = None,
    ) -> None:
        self._values = values
        self.class_names = class_names
        self.spec = tf.TensorSpec(values.shape[1:], values.dtype)
        self.labels = labels

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        out[...] = self._values[indices]
        return []

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {"values": identify_array(self._values, whole=exact)}


class ImageFiles(Source):
    """Image files, decoded to `uint8` arrays of one size, with their targets."""

    def __init__(
        self,
        files: FileTable,
        decoder: ImageDecoder,
        targets: Targets | None = None,
        weights: np.ndarray | None = None,
        *,
        name: str,
    ) -> None:
        if weights is not None and targets is not None:
            # Keras multiplies weights only if they have as many axes as an example's loss.
            axes = [1] * max(len(targets.spec.shape) - 1, 0)
            weights = weights.reshape(-1, *axes)
        self.name = name
        self.num_examples = len(files)
        self.draws = decoder.draws
        self.has_files = True
        self.spec = (
            tf.TensorSpec(decoder.shape, tf.uint8),
            None if targets is None else targets.spec,
            None if weights is None else tf.TensorSpec(weights.shape[1:], tf.float32),
        )
        if targets is not None:
            self.labels = targets.labels
            self.class_names = targets.class_names
        self._files = files
        self.decoder = decoder
        self.targets = targets
        self._weights = weights

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        rest = iter(out)
        images = next(rest)
        contents = read_ahead([self._files.path(index) for index in indices.tolist()])

        def read(row: int) -> None:
            images[row] = self.decoder.decode(next(contents)(), seeds[row])

        damaged = read_rows(len(indices), read)
        if self.targets is not None:
            known = {row for row, _ in damaged}
            causes = self.targets.read(next(rest), indices, seeds)
            damaged += [(row, cause) for row, cause in causes if row not in known]
        if self._weights is not None:
            next(rest)[...] = self._weights[indices]
        return damaged

    def still(self) -> Source:
        if not self.draws:
            return self
        still = copy.copy(self)
        still.draws, still.decoder = False, self.decoder.still()
        still.targets = None if self.targets is None else self.targets.still()
        return still

    def example_name(self, index: int) -> str:
        return self._files.path(index)

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {
            "files": state_of(self._files, exact),
            "images": self.decoder.settings,
            "targets": None if self.targets is None else self.targets.identity(exact),
            "weights": identify_array(self._weights),
        }


def read_ahead(paths: list[str]) -> Iterator[Callable[[], bytes]]:
    """A call for each file that returns its content; threads fetch remote files in advance."""
    calls: deque[Callable[[], bytes]] = deque()
    for path in paths:
        if is_address(path):
            calls.append(submit(_FETCHING, read_file, path).result)
        else:
            calls.append(functools.partial(read_file, path))
        if len(calls) > AT_ONCE:
            yield calls.popleft()
    yield from calls


def state_of(files: FileTable, exact: bool) -> str:
    """A digest of file names and of the sizes of some files.

    If `exact`, it covers the folder, and size and modification time of every file.
    """
    content = hashlib.sha256()
    # A folder that was moved as a whole has the same data, but its cache is rebuilt.
    top = "" if exact else files.common_folder()
    step = 1 if exact else max(len(files) // MOST_SIZES, 1)
    states = files.states(range(0, len(files), step), exact)
    for index in range(len(files)):
        path = files.path(index)
        known = next(states) if index % step == 0 else ""
        content.update(f"{path[len(top) :]}\0{known}\0".encode(errors="surrogatepass"))
    return content.hexdigest()[:32]


def state_of_file(path: str) -> str:
    """Size and version of a file, or "missing"."""
    if is_address(path):
        return state_at(path)
    try:
        state = os.stat(path)
    except (OSError, ValueError) as error:  # `ValueError` for impossible paths.
        if is_of_machine(error):
            raise unread(path, error) from error
        return "missing"
    return f"{state.st_size} {state.st_mtime_ns}"
