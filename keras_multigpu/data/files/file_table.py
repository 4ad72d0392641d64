"""The paths of many files in little memory: about 32 bytes a file, and a million under 50 MB."""

import array
import os
from collections.abc import Iterable

# Names of files need not be valid Unicode, and paths in a list need not be names of files.
_ENCODING = "utf-8", "surrogatepass"


class FileTable:
    """A list of paths that keeps each folder once and all names in one piece of memory."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        # A list of a million Python strings would cost well over 100 MB, again in each process.
        self._names = Texts()
        self._folders = Texts()
        # Four bytes a file; eight say where its name ends, and the name takes the rest.
        self._folder_of = array.array("I")
        numbers: dict[str, int] = {}
        for folder, name in files:
            number = numbers.get(folder)
            if number is None:
                number = numbers[folder] = self._folders.add(folder)
            self._folder_of.append(number)
            self._names.add(name)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> str:
        return os.path.join(self._folders[self._folder_of[index]], self._names[index])

    def common_folder(self) -> str:
        """The innermost folder that all files are in; an empty text if there is none."""
        folders = [self._folders[number] for number in range(len(self._folders))]
        try:
            return os.path.commonpath(folders)
        except ValueError:  # No files at all, or some with an absolute path and some without.
            return ""


class Texts:
    """A list of short texts, one after another in one piece of memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array.array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} texts, and none has the number {index}.")
        return self._bytes[self._ends[index] : self._ends[index + 1]].decode(*_ENCODING)

    def add(self, text: str) -> int:
        """Append one text; returns its number."""
        self._bytes += text.encode(*_ENCODING)
        self._ends.append(len(self._bytes))
        return len(self._ends) - 2
