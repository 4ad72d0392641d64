"""Examples that cannot be read: their error, and a list of them."""

import threading
from collections import deque
from typing import NamedTuple

from keras_multigpu.checks import problem, warn

# How many errors are remembered: more than can occur concurrently.
MOST_FAILURES = 64

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
            return next((one for one in self._failures if str(one) in text), None)

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
