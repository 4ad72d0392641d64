"""The demo's comparison: one device, two replicas with this package, two with stock Keras."""

import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from keras_multigpu.commands.demo_cases import BATCH_SIZE
from keras_multigpu.commands.demo_cases import CASES
from keras_multigpu.commands.demo_cases import EPOCHS
from keras_multigpu.commands.demo_cases import WAYS
from keras_multigpu.commands.demo_cases import Result
from keras_multigpu.commands.demo_cases import Results
from keras_multigpu.commands.demo_cases import weights_differ_by
from keras_multigpu.processes import new_process

SECONDS = 100
"""How long one way may take."""

HEADINGS = ("", "final loss", "accuracy", "weights differ by")


class Comparison(contextlib.AbstractContextManager["Comparison"]):
    """Processes that train in the background, ended at the latest when the context is left.

    They run on logical CPU devices, whose arithmetic is the same on every machine.
    """

    def __init__(self, digits: Path) -> None:
        self._digits = digits
        self._folder = tempfile.TemporaryDirectory()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._deadlines: dict[str, float] = {}

    def __exit__(self, *_: Any) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def start(self, way: str) -> None:
        """Start training in one of the ways."""
        self._deadlines[way] = time.monotonic() + SECONDS
        with open(self._path(way, "log"), "wb") as log:
            self._processes[way] = subprocess.Popen(
                new_process.command(
                    "keras_multigpu.commands.demo_trainings",
                    *(way, str(self._digits), str(self._path(way, "json"))),
                ),
                env=new_process.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self) -> Results:
        """Wait for all ways; their results, which tell of crashes too."""
        return {way: self._wait_for(way) for way in self._processes}

    def _wait_for(self, way: str) -> list[Result]:
        process, end = self._processes[way], "crashed"
        try:
            process.wait(max(1.0, self._deadlines[way] - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            end = f"no result in {SECONDS} s"
        path = self._path(way, "json")
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if way != "stock" and len(done) < len(CASES):
            log = self._path(way, "log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"The demo's training in the way {way!r} {end}:\n{log[-3000:]}")
        missing = [Result([], None, [], end)] * (len(CASES) - len(done))
        return [Result(*values) for values in done] + missing

    def _path(self, way: str, kind: str) -> Path:
        return Path(self._folder.name, f"{way}.{kind}")


def table(results: Results) -> str:
    """The results of all cases, as text."""
    width = 2 + max(map(len, WAYS.values()))
    lines = [f"{HEADINGS[0]:{width}}  {HEADINGS[1]:>10}  {HEADINGS[2]:>8}  {HEADINGS[3]:>17}"]
    for index, case in enumerate(CASES):
        lines.append(f"{case.title}, {case.batches} (of {BATCH_SIZE})")
        for way, label in WAYS.items():
            columns = row(results[way][index], results["one"][index], way == "one")
            lines.append(f"  {label:{width - 2}}  {columns}")
    return "\n".join(lines)


def row(result: Result, one: Result, is_one: bool) -> str:
    """One way's result in columns."""
    if result.error:
        after = f" in epoch {len(result.losses) + 1}" if len(result.losses) < EPOCHS else ""
        return f"failed{after}: {result.error}"
    difference = "-" if is_one else f"{weights_differ_by(one, result):.0e}"
    return f"{result.losses[-1]:>10.4f}  {result.accuracy:>8.1%}  {difference:>17}"
