"""Finds a TFDS builder, and prepares its data in one process while the others wait."""

import contextlib
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_multigpu.checks import error_of, value_error
from keras_multigpu.writing import one_at_a_time

logger = logging.getLogger("keras_multigpu")


def import_tfds() -> ModuleType:
    """The module `tensorflow_datasets`; an `ImportError` says how to install it."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        # Version 4.9.10 imports `importlib_resources` without requiring it. `array_record` is for
        # random access.
        raise error_of(
            ImportError,
            "`from_tfds` needs the package tensorflow-datasets, which cannot be imported.",
            "Expected it to be installed.",
            "Run `pip install tensorflow-datasets importlib_resources array_record`.",
            cause=str(error),
        ) from error
    return tensorflow_datasets


def find_builder(name_or_builder: Any, data_dir: Any) -> Any:
    tfds = import_tfds()
    if isinstance(name_or_builder, tfds.core.DatasetBuilder):
        if data_dir is not None:
            raise value_error(
                "A builder was given together with `data_dir`.",
                "Expected `data_dir` only with a name.",
                data_dir=data_dir,
            )
        return name_or_builder
    try:
        return tfds.builder(name_or_builder, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        raise value_error(
            f"TFDS has no data set of this name: {error}.",
            "Expected a name such as mnist.",
            "Check the spelling; for a builder of your own, import its module first.",
            name=name_or_builder,
        ) from error


def prepare(builder: Any, is_own: bool) -> None:
    """Download and prepare missing data, in one process of a host.

    A builder of the user's own keeps its format. Otherwise it is the one with random access, if
    the package for that is installed.
    """
    if not is_generated(builder) or is_prepared(builder):
        return
    folder = os.fspath(builder.data_path)
    path = Path(folder)
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if "://" not in folder:  # Buckets have no locks.
        lock = one_at_a_time(path.parent / f".{path.name}.lock", f"is preparing {folder}")
    with lock:
        if is_prepared(builder):
            # The process that held the lock before has prepared it.
            builder.info.read_from_directory(builder.data_path)
            return
        with_random_access = not is_own and importlib.util.find_spec("array_record")
        builder.download_and_prepare(file_format="array_record" if with_random_access else None)


def is_prepared(builder: Any) -> bool:
    # TFDS would warn of a missing folder.
    return bool(builder.data_path.exists() and builder.is_prepared())


def is_generated(builder: Any) -> bool:
    """Whether the builder writes its own files."""
    tfds = import_tfds()
    return not isinstance(builder, tfds.ImageFolder | tfds.TranslateFolder)
