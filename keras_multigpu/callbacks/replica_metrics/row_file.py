"""Writes rows to a CSV file, so that no reader sees half a line.

Lines are added by a single write to a file opened for appending. A file is started, or truncated
when training resumes from a checkpoint, by writing a new one and renaming it.
"""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.checks import require_ending, value_error
from keras_multigpu.writing import whole


class RowFile:
    """A CSV file that grows by rows."""

    def __init__(self, path: str | Path) -> None:
        self.path = require_ending(path, ".csv", "The file for the rows is not a CSV file.")
        self.lines = 0
        self._columns: list[str] = []
        self._begun = False

    def resume_after(self, lines: int) -> None:
        """Keep this many lines of the file and drop what was written after them."""
        self.lines, self._begun, self._columns = lines, False, []

    def add(self, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
        """Add rows, all of them or none."""
        self._columns = self._columns or list(columns)
        if not self._begun or not self.path.exists():
            self._begin()
        appended(self.path, csv_lines(rows, self._columns).encode())
        self.lines += len(rows)

    def _begin(self) -> None:
        """Write the header, and the lines from before the interruption if training resumes."""
        header = csv_lines([], self._columns, header=True)
        kept: list[str] = []
        if self.lines:
            found = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            complete = found[: found.rfind("\n") + 1].splitlines(keepends=True)
            if complete and complete[0] != header:
                self._refuse_columns(complete[0].rstrip("\n"))
            kept = complete[1:][: self.lines]
        with whole(self.path) as partial:
            partial.write_text(header + "".join(kept), encoding="utf-8", newline="")
        self.lines, self._begun = len(kept), True

    def _refuse_columns(self, found: str) -> None:
        raise value_error(
            "The columns of the file differ from those of the new rows.",
            "Expected the columns of the run that is resumed.",
            "Choose another path, or the same metrics as before.",
            path=str(self.path),
            found=found,
            columns=",".join(self._columns),
        )


def csv_lines(rows: Sequence[dict[str, Any]], columns: Sequence[str], header: bool = False) -> str:
    """Rows as lines of CSV; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def appended(path: Path, content: bytes) -> None:
    """Add to a file in one write; a write that a full disk cut short is undone."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(handle).st_size
        written = os.write(handle, content)
        if written != len(content):
            os.ftruncate(handle, before)
            raise OSError(f"No space for {len(content)} bytes in {str(path)!r}.")
    finally:
        os.close(handle)
