"""Moves files out of a folder, and never over others."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from keras_multigpu.checks import printable
from keras_multigpu.writing import whole


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
