"""`keras-multigpu check-images`: which images of a folder would stop a training run?"""

import argparse
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from keras_multigpu.checks import printable
from keras_multigpu.commands.usage import (
    UsageError,
    at_least,
    usage_error,
    without_library_messages,
)
from keras_multigpu.writing import whole

AT_ONCE = 256
"""How many images are handed to the threads together."""


class Verdict(NamedTuple):
    """What is to be said of one file, if anything."""

    damage: str = ""
    warning: str = ""


class Contents(NamedTuple):
    """Paths of files named like images, how many others there are, and what to say of folders."""

    images: list[str]
    others: int
    folders: list[tuple[str, Verdict]]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check-images",
        help="find damaged images in a folder",
        description="Decode all images of a folder and its subfolders, as training would, and list "
        "those that cannot be read, with the cause. The exit code is 0 if all are intact, 1 if "
        "some are damaged, 2 if the folder could not be checked.",
    )
    add, number = parser.add_argument, at_least(int, 1)
    add("folder", metavar="DIR", help="the folder of images")
    move_to = "move damaged files there; they keep their paths below the folder"
    add("--move-to", metavar="DIR", help=move_to)
    jobs = "how many images to decode in parallel (default: one per core)"
    add("--jobs", type=number, metavar="N", help=jobs)
    pixels = "how many pixels an image may have, as in training (default: about 89 million)"
    add("--max-pixels", type=number, metavar="N", help=pixels)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the images; 0 if all are intact, 1 if not, 2 if they could not be checked."""
    folder = Path(os.path.expanduser(arguments.folder))
    target = None if arguments.move_to is None else Path(os.path.expanduser(arguments.move_to))
    require_usable(folder, target)
    with without_library_messages() as terminal:
        # After what may be wrong with the folder: TensorFlow takes seconds to start.
        from keras_multigpu.data.files.scanning import EXTENSIONS

        contents = contents_of(folder, EXTENSIONS)
        if not contents.images and not contents.folders:
            raise usage_error(
                "There is no image in the folder.",
                f"Expected files that end in {', '.join(EXTENSIONS)}, in it or in its subfolders.",
                "Check the path.",
                folder=str(folder),
            )
        check = checker(arguments.max_pixels)
        found = checked(folder, contents.images, check, arguments.jobs, terminal)
    verdicts = [*contents.folders, *found]
    report(folder, contents, verdicts)
    damaged = [name for name, verdict in verdicts if verdict.damage]
    if target is not None:
        # Folders that cannot be listed stay where they are.
        files = [name for name in damaged if not (folder / name).is_dir()]
        move(folder, target, files)
    return 1 if damaged else 0


def require_usable(folder: Path, target: Path | None) -> None:
    try:
        with os.scandir(folder):
            pass
    except OSError as error:
        raise usage_error(
            f"The folder cannot be read: {error.strerror}.",
            "Expected a folder of images.",
            "Check the path.",
            folder=str(folder),
        ) from None
    if target is None:
        return
    inside = target.resolve().is_relative_to(folder.resolve())
    if inside or (target.exists() and not target.is_dir()):
        raise usage_error(
            "Damaged files cannot be moved there: it is "
            f"{'in the folder that is checked' if inside else 'not a folder'}.",
            "Expected another folder, which need not exist yet.",
            "Pass one as `--move-to`.",
            move_to=str(target),
            folder=str(folder),
        )


def contents_of(folder: Path, extensions: tuple[str, ...]) -> Contents:
    """What is in a folder and its subfolders, sorted. Linked subfolders are ignored."""
    images: list[str] = []
    folders: list[tuple[str, Verdict]] = []
    others = 0

    def unreadable(error: OSError) -> None:
        name = os.path.relpath(error.filename, folder)
        folders.append((name, Verdict(f"the folder cannot be read: {error.strerror}")))

    for root, subfolders, files in os.walk(folder, onerror=unreadable):
        subfolders.sort()
        for name in subfolders:
            if name.lower().endswith(extensions):
                path = os.path.relpath(os.path.join(root, name), folder)
                folders.append((path, Verdict(warning="it is a folder, named like an image")))
        found = sorted(name for name in files if name.lower().endswith(extensions))
        others += len(files) - len(found)
        images += (os.path.relpath(os.path.join(root, name), folder) for name in found)
    return Contents(images, others, folders)


def checked(
    folder: Path,
    images: list[str],
    check: Callable[[str], Verdict],
    jobs: int | None,
    terminal: TextIO | None,
) -> list[tuple[str, Verdict]]:
    """`(path, verdict)` of each image of which something is to be said, in their order."""
    from keras_multigpu.data.pipeline.loader import CORES

    progress = Progress(len(images), terminal)
    verdicts = []
    remaining = iter(images)
    # OpenCV and TensorFlow decode without Python's lock, so threads are enough.
    with ThreadPoolExecutor(jobs or CORES, thread_name_prefix="keras_multigpu_check") as threads:
        # `map` begins with all that it is given, and keeps each result until it is asked for.
        while names := list(islice(remaining, AT_ONCE)):
            paths = [str(folder / name) for name in names]
            for name, verdict in zip(names, threads.map(check, paths), strict=True):
                if any(verdict):
                    verdicts.append((name, verdict))
                progress.step(bool(verdict.damage))
    progress.end()
    return verdicts


def checker(max_pixels: int | None) -> Callable[[str], Verdict]:
    """A function that reads and decodes the image at a path."""
    import numpy as np
    import tensorflow as tf

    from keras_multigpu.data.decoding.decoder import ImageDecoder, read_file
    from keras_multigpu.data.decoding.header import MAX_PIXELS, read_header
    from keras_multigpu.data.files.scanning import KINDS
    from keras_multigpu.data.pipeline.damage import DamagedExample

    # TensorFlow would take the memory of all GPUs, from the training that may be running there. If
    # it has started already it has done so, and says it with this error.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    # The size does not matter: an image is decoded whole, and making one pixel of it takes no time.
    try:
        decoder = ImageDecoder((1, 1), max_pixels=max_pixels or MAX_PIXELS)
    except ValueError as error:
        raise UsageError(str(error)) from None
    seed = np.zeros(2, np.int32)

    def check(path: str) -> Verdict:
        try:
            data = read_file(path, decoder.max_pixels)
            kind = read_header(data).kind
            decoder.decode(data, seed)
        except DamagedExample as damage:
            return Verdict(damage.cause)
        named = KINDS["." + path.rpartition(".")[2].lower()]
        return Verdict(warning="" if kind == named else f"it is a {kind}, named like a {named}")

    return check


class Progress:
    """One line on a terminal, if there is one, that counts the images."""

    def __init__(self, total: int, terminal: TextIO | None) -> None:
        self._total = total
        self._terminal = terminal
        self._done = 0
        self._damaged = 0
        self._shown = 0.0

    def step(self, damaged: bool) -> None:
        """Count one image; ten times a second the line is written anew."""
        self._done += 1
        self._damaged += damaged
        if self._terminal is not None and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            width = 30 * self._done // self._total
            self._terminal.write(
                f"\r[{'=' * width}{' ' * (30 - width)}] {self._done:,} of {self._total:,} images, "
                f"{self._damaged:,} damaged "
            )
            self._terminal.flush()

    def end(self) -> None:
        if self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()


def report(folder: Path, contents: Contents, verdicts: list[tuple[str, Verdict]]) -> None:
    damaged = [(name, verdict.damage) for name, verdict in verdicts if verdict.damage]
    warnings = [(name, verdict.warning) for name, verdict in verdicts if verdict.warning]
    for title, entries in (("Damaged:", damaged), ("Not damaged, but noteworthy:", warnings)):
        if entries:
            print(title)
            for name, text in entries:
                print(f"  {printable(name)}: {text}")
            print()
    others = counted(contents.others, "other file")
    print(
        f"{printable(str(folder))}: {counted(len(contents.images), 'image')} checked, "
        f"{len(damaged):,} damaged, {counted(len(warnings), 'warning')}; {others} not looked at."
    )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def move(source: Path, target: Path, names: Sequence[str]) -> None:
    """Move files to a folder, made if need be, where they keep their paths; print what was done."""
    moved = 0
    for name in names:
        if not os.path.lexists(source / name):
            continue  # It went away by itself.
        try:
            move_one(source / name, free(target / name))
            moved += 1
        except OSError as error:
            print(f"{printable(str(source / name))} could not be moved: {error.strerror}.")
    print(f"{moved:,} of {len(names):,} damaged files moved to {printable(str(target))}.")


def free(path: Path) -> Path:
    """A path where nothing is yet: `photo.jpg`, else `photo.1.jpg`, `photo.2.jpg`, ..."""
    number, candidate = 0, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return candidate


def move_one(source: Path, target: Path) -> None:
    """Move one file, or the link itself; to another file system by way of a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # Whole under its name or not there at all, also if this stops half-way.
        with whole(target) as partial:
            shutil.copy2(source, partial, follow_symlinks=False)
        source.unlink()
