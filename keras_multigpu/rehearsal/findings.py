"""What a rehearsal finds, in files of its folder, to which all processes of the script append."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        where: Which `fit`, or the script.
        check: What was tried.
        verdict: "ok", "fails" (a real run would), or "note".
        says: What came of it.
        do: How to mend it.
    """

    where: str
    check: str
    verdict: str
    says: str
    do: str = ""


class Notes:
    """Lines that stay when the process that wrote them is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, kind: str, *values: Any) -> None:
        line = (json.dumps(values) + "\n").encode()
        # One short write: the lines of several processes do not mix.
        file = os.open(self.folder / kind, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line)
        os.close(file)

    def read(self, kind: str) -> list[list[Any]]:
        path = self.folder / kind
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def to_install(error: BaseException) -> str:
    """What to do about a package that is missing; empty if it is something else."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install what has the module {error.name}: `pip install {error.name}`?"
    # TensorFlow's own error, for `tf.summary` behind the callback.
    return "`pip install tensorboard`." if "TensorBoard is not installed" in str(error) else ""
