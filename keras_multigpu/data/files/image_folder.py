"""The images of a folder with their labels, as a source."""

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu.checks import printable, problem, require_choice, value_error, warn
from keras_multigpu.data.addresses import entries, is_address
from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.files.image_files import LABEL_MODES, ClassTargets, ImageFiles
from keras_multigpu.data.files.scanning import (
    EXTENSIONS,
    class_folders,
    images_in,
    is_folder,
    readable_entries,
)
from keras_multigpu.writing import say


def image_folder(
    path: str,
    labels: Any,
    label_mode: str | None,
    class_names: Sequence[str] | None,
    decoder: ImageDecoder,
    follow_links: bool,
    verbose: bool,
) -> ImageFiles:
    require_folder(path)
    labels, inferred = require_labels(labels, label_mode, class_names)
    classes = chosen_classes(path, class_names) if inferred else None
    found = images_in(path, classes, follow_links)
    count = len(found.files)
    if not count:
        raise ValueError(no_images(path, classes))
    if inferred:
        warn_of_images_outside(path)
    if classes is not None:
        warn_of_empty_classes(path, classes, found.counts)
    targets = None
    if classes is not None and label_mode is not None:
        numbers = np.repeat(np.arange(len(classes), dtype=np.int32), found.counts)
        targets = ClassTargets(numbers, label_mode, classes)
    elif labels is not None and label_mode is not None:
        numbers = listed_labels(labels, count, path)
        names = [str(number) for number in range(int(numbers.max()) + 1)]
        targets = ClassTargets(numbers, label_mode, names)
    if verbose:
        classes_found = f" belonging to {len(targets.class_names or ())} classes" if targets else ""
        say(printable(f"Found {count} files{classes_found}."))
    height, width, _ = decoder.shape
    return ImageFiles(found.files, decoder, targets, name=f"{path}, {height}x{width}")


def require_labels(
    labels: Any, label_mode: Any, class_names: Sequence[str] | None
) -> tuple[Any, bool]:
    """The labels without those that no one wants, and whether the subfolders make them."""
    require_choice("label_mode", label_mode, LABEL_MODES)
    inferred = isinstance(labels, str)
    if inferred:
        require_choice("labels", labels, ("inferred",))
    if label_mode is None or labels is None:
        labels, inferred = None, False
    if class_names is not None and not inferred:
        raise value_error(
            "`class_names` was given, but the subfolders are not used as classes.",
            'Expected it only with labels="inferred" and a `label_mode`.',
            "Leave one of them out.",
            class_names=class_names,
            labels="a list" if labels is not None else None,
        )
    return labels, inferred


def chosen_classes(path: str, class_names: Sequence[str] | None) -> list[str]:
    folders = class_folders(path)
    if class_names is None:
        if not folders:
            raise ValueError(no_images(path, folders))
        return folders
    chosen = [str(name) for name in class_names]
    unknown = sorted(set(chosen) - set(folders))
    if not chosen or unknown or len(set(chosen)) < len(chosen):
        shown = ", ".join(repr(name) for name in folders[:20]) + (" ..." * (len(folders) > 20))
        raise value_error(
            f"`class_names` names no subfolders of the folder: {unknown}."
            if unknown
            else "`class_names` is empty, or has a name twice.",
            f"Expected some of its {len(folders)} subfolders, each once: {shown}.",
            "Check the names, or leave `class_names` out.",
            class_names=class_names,
            path=path,
        )
    return chosen


def listed_labels(labels: Any, count: int, path: str) -> np.ndarray:
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or len(numbers) != count:
        raise value_error(
            f"`labels` has {len(numbers) if numbers.ndim else 'no'} entries, "
            f"and there are {count} images.",
            "Expected one integer for each image, sorted by folder and then by name.",
            "Leave it out to take the subfolders as classes. An image size is passed by name: "
            "image_size=(224, 224).",
            labels=labels if len(repr(labels)) < 100 else f"{repr(labels)[:100]}...",
            path=path,
        )
    if numbers.dtype.kind not in "iu" or numbers.min() < 0:
        raise value_error(
            "`labels` has entries that are not class numbers.",
            "Expected the integers 0, 1, 2, ...",
            "Use `from_files`, which also takes names of classes, numbers to predict, and "
            "several labels for an image.",
            dtype=str(numbers.dtype),
            first=numbers[:5].tolist(),
        )
    return numbers.astype(np.int32)


def require_folder(path: str) -> None:
    if is_address(path):
        is_file = any(not entry.name for entry in entries(path))
        is_directory = not is_file
    else:
        is_file, is_directory = os.path.exists(path), os.path.isdir(path)
    if is_directory:
        return
    if is_file:
        what, fix = "The path is a file.", "For a list or a table of files use `from_files`."
    elif re.match(r"[a-z0-9+.-]+:/\w", path):
        what, fix = "The path is an address with one slash.", "Pass it as a text: `Path` drops one."
    else:
        what, fix = "The path does not exist.", "Check its spelling."
    raise value_error(
        what,
        "Expected a folder of images.",
        fix,
        path=path,
        working_folder=os.getcwd(),
    )


def no_images(path: str, classes: list[str] | None) -> str:
    directly = images_directly_in(path)
    if classes is None:
        what, fix = "There are no images in the folder.", "Check the path."
    elif directly:
        what = f"The folder holds {directly} images, but none in subfolders."
        fix = "Pass labels=None, a list of labels, or the folder above if this one is a class."
    elif not classes:
        what, fix = "The folder has no subfolders.", "Check the path."
    else:
        what, fix = f"There are no images in the {len(classes)} class folders.", "Check the path."
    where = "" if classes is None else " in a subfolder for each class"
    received = {} if classes is None else {"subfolders": classes[:20]}
    expected = f"Expected images ({', '.join(EXTENSIONS)}){where}."
    return problem(what, expected, fix, path=path, **received)


def warn_of_images_outside(path: str) -> None:
    count = images_directly_in(path)
    if count:
        warn(
            f"{count} images lie directly in {path} and belong to no class, so they are not used: "
            "only its subfolders are classes.",
            stacklevel=4,
        )


def warn_of_empty_classes(path: str, classes: list[str], counts: np.ndarray) -> None:
    """Give a warning where a class has no images, which a wrong folder or format may mean."""
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        warn(
            f"{len(empty)} of {len(classes)} class folders in {path} hold no images: "
            f"{', '.join(empty[:5])}{' ...' * (len(empty) > 5)}. They count as classes all the "
            f"same. Files that end in {', '.join(EXTENSIONS)} are images.",
            stacklevel=4,
        )


def images_directly_in(path: str) -> int:
    return sum(
        entry.name.lower().endswith(EXTENSIONS) and not is_folder(entry)
        for entry in readable_entries(path)
    )
