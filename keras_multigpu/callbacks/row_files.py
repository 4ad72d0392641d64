"""Writes rows to CSV files, or records to files of JSON lines, so that no reader sees half a line.

Lines are added by a single write to a file that is opened for appending. A file is begun, or
cut back when training goes on from a checkpoint, by writing it anew beside and renaming it.
"""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.checks import problem
from keras_multigpu.writing import whole

ENDINGS = (".csv", ".jsonl")


class RowFile:
    """A file that grows by rows or records.

    Args:
        path: The file, whose ending decides: .csv or .jsonl.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() not in ENDINGS:
            raise ValueError(
                problem(
                    "The file for the rows is of no known kind.",
                    "Expected a path that ends in .csv or .jsonl.",
                    "Change the ending.",
                    path=str(path),
                )
            )
        self.is_csv = self.path.suffix.lower() == ".csv"
        self.lines = 0
        self._columns: list[str] | None = None
        self._begun = False

    def go_on_after(self, lines: int) -> None:
        """Keep so many lines of the file and drop what was written after them."""
        self.lines, self._begun, self._columns = lines, False, None

    def add(self, rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> None:
        """Add rows, all of them or none.

        Args:
            columns: Of a CSV file, the columns in order.
        """
        if self.is_csv and self._columns is None:
            self._columns = list(columns)
        if not self._begun or not self.path.exists():
            self._begin()
        text = csv_lines(rows, self._columns or []) if self.is_csv else json_lines(rows)
        appended(self.path, text.encode())
        self.lines += len(rows)

    def _begin(self) -> None:
        """Write the header, and the lines of before the interruption if training goes on."""
        header = csv_lines([], self._columns or [], header=True) if self.is_csv else ""
        kept: list[str] = []
        if self.lines:
            found = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            complete = found[: found.rfind("\n") + 1].splitlines(keepends=True)
            if self.is_csv and complete and complete[0] != header:
                self._refuse_columns(complete[0].rstrip("\n"))
            kept = complete[self.is_csv :][: self.lines]
        with whole(self.path) as partial:
            partial.write_text(header + "".join(kept), encoding="utf-8", newline="")
        self.lines, self._begun = len(kept), True

    def _refuse_columns(self, found: str) -> None:
        raise ValueError(
            problem(
                "The file has other columns than the rows that are to be added to it.",
                "Expected the columns of the run that is gone on with.",
                "Choose another path, or the same metrics as before.",
                path=str(self.path),
                found=found,
                columns=",".join(self._columns or []),
            )
        )


def csv_lines(rows: Sequence[dict[str, Any]], columns: Sequence[str], header: bool = False) -> str:
    """Rows as lines of CSV; nothing stands where there is no value."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_lines(records: Sequence[dict[str, Any]]) -> str:
    """Records as lines of JSON, which knows no infinity: those are strings."""
    return "".join(f"{json.dumps(jsonable(one), allow_nan=False)}\n" for one in records)


def jsonable(value: Any) -> Any:
    """A value as strict JSON can hold it."""
    if isinstance(value, dict):
        return {name: jsonable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def appended(path: Path, content: bytes) -> None:
    """Add to a file in one write; what a full disk has left half written is taken back."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(handle).st_size
        written = os.write(handle, content)
        if written != len(content):
            os.ftruncate(handle, before)
            raise OSError(f"No space for {len(content)} bytes in {str(path)!r}.")
    finally:
        os.close(handle)
