"""The parts of the scoreboard, each in processes that are ended if they crash or hang.

What was found is written after each check, so nothing that comes later can lose it.
"""

import json
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_multigpu.processes import new_process
from keras_multigpu.processes.groups import POLL, Groups, ending
from keras_multigpu.writing import write_text

TOLD = "TOLD "
"""What stands before a message to this module."""

START = 90
"""Seconds that a process may take, besides, until its first check begins."""

WIDEST = 100
"""Letters of a cell of the table; the JSON file has all of them."""


class Part(NamedTuple):
    """A part.

    Attributes:
        module: Has `checks`, a function that returns them by name.
        limit: Seconds after which a check is given up that has nothing to tell.
        arguments: Those of `checks`.
    """

    module: str
    limit: int
    arguments: Sequence[Any] = ()


HERE = __package__

PARTS = {  # In this order: a board that runs out of time has the most important figures.
    "facts": Part(f"{HERE}.machine", 60),
    "spread": Part(f"{HERE}.exactness", 90, ["spread"]),
    "exactness": Part(f"{HERE}.exactness", 90, ["exactness"]),
    "dense": Part(f"{HERE}.speed", 150, ["dense"]),
    "transformer": Part(f"{HERE}.speed", 150, ["transformer"]),
    "resnet50": Part(f"{HERE}.speed", 240, ["resnet50"]),
    "float16": Part(f"{HERE}.speed", 150, ["transformer", "mixed_float16"]),
    "tf32": Part(f"{HERE}.exactness", 90, ["tf32"]),
    "xla": Part(f"{HERE}.speed", 200, ["transformer", "float32", True]),
}

LEFT = 1 / 3
"""What a part leaves of the time to those after it."""

LEGEND = (
    "`one` is plain Keras on one device; `ours` is this package, and `stock` Keras with "
    "`MirroredStrategy`, on all, with as many examples for each device. Differences are the "
    "largest of a weight, log or prediction, relative to the largest value of its array."
)

Rows = list[dict[str, Any]]


def fill(
    parts: Sequence[str], folder: Path, within: float, version: str
) -> Iterator[tuple[str, Rows]]:
    """Run parts for at most this many seconds; each part and its rows, as they are written."""
    board: dict[str, Any] = {"keras_multigpu": version, "date": time.strftime("%Y-%m-%d")}
    board["parts"] = {}
    ends = time.monotonic() + within
    for part in parts:
        began = time.monotonic()
        left = 0 if part == parts[-1] else LEFT * (ends - began)
        rows: Rows = []
        board["parts"][part] = {"rows": rows}
        for row in rows_of(part, ends - left):
            rows.append({"got": None, "expected": "", "ok": None, "skipped": None} | row)
            board["parts"][part]["seconds"] = round(time.monotonic() - began, 1)
            write_text(folder / "scoreboard.json", f"{json.dumps(board, indent=1)}\n")
            write_text(folder / "scoreboard.md", f"{table(board)}\n")
        yield part, rows


def rows_of(part: str, ends: float) -> Iterator[dict[str, Any]]:
    """The rows of a part, whose checks run in as few processes as do not fail."""
    names, done, why = [part], 0, "no time was left"
    while done < len(names) and time.monotonic() < ends:
        begun = done
        with Groups(grace=0) as groups:
            told: queue.Queue[tuple[str, Any]] = queue.Queue()
            lines: deque[str] = deque(maxlen=40)

            def hear(line: str, told: Any = told, lines: deque[str] = lines) -> None:
                # TensorFlow may have left a line unfinished.
                before, _, message = line.partition(TOLD)
                if message:
                    told.put(tuple(json.loads(message)))
                if before:
                    lines.append(before)

            module, limit, arguments = PARTS[part]
            words = module, str(done), json.dumps(arguments)
            command = new_process.command(f"{HERE}.part", *words)
            settings = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
            group = groups.start(command, new_process.with_gpus(**settings), hear)
            while True:
                patience = limit + (START if done == begun else 0)
                word, what = heard(told, group, min(time.monotonic() + patience, ends))
                if word == "plan":
                    names = what
                elif word == "begins":
                    done += 1
                elif word == "row":
                    yield what
                else:
                    break
        under_way = names[max(done - 1, 0)]
        if word == "ends":
            return
        if word == "late" and time.monotonic() >= ends:
            # This one as well.
            done -= done > begun
        elif word in ("late", "dies"):
            ended = f"the process ended with {ending(group.exit_code())}"
            how = f"nothing for {patience} s" if word == "late" else ended
            yield {"name": under_way, "got": how, "ok": False, "details": "\n".join(lines)}
        if done == begun and time.monotonic() < ends:
            done, why = done + 1, "no check of this part can begin"
            break
    for name in names[done:]:
        yield {"name": name, "skipped": why}


def heard(told: "queue.Queue[tuple[str, Any]]", group: Any, latest: float) -> tuple[str, Any]:
    """What a process tells next; "dies" or "late" if it does not."""
    while time.monotonic() < latest:
        try:
            return told.get(timeout=POLL)
        except queue.Empty:
            # All that it has told is in the queue once it has an exit code.
            if group.exit_code() is not None and told.empty():
                return "dies", None
    return "late", None


def table(board: dict[str, Any]) -> str:
    """One Markdown table with a line for each figure."""
    lines = [
        f"keras_multigpu {board['keras_multigpu']}, {board['date']}",
        "",
        LEGEND,
        "",
        "| part | figure | result | expected | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part, found in board["parts"].items():
        for row in found["rows"]:
            skipped, ok = row["skipped"], row["ok"]
            verdict = {None: "measured", True: "ok", False: "NOT OK"}[ok]
            cells = [part, row["name"], shown(row["got"]), row["expected"]]
            cells.append(f"skipped: {skipped}" if skipped else verdict)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    text = f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
