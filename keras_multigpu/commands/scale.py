"""`keras-multigpu scale`: measure how a script's training scales with the number of replicas."""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from keras_multigpu.cluster.this_machine import visible_gpus
from keras_multigpu.commands.usage import at_least, check_script, usage_error
from keras_multigpu.pictures import write_png
from keras_multigpu.processes import new_process
from keras_multigpu.processes.groups import POLL, Groups
from keras_multigpu.scaling import report
from keras_multigpu.scaling.report import GLOBAL, NO_MEMORY, REPLICA
from keras_multigpu.writing import time_text, write_text

LAST_LINES = 40
"""How many lines of a script that failed are shown."""

FIRST = 1800.0
"""Seconds that the first turn has: a script may read much before it trains."""

LEAST, TIMES = 600.0, 10
"""A later turn has as many times as long as the longest before, and no less than this."""

ANSWER = 2.0
"""Seconds within which a script that hangs shows where, if it can."""

HANGS = "It hangs. What its threads do, the innermost functions first:"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "scale",
        help="measure how a script's training scales with the number of replicas",
        description="Run a script's first `fit` for a short while on each number of replicas, in "
        "turns, with its global batch and with as much for each replica; write a table and a "
        "picture, and name what limits the scaling first.",
    )
    add, whole = parser.add_argument, at_least(int, 1)
    add("script", metavar="SCRIPT", help="a script that trains with `fit`; it stays as it is")
    add("--arguments", default="", metavar="TEXT", help="the script's own arguments, as one text")
    numbers = "numbers of replicas (default: 1, 2, 4, ... and all GPUs; without GPUs 1 2)"
    add("--replicas", type=whole, nargs="+", metavar="N", help=numbers)
    add("--rounds", type=whole, default=3, metavar="N", help="turns of each (default: 3)")
    seconds = "how long a turn measures (default: 6)"
    add("--seconds", type=at_least(float, 0), default=6.0, metavar="S", help=seconds)
    where = "for scaling.md and scaling.png (default: this one)"
    add("--folder", type=Path, default=Path(), help=where)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_script(arguments.script)
    gpus = len(visible_gpus())
    counts = sorted(set(arguments.replicas or usual_counts(gpus)))
    turns = measured(counts, arguments)
    tables = {fixed: report.rows_of(turns[fixed]) for fixed in (GLOBAL, REPLICA)}
    title = f"Scaling of {Path(arguments.script).name}"
    cores = f"logical CPU devices, which share {len(os.sched_getaffinity(0))} cores"
    lines = [
        f"# {title}",
        "",
        f"Medians; rounds: {arguments.rounds}, of {arguments.seconds:g} s after a warm-up. The "
        f"replicas are {'GPUs' if gpus else f'{cores}: this says nothing about GPUs'}.",
    ]
    for fixed, rows in tables.items():
        limit = report.first_limit(fixed, rows, shares_cores=not gpus)
        lines += ["", f"With the {fixed} fixed:", "", *report.table_of(rows)]
        lines += ["", f"First limit: {limit}"]
    text = "\n".join(lines)
    print(text)
    write_text(arguments.folder / "scaling.md", f"{text}\n")
    try:
        write_png(report.picture_of(tables, title), arguments.folder / "scaling.png")
    except ImportError as error:
        print(f"There is no picture. {error}", file=sys.stderr)
    return 0


def usual_counts(gpus: int) -> list[int]:
    """1, 2, 4, ... and all GPUs."""
    most = gpus or 2
    return [*(2**power for power in range(most) if 2**power < most), most]


def measured(counts: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """The turns by what is fixed and by number of replicas; a number that fails has no more."""
    took: list[float] = []
    turns: dict[str, dict[int, list[dict[str, Any]]]] = {
        fixed: {count: [] for count in counts} for fixed in (GLOBAL, REPLICA)
    }
    # With the fewest replicas both are the same.
    first = turns[REPLICA][counts[0]] = turns[GLOBAL][counts[0]]
    plan = [(GLOBAL, count) for count in counts] + [(REPLICA, count) for count in counts[1:]]
    for number in range(arguments.rounds):
        # Every other round backwards, so that a machine that slows down favors no number.
        for fixed, count in plan if number % 2 == 0 else plan[::-1]:
            of_count = turns[fixed][count]
            if of_count and "failed" in of_count[-1]:
                continue
            settings = {
                "replicas": count,
                "most": counts[-1],
                "times_batch": count / counts[0] if fixed == REPLICA else 1,
                "seconds": arguments.seconds,
            }
            limit = max(LEAST, TIMES * max(took)) if took else FIRST
            began = time.monotonic()
            found = measure(settings, arguments, limit + TIMES * arguments.seconds)
            took.append(time.monotonic() - began)
            of_count.append(found)
            result = found.get("failed") or f"{1e3 * found['step_time']:.1f} ms a step"
            what = f"round {number + 1} of {arguments.rounds}, replicas: {count}, {fixed} fixed"
            print(f"{what}: {result}", file=sys.stderr, flush=True)
            if "failed" in first[-1]:
                raise usage_error(
                    "The script cannot be measured.",
                    "Expected a script that runs, and trains with `fit`.",
                    "Its last lines, and where it is if it hangs, are above.",
                    failed=first[-1]["failed"],
                    replicas=counts[0],
                )
    return turns


def measure(
    settings: dict[str, Any], arguments: argparse.Namespace, limit: float
) -> dict[str, Any]:
    """What a turn finds in a process of its own, or why it `failed`; it has `limit` seconds."""
    lines: deque[str] = deque(maxlen=LAST_LINES)
    with tempfile.TemporaryDirectory() as folder, Groups() as groups:
        result = Path(folder, "turn.json")
        words = [arguments.script, *shlex.split(arguments.arguments)]
        told = json.dumps({**settings, "result": str(result)})
        command = new_process.command("keras_multigpu.scaling.turn", told, *words)
        group = groups.start(command, new_process.with_gpus(), lines.append)
        latest = time.monotonic() + limit
        while (code := group.exit_code()) is None and time.monotonic() < latest:
            time.sleep(POLL)
        if code is None:
            lines.append(HANGS)
            group.send(signal.SIGUSR1)
            time.sleep(ANSWER)
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
    print(*lines, sep="\n", file=sys.stderr)
    if code is None:
        return {"failed": f"it hangs: no end after {time_text(limit)}"}
    if code == -9 or any("ResourceExhaustedError" in line for line in lines):
        return {"failed": NO_MEMORY}
    said = [line for line in lines if line.strip()]
    return {"failed": said[-1] if said else f"exit code {code}"}
