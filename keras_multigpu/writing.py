"""Files: written whole, by one process at a time, and refused early if they cannot be written.

One of the processes that train together writes and prints for all, see `leave_to_another`.
"""

import contextlib
import contextvars
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keras_multigpu.checks import value_error

logger = logging.getLogger("keras_multigpu")

# A link may lead to other people's files, and opening a pipe would block forever.
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK

_leave_to_another = contextvars.ContextVar("leave_to_another", default=False)


@contextlib.contextmanager
def leave_to_another(left: bool) -> Iterator[None]:
    """If `left`, print and draw nothing in this context, because another process does."""
    token = _leave_to_another.set(left)
    try:
        yield
    finally:
        _leave_to_another.reset(token)


def writes_here() -> bool:
    """Whether this process is the one that prints and draws."""
    return not _leave_to_another.get()


def say(text: str) -> None:
    """Print a line in one of several processes, or log it if Keras logs instead of printing."""
    # Commands import this module without Keras.
    import keras

    if writes_here() and keras.config.is_interactive_logging_enabled():
        print(text, flush=True)  # noqa: T201
    elif writes_here():
        logger.info("%s", text)


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end, but not after an error.

    Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same file.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # Writing to a link would change its target.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        # Atomic on one file system: others see the old file or the new one.
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def try_lock(file: int) -> bool:
    """Try to lock an open file, which the system unlocks when the process ends in any way."""
    try:
        # `flock` locks the open file. `lockf` loses the lock when anything in the process opens and
        # closes the file, such as a backup.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.info("%s: two processes in one folder are not detected.", error.strerror)
    return True


@contextlib.contextmanager
def one_at_a_time(lock: Path, waiting_for: str | None) -> Iterator[bool]:
    """Hold a lock file; log a line before waiting for another process.

    With None in place of what that does, do not wait: whether this process holds the file.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_RDWR | os.O_CREAT | CAREFULLY, 0o666)
    try:
        is_held = try_lock(file)
        if not is_held and waiting_for is not None:
            logger.info("Another process %s; waiting for it.", waiting_for)
            fcntl.flock(file, fcntl.LOCK_EX)
            is_held = True
        yield is_held
    finally:
        # Removing the file while others wait would let two of them in.
        os.close(file)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with write_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def require_writable(path: Path) -> None:
    """Raise a `ValueError` early if a file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
        if path.exists():
            # A rename would replace even a write-protected file.
            with path.open("ab"):
                pass
    # `ValueError` for impossible paths.
    except (OSError, ValueError) as error:
        raise value_error(
            f"The file cannot be written: {error}.",
            "Expected a path in a folder that can be written.",
            path=str(path),
        ) from error


def size_text(number: float) -> str:
    """A number of bytes as a short text, such as "1.5 GiB"."""
    power = 0
    while number >= 1024 and power < 4:
        number, power = number / 1024, power + 1
    digits = 1 if power and number < 10 else 0
    return f"{number:,.{digits}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def time_text(seconds: float) -> str:
    """A time as a short text, such as "3 h 12 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
