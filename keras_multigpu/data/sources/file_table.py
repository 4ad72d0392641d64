"""Paths in compact form: about 32 bytes a file, less than 50 MB for a million."""

import array
import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import FETCHED_AT_ONCE, is_address, state_at
from keras_multigpu.data.decoding.decoder import read_file
from keras_multigpu.data.pipeline.damage import is_of_machine, unread
from keras_multigpu.data.pipeline.loader import submit

# An identity includes the sizes of at most this many files. A slow disk takes 0.1 ms for each.
MOST_SIZES = 10_000

# File names need not be valid Unicode, and paths in a list need not be possible file names.
_ENCODING = "utf-8", "surrogatepass"

FETCHING = ThreadPoolExecutor(FETCHED_AT_ONCE, thread_name_prefix="keras_multigpu_fetch")


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

    def contents(self, indices: np.ndarray) -> Iterator[Callable[[], bytes]]:
        """A call for each file that returns its content; threads fetch remote ones in advance."""
        calls: deque[Callable[[], bytes]] = deque()
        for path in map(self.path, indices.tolist()):
            if is_address(path):
                calls.append(submit(FETCHING, read_file, path).result)
            else:
                calls.append(functools.partial(read_file, path))
            if len(calls) > FETCHED_AT_ONCE:
                yield calls.popleft()
        yield from calls

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

    def states(self, indices: Sequence[int], exact: bool) -> Iterator[str]:
        """The size of each file; if `exact`, also a text that changes with its content."""
        paths = map(self.path, indices)
        states: Iterator[str]
        if self._states:
            states = map(self._states.__getitem__, indices)
        elif any(map(is_address, self._all_folders())):
            states = FETCHING.map(state_of_file, paths)
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


def digest_of(files: FileTable, exact: bool) -> str:
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
