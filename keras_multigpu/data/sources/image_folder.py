"""The images of a folder with their labels, as a source."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_multigpu.checks import require_choice, shorten, value_error, warn
from keras_multigpu.data.addresses import Entry, entries, is_address
from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.decoding.formats import EXTENSIONS
from keras_multigpu.data.pipeline.damage import is_of_machine, unread
from keras_multigpu.data.sources.file_table import FileTable
from keras_multigpu.data.sources.image_files import ImageFiles
from keras_multigpu.data.sources.labelling import class_targets
from keras_multigpu.data.sources.packed_folder import PackedFolder, shards_of
from keras_multigpu.data.sources.targets import LABEL_MODES, ArrayTargets, of_classes

# Many threads help with slow disks, such as network drives. On a local disk, one thread finds
# 48,000 files in 16 folders as fast as many do, in 0.05 s.
_THREADS = 32

Folder = str | PackedFolder


def image_folder(
    path: str,
    labels: Any,
    label_mode: str | None,
    class_names: Sequence[str] | None,
    decoder: ImageDecoder,
) -> ImageFiles:
    shards = [] if is_address(path) else shards_of(path)
    folder: Folder = PackedFolder(path, shards) if shards else path
    if not shards:
        require_folder(path)
    require_choice("label_mode", label_mode, LABEL_MODES)
    if isinstance(labels, str):
        require_choice("labels", labels, ("inferred",))
    if label_mode is None:
        labels = None
    inferred = isinstance(labels, str)
    if class_names is not None and not inferred:
        raise value_error(
            "`class_names` was given, but the subfolders are not used as classes.",
            'Expected it only with labels="inferred" and a `label_mode`.',
            class_names=class_names,
            labels="a list" if labels is not None else None,
        )
    classes = choose_classes(folder, class_names) if inferred else None
    files, counts = images_in(folder, classes)
    if not len(files):
        raise no_images(folder, classes)
    targets = None
    if label_mode is not None and classes is not None:
        warn_of_unused_images(folder)
        warn_of_empty_classes(path, classes, counts)
        numbers = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
        targets = of_classes(numbers, label_mode, classes)
    elif label_mode is not None and labels is not None:
        targets = given_classes(labels, label_mode, len(files), path)
    height, width, _ = decoder.shape
    return ImageFiles(files, decoder, targets, name=f"{path}, {height}x{width}")


def choose_classes(path: Folder, class_names: Sequence[str] | None) -> list[str]:
    folders = class_folders(path)
    if class_names is None:
        if not folders:
            raise no_images(path, folders)
        return folders
    chosen = [str(name) for name in class_names]
    unknown = sorted(set(chosen) - set(folders))
    if not chosen or unknown or len(set(chosen)) < len(chosen):
        shown = ", ".join(map(repr, folders[:20])) + " ..." * (len(folders) > 20)
        raise value_error(
            f"`class_names` names no subfolders of the folder: {unknown}."
            if unknown
            else "`class_names` is empty, or has a name twice.",
            f"Expected some of its {len(folders)} subfolders, each once: {shown}.",
            class_names=class_names,
            path=str(path),
        )
    return chosen


def given_classes(labels: Any, label_mode: str, count: int, path: str) -> ArrayTargets:
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or len(numbers) != count:
        raise value_error(
            f"`labels` has {len(numbers) if numbers.ndim else 'no'} entries, "
            f"and there are {count} images.",
            "Expected one integer for each image, sorted by folder and then by name.",
            "Leave it out to use the subfolders as classes. An image size is passed by name: "
            "image_size=(224, 224).",
            labels=shorten(labels, 100),
            path=path,
        )
    targets = class_targets(numbers, label_mode, None)
    targets.class_names = [str(number) for number in range(int(numbers.max()) + 1)]
    return targets


def require_folder(path: str) -> None:
    if is_address(path):
        is_file = any(not entry.name for entry in entries(path))
        is_directory = not is_file
    else:
        is_file, is_directory = os.path.exists(path), os.path.isdir(path)
    if not is_directory:
        raise value_error(
            f"The path {'is a file' if is_file else 'does not exist'}.",
            "Expected a folder of images.",
            "For a list or a table of files use `from_files`."
            if is_file
            else "Check its spelling; an address is passed as a text, since `Path` drops a slash.",
            path=path,
            working_folder=os.getcwd(),
        )


def no_images(path: Folder, classes: list[str] | None) -> ValueError:
    where = "the folder" if classes is None else f"the {len(classes)} class folders"
    directly = images_directly_in(path)
    return value_error(
        f"There are no images in {where}{f', and {directly} beside them' if directly else ''}.",
        f"Expected images ({', '.join(EXTENSIONS)}), in a subfolder for each class unless labels "
        "are given.",
        "Check the path; or pass labels=None, a list of labels, or the parent folder if this one "
        "is a class.",
        path=str(path),
        subfolders=(classes or [])[:20],
    )


def warn_of_unused_images(path: Folder) -> None:
    count = images_directly_in(path)
    if count:
        warn(
            f"{count} images lie directly in {path} and belong to no class, so they are not used: "
            "only its subfolders are classes.",
            stacklevel=4,
        )


def warn_of_empty_classes(path: str, classes: list[str], counts: np.ndarray) -> None:
    """Warn of classes without images, which may mean a wrong folder or an unsupported format."""
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        warn(
            f"{len(empty)} of {len(classes)} class folders in {path} hold no images: "
            f"{', '.join(empty[:5])}{' ...' * (len(empty) > 5)}. They still count as "
            f"classes. Files that end in {', '.join(EXTENSIONS)} are images.",
            stacklevel=4,
        )


def images_directly_in(path: Folder) -> int:
    if isinstance(path, PackedFolder):
        return sum(path.top_of(index) is None for index in range(len(path)))
    return sum(
        entry.name.lower().endswith(EXTENSIONS) and not is_folder(entry)
        for entry in readable_entries(path)
    )


def class_folders(path: Folder) -> list[str]:
    """The sorted names of the subfolders that are classes: all but hidden ones."""
    if isinstance(path, PackedFolder):
        return path.classes
    return sorted(
        entry.name
        for entry in readable_entries(path)
        if entry.is_dir() and not entry.name.startswith(".")
    )


def images_in(path: Folder, classes: Sequence[str] | None) -> tuple[FileTable, np.ndarray]:
    """All images in these class folders, or in the whole folder, and their number in each class.

    The order is Keras's: class by class, then sorted by folder, then by name.
    """
    if isinstance(path, PackedFolder):
        return path.images_in(classes)
    tops = [path] if classes is None else [os.path.join(path, name) for name in classes]
    counts = np.zeros(len(tops), np.int64)

    def files() -> Iterator[tuple[str, str, str]]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="keras_multigpu_scan") as threads:
            scans = threads.map(lambda top: sorted(walk(top)), tops)
            for number, folders in enumerate(scans):
                for folder, images in folders:
                    counts[number] += len(images)
                    for name, state in sorted(images):
                        yield folder, name, state

    return FileTable(files()), counts


def walk(folder: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each folder with the images in it, as `(name, state)`; the state is known at addresses only.

    Links to folders are not followed. Unlike `os.walk`, it raises an error for a folder that cannot
    be read.
    """
    images, folders = [], []
    for entry in readable_entries(folder):
        if is_folder(entry):
            if not entry.is_symlink():
                folders.append(entry.name)
        elif entry.name.lower().endswith(EXTENSIONS):
            images.append((entry.name, entry.state if isinstance(entry, Entry) else ""))
    yield folder, images
    for name in folders:
        yield from walk(os.path.join(folder, name))


def readable_entries(folder: str) -> Iterator[os.DirEntry[str] | Entry]:
    """The entries of a folder; an error that names the folder if it cannot be read."""
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
    """Whether an entry is a folder or a link to one; False for a broken link."""
    try:
        return entry.is_dir()
    except OSError as error:
        if is_of_machine(error):
            raise unread(entry.name, error) from error
        return False
