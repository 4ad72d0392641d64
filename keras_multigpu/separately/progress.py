"""A line for each job: those that run are drawn anew on a terminal, and printed once elsewhere."""

import shutil
import sys
import time
from collections.abc import Sequence

from keras_multigpu.separately.jobs import Job

REDRAW = 0.5
"""Seconds between two drawings."""


class Progress:
    """Prints how far so many jobs are."""

    def __init__(self, count: int) -> None:
        self._count = count
        # A file or a notebook cannot take lines back.
        self._on_terminal = sys.stdout.isatty()
        self._drawn = 0
        self._drawn_at = 0.0

    def started(self, job: Job) -> None:
        if not self._on_terminal:
            self._say(f"{self._head(job)} started")

    def ended(self, job: Job) -> None:
        """A job runs no longer; one that has failed is reported with its traceback."""
        self._clear()
        error = job.error()
        how = "FAILED" if error else "ended"
        self._say(f"{self._head(job)} {how} after {job.seconds:.1f} s")
        for text in [str(error), *error.__notes__] if error else []:
            for line in text.splitlines():
                self._say(f"    {line}")

    def running(self, jobs: Sequence[Job]) -> None:
        if not self._on_terminal or time.monotonic() - self._drawn_at < REDRAW:
            return
        self._clear()
        # A line as wide as the terminal might count as two.
        width = shutil.get_terminal_size().columns - 1
        for job in jobs:
            last = job.lines[-1] if job.lines else ""
            self._say(f"{self._head(job)} {job.seconds:.0f} s  {last}"[:width])
        self._drawn, self._drawn_at = len(jobs), time.monotonic()

    def _head(self, job: Job) -> str:
        assert job.slot is not None
        return f"[{job.number}/{self._count}] {job.name} on {job.slot.name}"

    def _clear(self) -> None:
        if self._drawn:
            # Up, and away with everything below.
            print(f"\x1b[{self._drawn}F\x1b[J", end="", flush=True)  # noqa: T201
            self._drawn, self._drawn_at = 0, 0.0

    def _say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201
