"""`keras-multigpu check-images`: find the images in a folder that would stop a training."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from keras_multigpu.checks import printable
from keras_multigpu.commands.usage import usage_error, without_library_messages

CHECKED_AT_ONCE = 256
"""How many images the threads are given at a time."""


DAMAGED = "Damaged"
UNREAD = "Not checked, and maybe intact"


class Remark(NamedTuple):
    """A file or folder, by its path below the checked folder, and what was found about it."""

    path: str
    text: str
    kind: str = DAMAGED


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check-images",
        help="find damaged images in a folder",
        description="Decode all images of a folder and its subfolders, as training would, and list "
        "those that cannot be read, with the cause. The exit code is 0 if all are intact, 1 if "
        "some are damaged, 2 if any could not be checked.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of images")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder = Path(os.path.expanduser(arguments.folder))
    require_readable(folder)
    with without_library_messages() as terminal:
        # Only now, because TensorFlow takes seconds to import.
        from keras_multigpu.data.decoding.formats import EXTENSIONS

        images, others, findings = contents_of(folder, EXTENSIONS)
        if not images and not findings:
            raise usage_error(
                "The folder holds no images.",
                f"Expected files that end in {', '.join(EXTENSIONS)}, in it or in its subfolders.",
                folder=str(folder),
            )
        check = checker(folder)
        of_images = check_all(images, check, terminal)
    unread = sum(one.kind == UNREAD for one in of_images)
    findings += of_images
    report(folder, len(images) - unread, others, findings)
    if any(one.kind == UNREAD for one in findings):
        return 2
    return 1 if findings else 0


def require_readable(folder: Path) -> None:
    try:
        with os.scandir(folder):
            pass
    except OSError as error:
        raise usage_error(
            f"The folder cannot be read: {error.strerror}.",
            "Expected a folder of images.",
            folder=str(folder),
        ) from None


def contents_of(folder: Path, extensions: tuple[str, ...]) -> tuple[list[str], int, list[Remark]]:
    """Sorted paths of images, by their endings; the number of other files; findings about folders.

    Linked subfolders are ignored.
    """
    from keras_multigpu.data.pipeline.damage import is_of_machine

    images: list[str] = []
    findings: list[Remark] = []
    others = 0

    def unreadable(error: OSError) -> None:
        path = os.path.relpath(error.filename, folder)
        kind = UNREAD if is_of_machine(error) else DAMAGED
        findings.append(Remark(path, f"the folder cannot be read: {error.strerror}", kind))

    for root, subfolders, files in os.walk(folder, onerror=unreadable):
        subfolders.sort()
        inside = os.path.relpath(root, folder)
        found = sorted(name for name in files if name.lower().endswith(extensions))
        others += len(files) - len(found)
        images += (os.path.normpath(os.path.join(inside, name)) for name in found)
    return images, others, findings


def check_all(
    images: list[str], check: Callable[[str], Remark | None], terminal: TextIO | None
) -> list[Remark]:
    """The findings about images, in order; a line on the terminal shows the progress."""
    from keras_multigpu.data.pipeline.loader import CORES

    findings: list[Remark] = []
    done, damaged, shown = 0, 0, 0.0
    remaining = iter(images)
    # OpenCV and TensorFlow decode without Python's lock, so threads are enough.
    with ThreadPoolExecutor(CORES, thread_name_prefix="keras_multigpu_check") as threads:
        # `map` would start all images at once, and keep every result.
        while paths := list(islice(remaining, CHECKED_AT_ONCE)):
            for finding in threads.map(check, paths):
                done += 1
                if finding:
                    findings.append(finding)
                    damaged += finding.kind == DAMAGED
                if terminal and time.monotonic() - shown > 0.1:
                    shown = time.monotonic()
                    bar = "=" * (30 * done // len(images))
                    terminal.write(
                        f"\r[{bar:30}] {done:,} of {len(images):,} images, {damaged:,} damaged "
                    )
                    terminal.flush()
    if terminal:
        terminal.write("\r\x1b[K")
        terminal.flush()
    return findings


def checker(folder: Path) -> Callable[[str], Remark | None]:
    """A function that reads, decodes and judges the image at a path below the folder."""
    import numpy as np
    import tensorflow as tf

    from keras_multigpu.data.decoding.decoder import ImageDecoder, read_file
    from keras_multigpu.data.pipeline.damage import DamagedExample

    # Leave the GPUs to a training that may be running. If TensorFlow has started it has taken their
    # memory already, and raises this error.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    # The size does not matter: every image is decoded whole, and resizing it to a pixel is fast.
    decoder = ImageDecoder((1, 1))
    seed = np.zeros(2, np.int32)

    def check(path: str) -> Remark | None:
        try:
            data = read_file(str(folder / path))
            decoder.decode(data, seed)
        except DamagedExample as damage:
            return Remark(path, damage.cause)
        except (OSError, MemoryError) as error:
            cause = error.__cause__ or error
            return Remark(path, getattr(cause, "strerror", None) or str(cause), UNREAD)
        return None

    return check


def report(folder: Path, images: int, others: int, findings: list[Remark]) -> None:
    found = {kind: [each for each in findings if each.kind == kind] for kind in (DAMAGED, UNREAD)}
    for kind, some in found.items():
        if some:
            print(f"{kind}:")
            for one in some:
                print(f"  {printable(one.path)}: {one.text}")
            print()
    unread = f", {len(found[UNREAD]):,} not checked" if found[UNREAD] else ""
    checked = f"{count_text(images, 'image')} checked, {len(found[DAMAGED]):,} damaged{unread}"
    print(f"{printable(str(folder))}: {checked}; {count_text(others, 'other file')} not looked at.")


def count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
