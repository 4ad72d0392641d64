"""Finds a TFDS builder, and lets one process prepare its data while the others wait."""

import contextlib
import difflib
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_multigpu.checks import error_of, value_error
from keras_multigpu.writing import one_at_a_time

logger = logging.getLogger("keras_multigpu")


def imported() -> ModuleType:
    """The module `tensorflow_datasets`; an `ImportError` that says how to get it."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        # Version 4.9.10 imports `importlib_resources` and does not ask for it; `array_record` is
        # for reading in any order.
        raise error_of(
            ImportError,
            "`from_tfds` needs the package tensorflow-datasets, which cannot be imported.",
            "Expected it to be installed.",
            "Run `pip install tensorflow-datasets importlib_resources array_record`.",
            cause=str(error),
        ) from error
    return tensorflow_datasets


def builder_of(name_or_builder: Any, data_dir: Any) -> Any:
    tfds = imported()
    if isinstance(name_or_builder, tfds.core.DatasetBuilder):
        if data_dir is not None:
            raise value_error(
                "A builder was given together with `data_dir`.",
                "Expected it only with a name.",
                "Pass it to the builder.",
                data_dir=data_dir,
            )
        return name_or_builder
    try:
        return tfds.builder(name_or_builder, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        name = str(name_or_builder).split("/")[0].split(":")[0]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise value_error(
            "TFDS has no data set of this name.",
            f"Expected a name such as {', '.join(near)}." if near else "Expected another name.",
            "Check the spelling; for a builder of your own, import its module first.",
            name=name_or_builder,
        ) from error


def prepare(builder: Any, download: bool, file_format: str | None) -> None:
    """Download and prepare the data, unless it is there; only one process of a host does."""
    if not is_generated(builder) or is_prepared(builder):
        return
    if not download:
        raise value_error(
            f"{builder.info.full_name} has not been prepared.",
            f"Expected its data in {builder.data_path}.",
            "Leave out download=False, or pass the `data_dir` where the data is.",
            download=download,
        )
    with lock_of(os.fspath(builder.data_path)):
        if is_prepared(builder):
            # By the process that had the lock before.
            builder.info.read_from_directory(builder.data_path)
            return
        builder.download_and_prepare(file_format=file_format)


def is_prepared(builder: Any) -> bool:
    # TFDS warns of a folder that does not exist yet.
    return bool(builder.data_path.exists() and builder.is_prepared())


def is_generated(builder: Any) -> bool:
    """Whether the builder writes files of its own, and does not just read those of others."""
    tfds = imported()
    return not isinstance(builder, tfds.ImageFolder | tfds.TranslateFolder)


def preferred_format() -> str | None:
    """The format that can be read in any order, where the package for it is installed."""
    return "array_record" if importlib.util.find_spec("array_record") else None


def lock_of(folder: str) -> contextlib.AbstractContextManager[None]:
    """The lock of a folder that is to be made; in a bucket, where there are none, nothing."""
    if "://" in folder:
        return contextlib.nullcontext()
    path = Path(folder)
    return one_at_a_time(path.parent / f".{path.name}.lock", f"is preparing {folder}")
