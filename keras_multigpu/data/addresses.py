"""Remote files, at addresses such as `gs://bucket/photos`, through fsspec."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_multigpu.checks import error_of, value_error

# How many files are fetched at a time. Fetching waits, so this does not depend on the cores.
FETCHED_AT_ONCE = 64

# How many bytes are fetched together if a file is read from front to end.
INDEXED = 2**22

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)

# The names under which storages report a file's version.
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "created",
)


def is_address(path: object) -> bool:
    return isinstance(path, str) and _ADDRESS.match(path) is not None


def join(root: str, path: str) -> str:
    """As `os.path.join`, with addresses as absolute paths."""
    return path if is_address(path) else os.path.join(root, path)


def split_path(path: str) -> tuple[str, str]:
    """As `os.path.split`, which would break a lone `memory://`."""
    if not is_address(path):
        return os.path.split(path)
    folder, _, name = path.rpartition("/")
    return folder + "/" * folder.endswith(":/"), name


class Unreachable(OSError):
    """A storage does not answer. Unlike a damaged example, this is never skipped."""


class Entry(NamedTuple):
    """The part of `os.DirEntry` that is needed here, and the file's `state_in`."""

    name: str
    folder: bool
    state: str

    def is_dir(self) -> bool:
        return self.folder

    def is_symlink(self) -> bool:
        return False


def locate(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    return url_to_fs(address)


@contextlib.contextmanager
def name_errors(address: str) -> Iterator[None]:
    """Make errors name the address and a remedy."""
    try:
        yield
    except ImportError as error:
        raise missing_package(address, error) from error
    except FileNotFoundError as error:
        raise value_error(
            "There is nothing at the address.",
            "Expected an existing bucket, and something in it under this name.",
            address=address,
        ) from error
    except Exception as error:
        raise unreachable(address, error) from error


def missing_package(address: str, error: ImportError) -> ImportError:
    return error_of(
        ImportError,
        f"A package is missing: {error}.",
        "Expected fsspec and the package for this kind of address.",
        "Install it: `pip install gcsfs` for gs://, `pip install s3fs` for s3://.",
        address=address,
    )


def unreachable(address: str, error: Exception) -> Unreachable:
    words = " ".join(str(error).split())[:200]
    return error_of(
        Unreachable,
        f"The address cannot be read: {type(error).__name__}: {words}.",
        "Expected one that this process can reach, list and read.",
        "Check network and credentials. fsspec takes settings from the environment, such as "
        "FSSPEC_S3_ANON=true or FSSPEC_GCS_TOKEN=anon for a public bucket.",
        address=address,
    )


def entries(folder: str) -> list[Entry]:
    """The entries of a folder. For a file, a single entry without a name."""
    if "::" in folder.partition("://")[2]:
        raise value_error(
            "The address names a folder inside a file.",
            "Expected a folder whose files have their own addresses.",
            "Unpack it, or pass the addresses of its files to `from_files`.",
            address=folder,
        )
    with name_errors(folder):
        system, path = locate(folder)
        # The cached listing may be outdated, and takes a gigabyte for a million files.
        system.invalidate_cache(path)
        found = system.ls(path, detail=True)
        system.invalidate_cache(path)
    # Names start with `path`. Some storages mark a folder by a file of the same name.
    start = len(path.rstrip("/"))
    named = [(each["name"][start:].strip("/"), each) for each in found]
    return [
        Entry(name, each["type"] == "directory", state_in(each))
        for name, each in named
        if name or each["type"] != "directory"
    ]


def state_in(info: dict[str, Any]) -> str:
    """The size of a file and its version, if the storage reports one."""
    versions = (str(info[name]) for name in _VERSIONS if info.get(name) is not None)
    return f"{info.get('size')} {next(versions, '')}".strip()


def state_at(address: str) -> str:
    with name_errors(address):
        system, path = locate(address)
        try:
            system.invalidate_cache(path)
            return state_in(system.info(path))
        except FileNotFoundError:
            return "missing"


def exists(path: str) -> bool:
    """Whether there is a file or folder at a path or an address."""
    return state_at(path) != "missing" if is_address(path) else os.path.exists(path)


def fetch(address: str, start: int | None = None, end: int | None = None) -> bytes:
    """The content of a file, or a part. Raises `FileNotFoundError` or `Unreachable`."""
    try:
        system, path = locate(address)
        return system.cat_file(path, start=start, end=end)
    except (FileNotFoundError, IsADirectoryError):
        raise
    except Exception as error:
        raise unreachable(address, error) from error


class SequentialFile:
    """Reads parts of a file in order. Bytes between the parts may be fetched as well."""

    def __init__(self, address: str) -> None:
        self._address = address
        with name_errors(address):
            system, path = locate(address)
            self._file = system.open(path, "rb", block_size=INDEXED, cache_type="readahead")

    def read(self, start: int, size: int) -> bytes:
        with name_errors(self._address):
            self._file.seek(start)
            return self._file.read(size)
