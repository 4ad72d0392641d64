"""Files at an address, such as `gs://bucket/photos`: listed and read through fsspec."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_multigpu.checks import error_of, value_error

AT_ONCE = 64
"""How many files are fetched at a time, whatever the number of cores: they are waited for."""

INDEXED = 2**22
"""How many bytes are fetched together where a file is read from front to end."""

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)

# What tells one content of a file from the next, by the names that storages have for it.
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


def joined(root: str, path: str) -> str:
    """As `os.path.join`, where an address is absolute, too."""
    return path if is_address(path) else os.path.join(root, path)


def split(path: str) -> tuple[str, str]:
    """As `os.path.split`, which takes the end of a lone `memory://` for a folder's."""
    if not is_address(path):
        return os.path.split(path)
    folder, _, name = path.rpartition("/")
    return folder + "/" * folder.endswith(":/"), name


class Unreachable(OSError):
    """What cannot be read now. That is no damage, which may be left out."""


class Entry(NamedTuple):
    """What `os.DirEntry` offers of a file or folder, and its `state_in`."""

    name: str
    folder: bool
    state: str

    def is_dir(self) -> bool:
        return self.folder

    def is_symlink(self) -> bool:
        return False


def located(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path there."""
    # fsspec keeps those that serve many threads, and one for each thread of others.
    from fsspec.core import url_to_fs

    return url_to_fs(address)


@contextlib.contextmanager
def asking(address: str) -> Iterator[None]:
    """Let an error name the address, and say what may be missing."""
    try:
        yield
    except ImportError as error:
        raise error_of(
            ImportError,
            f"A package is missing: {error}.",
            "Expected fsspec and the package for this kind of address.",
            "Install it: `pip install gcsfs` for gs://, `pip install s3fs` for s3://.",
            address=address,
        ) from error
    except FileNotFoundError as error:
        raise value_error(
            "There is nothing at the address.",
            "Expected a bucket that exists, and something in it under this name.",
            "Check its spelling.",
            address=address,
        ) from error
    except Exception as error:
        raise unreachable(address, error) from error


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
    """What is in a folder; of a file that file alone, without a name."""
    if "::" in folder.partition("://")[2]:
        raise value_error(
            "The address is that of a folder inside of a file.",
            "Expected a folder whose files have addresses of their own.",
            "Unpack it, or pass the addresses of its files to `from_files`.",
            address=folder,
        )
    with asking(folder):
        system, path = located(folder)
        # The listing must be today's, and a million files in it would take a gigabyte.
        system.invalidate_cache(path)
        found = system.ls(path, detail=True)
        system.invalidate_cache(path)
    # The names have the form of `path`. A file that marks a folder has the name of that.
    start = len(path.rstrip("/"))
    named = [(each["name"][start:].strip("/"), each) for each in found]
    return [
        Entry(name, each["type"] == "directory", state_in(each))
        for name, each in named
        if name or each["type"] != "directory"
    ]


def matching(pattern: str) -> list[str]:
    """The files at addresses of a pattern, sorted."""
    # The names have the form of the path of the folder, which has no `*` in it.
    base, _ = split(re.split(r"[*?\[]", pattern)[0])
    with asking(pattern):
        system, path = located(base)
        path = path.rstrip("/")
        system.invalidate_cache(path)
        found = system.glob(f"{path}/{pattern[len(base) :].lstrip('/')}", detail=True)
    return sorted(
        os.path.join(base, name[len(path) :].lstrip("/"))
        for name, info in found.items()
        if info["type"] != "directory"
    )


def state_in(info: dict[str, Any]) -> str:
    """The size of a file and its version, if the storage has one."""
    versions = (str(info[name]) for name in _VERSIONS if info.get(name) is not None)
    return f"{info.get('size')} {next(versions, '')}".strip()


def state_at(address: str) -> str:
    with asking(address):
        system, path = located(address)
        try:
            system.invalidate_cache(path)
            return state_in(system.info(path))
        except FileNotFoundError:
            return "missing"


def exists(address: str) -> bool:
    return state_at(address) != "missing"


def fetched(address: str) -> bytes:
    """The content of a file. Raises `FileNotFoundError` or `Unreachable`."""
    system, path = located(address)
    try:
        return system.cat_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise
    except Exception as error:
        raise unreachable(address, error) from error


def stored(address: str, content: bytes) -> None:
    with asking(address):
        system, path = located(address)
        system.pipe_file(path, content)


def opened(address: str) -> Any:
    """The file for reading from front to end."""
    with asking(address):
        system, path = located(address)
        return system.open(path, "rb", block_size=INDEXED, cache_type="readahead")


class SequentialFile:
    """Parts of a file, one behind another; what is between them may be fetched with them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._file = opened(address)

    def pread(self, size: int, start: int) -> bytes:
        with asking(self._address):
            self._file.seek(start)
            return self._file.read(size)

    def state(self) -> tuple[int, str]:
        size, _, version = state_at(self._address).partition(" ")
        return int(size), version


class RemoteFile:
    """Parts of a file, for several threads."""

    def __init__(self, address: str) -> None:
        self._address = address

    def pread(self, size: int, start: int) -> bytes:
        with asking(self._address):
            system, path = located(self._address)
            return system.cat_file(path, start=start, end=start + size)
