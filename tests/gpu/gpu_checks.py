"""Checks and times the package on GPUs: all of them, or one that is split in parts.

    python tests/gpu/gpu_checks.py                        all parts
    python tests/gpu/gpu_checks.py --only sums,parity     some of them
    python tests/gpu/gpu_checks.py --cpu                  tiny, on logical CPU devices

Each part is a module beside this one. It runs in a process of its own, which ends with the first
check that raises, hangs or aborts, since that may spoil the next; another one goes on after it.
The table has a line for each result; "ok" is empty where there is only a figure to compare.

gpu.json, in the folder that OUT names (else here), has the same, and is written after each part.
Parts of one chip share it: numbers, copies and memory can be judged there, but neither NCCL nor how
much faster two GPUs are than one. Where there is no GPU this says so, and checks nothing.
"""

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = {  # Seconds after which a check is given up; the most important parts come first.
    "facts": 60,
    "sums": 40,
    "parity": 90,
    "recurrent": 90,
    "strategies": 120,
    "traces": 150,
    "memory": 240,
    "times": 300,
    "spread": 120,
    "xla": 600,
    "ahead": 120,
}
WIDEST = 60
"""Letters of the table's "expected" and "got"; gpu.json has all of them."""
START = 90
"""Seconds that a process may take, besides, until its first check begins."""


def run_part(part: str, done: int) -> None:
    """Run a part's checks in this process, without the first ones, until one raises."""
    checks = importlib.import_module(part).checks()
    for name, check in list(checks.items())[done:]:
        tell("begins", name)
        try:
            found = check()
        except Exception as error:
            raised = f"{type(error).__name__}: {last_line(error)}"
            tell("rows", [failed(name, raised, traceback.format_exc())])
            return
        rows = found if isinstance(found, list) else [found]
        tell("rows", [row._asdict() for row in rows])
    tell("ends", part)


def last_line(error: Exception) -> str:
    """What TensorFlow says, without where; Python's own errors have one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("[[", "The error could"))]
    return said[-1][:300] if said else ""


def failed(name: str, why: str, details: str = "") -> dict[str, Any]:
    row = {"name": name, "expected": "a result", "got": why, "ok": False}
    return row | {"details": details[-4000:]}


def tell(word: str, what: Any) -> None:
    print("TOLD " + json.dumps([word, what], default=str), flush=True)


def results_of(part: str, ends: float) -> Iterator[dict[str, Any]]:
    """The rows of a part, whose checks run in as few processes as do not fail."""
    done = 0
    while time.monotonic() < ends:
        begun, under_way, why = done, "", "the process ended"
        with started(["--part", part, "--done", str(done)]) as (told, complaints):
            while True:
                patience = PARTS[part] + (0 if done > begun else START)
                try:
                    word, what = told.get(timeout=max(min(patience, ends - time.monotonic()), 0))
                except queue.Empty:
                    why = f"nothing for {patience} s" if time.monotonic() < ends else "no time left"
                    break
                if word == "begins":
                    under_way, done = what, done + 1
                elif word == "rows":
                    yield from what
                    under_way = ""
                elif word == "ends":
                    return
                else:
                    break
            if done == begun:
                yield failed(part, why, complaints())
                return
            if under_way:
                yield failed(under_way, why, complaints())
    yield failed(part, "no time left")


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[tuple["queue.Queue[Any]", Any]]:
    """This program in another process: what it tells, to its death, and how it complained."""
    told: queue.Queue[Any] = queue.Queue()
    command = [sys.executable, __file__, *arguments, *(a for a in sys.argv[1:] if a == "--cpu")]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )

        def listen() -> None:
            for line in process.stdout or ():
                if line.startswith("TOLD "):
                    told.put(json.loads(line.removeprefix("TOLD ")))
            told.put(("dies", None))

        def complaints() -> str:
            errors.seek(0)
            return errors.read()

        threading.Thread(target=listen, daemon=True).start()
        try:
            yield told, complaints
        finally:
            # With the processes that it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def table(results: dict[str, Any]) -> str:
    """A line for each row, in columns as wide as need be; what failed comes again at the end."""
    lines = [("check", "expected", "got", "ok")]
    for part, found in results.items():
        lines += [
            (f"{part}: {row['name']}", shown(row["expected"]), shown(row["got"]), mark(row["ok"]))
            for row in found["rows"]
        ]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    text = [
        f"{mark:<4}{name:<{widths[0]}}  {expected:<{widths[1]}}  {got}".rstrip()
        for name, expected, got, mark in lines
    ]
    bad = [name for name, _, _, verdict in lines if verdict == "NO"]
    text.append(f"not ok: {', '.join(bad)}" if bad else "all that can be judged is ok")
    return "\n".join(text)


def shown(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def mark(ok: bool | None) -> str:
    return "" if ok is None else "yes" if ok else "NO"


def gpus_are_seen() -> bool:
    """Whether TensorFlow sees a GPU, asked of another process: this one needs no memory of it."""
    program = "import tensorflow as tf, sys; sys.exit(not tf.config.list_physical_devices('GPU'))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true", help="tiny, on logical CPU devices")
    parser.add_argument("--within", type=float, default=3000, help="seconds for all parts")
    for hidden in ("--part", "--done", "--call"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part, int(arguments.done))
        return
    if arguments.call:
        module, function, *args = json.loads(arguments.call)
        result = getattr(importlib.import_module(module), function)(*args)
        print("RETURNS" + json.dumps(result), flush=True)
        return
    asked = arguments.only.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(
            f"--only: no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}"
        )
    if not arguments.cpu and not gpus_are_seen():
        print("TensorFlow sees no GPU on this machine: nothing was checked.")
        return
    target, ends = (
        Path(os.environ.get("OUT", ".")) / "gpu.json",
        time.monotonic() + arguments.within,
    )
    results: dict[str, Any] = {}
    for part in asked:
        began = time.monotonic()
        rows = list(results_of(part, ends))
        results[part] = {"seconds": round(time.monotonic() - began, 1), "rows": rows}
        temporary = target.with_suffix(".new")
        temporary.write_text(json.dumps(results, indent=1), encoding="utf-8")
        temporary.replace(target)
        print(f"{part}: {results[part]['seconds']} s", flush=True)
    print(table(results))
    sys.exit(any(row["ok"] is False for found in results.values() for row in found["rows"]))


if __name__ == "__main__":
    main()
