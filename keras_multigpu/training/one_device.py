"""Whether a model's step is being traced as one device runs it, in this thread."""

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()

one_at_a_time = threading.RLock()
"""Held while variables are those of one device: another thread would take them for the model's."""


def traces_one_device() -> bool:
    return bool(getattr(_thread, "traces", False))


@contextlib.contextmanager
def tracing_one_device() -> Iterator[None]:
    """Let Keras's step be Keras's own, where the model's step calls it."""
    before, _thread.traces = traces_one_device(), True
    try:
        yield
    finally:
        _thread.traces = before
