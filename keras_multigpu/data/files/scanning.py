"""Finds the images in folders, in the order in which Keras finds them."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import Entry, entries, is_address
from keras_multigpu.data.files.image_files import FileTable

KINDS = {
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".webp": "WebP",
}
"""The files that count as images, in upper or lower case. Keras ignores `.webp`."""

EXTENSIONS = tuple(KINDS)

# For disks that are waited for, such as those of a network. On a local one 48,000 files in 16
# folders are found in 0.05 s, by one thread as by many.
_THREADS = 32
# No file name holds a slash or a zero byte. The latter is before its state, if a listing gives one,
# and comes before all letters in order.
_SEPARATOR = "/"
_BEFORE_STATE = "\0"


class Found(NamedTuple):
    """The images of a folder, and how many each class folder has (in all, without classes)."""

    files: FileTable
    counts: np.ndarray


def class_folders(path: str) -> list[str]:
    """The names of the subfolders that make classes: all but hidden ones, sorted."""
    return sorted(
        entry.name
        for entry in readable_entries(path)
        if entry.is_dir() and not entry.name.startswith(".")
    )


def images_in(path: str, classes: Sequence[str] | None, follow_links: bool) -> Found:
    """All images in these class folders, or in the whole folder, in Keras's order.

    Class by class, folders sorted within a class, names sorted within a folder.
    """
    tops = [path] if classes is None else [os.path.join(path, name) for name in classes]
    counts = np.zeros(len(tops), np.int64)
    # No address is a link.
    follow_links = follow_links and not is_address(path)

    def files() -> Iterator[tuple[str, str, str]]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="keras_multigpu_scan") as threads:
            scans = threads.map(lambda top: sorted_images(top, follow_links), tops)
            for number, folders in enumerate(scans):
                # Each list of names is freed as soon as it is in the table.
                folders.reverse()
                while folders:
                    folder, joined = folders.pop()
                    names = joined.split(_SEPARATOR)
                    counts[number] += len(names)
                    for name in names:
                        name, _, state = name.partition(_BEFORE_STATE)
                        yield folder, name, state

    table = FileTable(files())
    return Found(table, counts)


def sorted_images(top: str, follow_links: bool) -> list[tuple[str, str]]:
    """`(folder, joined names)` of each folder with images below `top` (or a link to it), sorted."""
    # Joined names take a quarter of the memory of a list of them.
    return sorted(
        (folder, _SEPARATOR.join(sorted(images)))
        for folder, images in walk(top, follow_links, frozenset())
        if images
    )


def walk(
    folder: str, follow_links: bool, ancestors: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, list[str]]]:
    """Each folder and the names of the images in it.

    Unlike `os.walk` it ends where a link leads back to one of its parent folders, and it does
    not pass over a folder that cannot be read.
    """
    if follow_links:
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in ancestors:
            return
        ancestors = ancestors | {(state.st_dev, state.st_ino)}
    images, folders = [], []
    for entry in readable_entries(folder):
        if is_folder(entry):
            if follow_links or not entry.is_symlink():
                folders.append(entry.name)
        elif entry.name.lower().endswith(EXTENSIONS):
            known = _BEFORE_STATE + entry.state if isinstance(entry, Entry) else ""
            images.append(entry.name + known)
    yield folder, images
    for name in folders:
        yield from walk(os.path.join(folder, name), follow_links, ancestors)


def readable_entries(folder: str) -> Iterator[os.DirEntry[str] | Entry]:
    """What lies in a folder; an error that names the folder if it cannot be read."""
    if is_address(folder):
        yield from entries(folder)
        return
    try:
        with os.scandir(folder) as found:
            yield from found
    except OSError as error:
        raise value_error(
            f"A folder cannot be read: {error.strerror}.",
            "Expected to read every folder: no image is left out silently.",
            "Give this user the right to read it, or move it away.",
            folder=folder,
        ) from error


def is_folder(entry: os.DirEntry[str] | Entry) -> bool:
    """Whether an entry is a folder, or a link to one; a broken link is not one."""
    try:
        return entry.is_dir()
    except OSError:
        return False
