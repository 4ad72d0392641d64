"""Examples that cannot be read: their error, and a list of them."""

import errno
import threading
from collections import deque
from typing import NamedTuple

from keras_multigpu.checks import error_of, problem, warn
from keras_multigpu.data.addresses import Unreachable

# How many errors are remembered: more than can occur concurrently.
MOST_FAILURES = 64

# The errors of the operating system that are about a file itself, so that it stays unreadable.
OF_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ENXIO,
)

Damaged = list[tuple[int, str]]
"""`(row, cause)` of each example of a batch that cannot be read."""


class DamagedExample(ValueError):
    """An example cannot be read; `cause` is a short clause, `name` its file if that is known."""

    def __init__(self, cause: str, name: str | None = None) -> None:
        self.cause = cause
        self.name = name
        super().__init__(
            problem(
                f"{name or 'An example'} cannot be read: {cause}.",
                "Expected an intact example.",
                'Repair or remove it, or pass on_error="skip" to train without it.',
                example=name,
            )
        )


def is_of_machine(error: Exception) -> bool:
    """Whether an error says nothing about the example, as when a disk does not answer."""
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError)
    # Libraries raise an `OSError` without a number for damaged content.
    of_network = isinstance(error, TimeoutError | ConnectionError)
    return of_network or error.errno not in (None, *OF_FILE)


def unread(name: str, error: Exception) -> Unreachable:
    """The error for an example that could not be read, but may be intact."""
    words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return error_of(
        Unreachable,
        f"{name} could not be read: {words}.",
        "Expected disks that answer, and enough memory and open files: the example may be intact.",
        "Run again when they do. `ulimit -n` shows and raises the number of open files.",
        example=name,
    )


class Damage(NamedTuple):
    """One entry of `Batches.quarantine`."""

    name: str
    cause: str


class Quarantine:
    """The damaged examples found so far, for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Damage] = {}
        self._met: dict[int, set[str]] = {}
        self._failures: deque[Exception] = deque(maxlen=MOST_FAILURES)

    @property
    def entries(self) -> list[Damage]:
        with self._lock:
            return list(self._entries.values())

    def failed(self, error: Exception) -> Exception:
        """Remember an error that ends reading, because TensorFlow passes on only its text."""
        with self._lock:
            self._failures.append(error)
        return error

    def failure_in(self, error: Exception) -> Exception | None:
        """The remembered error whose text a TensorFlow error contains, if there is one."""
        text = str(error)
        with self._lock:
            found = [one for one in self._failures if str(one) in text]
        return max(found, key=lambda one: len(str(one)), default=None)

    def add(self, epoch: int, name: str, cause: str) -> None:
        with self._lock:
            self._entries.setdefault(name, Damage(name, cause))
            self._met.setdefault(epoch, set()).add(name)

    def warn(self, epoch: int) -> None:
        """Warn once of the damaged examples of an epoch, if there were any."""
        with self._lock:
            names = sorted(self._met.pop(epoch, ()))
            listed = [f"{name} ({self._entries[name].cause})" for name in names[:5]]
        if not names:
            return
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        count = "1 damaged example" if len(names) == 1 else f"{len(names)} damaged examples"
        warn(
            f"Epoch {epoch + 1} skipped {count}: {', '.join(listed)}{more}. "
            "`batches.quarantine` lists them all.",
            stacklevel=2,
        )
