"""`keras-multigpu check-images`: find the images in a folder that would stop a training."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from keras_multigpu.checks import printable
from keras_multigpu.commands.usage import (
    images_of,
    path_in,
    progress_bar,
    without_library_messages,
)

AT_ONCE = 256
"""How many images the threads are given at a time."""

DAMAGED = "Damaged"
UNREAD = "Not checked, and maybe intact"


class Remark(NamedTuple):
    """What was found about an image, by its path below the folder."""

    path: str
    text: str
    kind: str


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check-images",
        help="find damaged images in a folder",
        description="Decode all images of a folder and its subfolders, as training would, and list "
        "those that cannot be read, with the cause. The exit code is 0 if all are intact, 1 if "
        "some are damaged, 2 if any could not be checked.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of images, or its address")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with without_library_messages():
        folder, files = images_of(arguments.folder)
        remarks = [*check_all(folder, files)]
    found = {kind: [each for each in remarks if each.kind == kind] for kind in (DAMAGED, UNREAD)}
    for kind, some in found.items():
        if some:
            lines = [f"  {printable(each.path)}: {each.text}" for each in some]
            print(f"{kind}:", *lines, "", sep="\n")
    damaged, unread = map(len, found.values())
    counts = f"{len(files) - unread:,} images checked, {damaged:,} damaged"
    print(f"{printable(folder)}: {counts}{f', {unread:,} not checked' if unread else ''}.")
    return 2 if unread else int(damaged > 0)


def check_all(folder: str, files: Any) -> Iterator[Remark]:
    """Read and decode each image; what was found, in order."""
    import numpy as np
    import tensorflow as tf

    from keras_multigpu.data.decoding.decoder import ImageDecoder
    from keras_multigpu.data.pipeline.damage import DamagedExample
    from keras_multigpu.data.pipeline.loader import CORES

    # Leave the GPUs to a training that may be running. If TensorFlow has started it has taken their
    # memory already, and raises this error.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    # The size does not matter: every image is decoded whole, and resizing it to a pixel is fast.
    decoder, seed = ImageDecoder((1, 1)), np.zeros(2, np.int32)

    def check(read: Callable[[], bytes]) -> tuple[str, str] | None:
        try:
            decoder.decode(read(), seed)
        except DamagedExample as damage:
            return damage.cause, DAMAGED
        except (OSError, MemoryError) as error:
            cause = error.__cause__ or error
            return getattr(cause, "strerror", None) or str(cause), UNREAD
        return None

    bar = progress_bar(len(files))
    # OpenCV and TensorFlow decode without Python's lock, so threads are enough.
    with ThreadPoolExecutor(CORES, thread_name_prefix="keras_multigpu_check") as threads:
        # `map` would start all images at once, and keep every result.
        for rows in np.split(np.arange(len(files)), range(AT_ONCE, len(files), AT_ONCE)):
            for row, found in zip(rows, threads.map(check, files.contents(rows)), strict=True):
                if found is not None:
                    yield Remark(path_in(folder, files.path(row)), *found)
            bar(len(rows))
