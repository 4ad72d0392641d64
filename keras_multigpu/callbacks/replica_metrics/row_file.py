"""A CSV file that grows by rows, and continues where a resumed run was interrupted."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.checks import require_ending, value_error
from keras_multigpu.writing import whole


class RowFile:
    """A CSV file that grows by rows; missing values are empty."""

    def __init__(self, path: str | Path) -> None:
        self.path = require_ending(path, ".csv", "The file for the rows is not a CSV file.")
        self.resume_after(0)

    def resume_after(self, lines: int) -> None:
        """Keep this many lines of the file and drop what was written after them."""
        self.lines, self._begun = lines, False

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        header = text.getvalue()
        writer.writerows(rows)
        if not self._begun or not self.path.exists():
            self._begin(header)
        content = text.getvalue().removeprefix(header).encode()
        # In a single write, so that no reader sees half a line.
        with self.path.open("ab", buffering=len(content) + 1) as file:
            file.write(content)
        self.lines += len(rows)

    def _begin(self, header: str) -> None:
        """Write the header, and the lines from before the interruption if training resumes."""
        found: list[str] = []
        if self.lines and self.path.exists():
            found = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if found and found[0] != header:
            raise value_error(
                "The columns of the file differ from those of the new rows.",
                "Expected the columns of the run that is resumed.",
                "Choose another path, or the same metrics as before.",
                path=str(self.path),
                found=found[0].rstrip(),
                columns=header.rstrip(),
            )
        kept = [line for line in found[1 : self.lines + 1] if line.endswith("\n")]
        with whole(self.path) as partial:
            partial.write_text(header + "".join(kept), encoding="utf-8", newline="")
        self.lines, self._begun = len(kept), True
