"""Starts the workers of one training, watches them, ends them together, and starts them again.

If a worker fails, the others wait for it, so all are ended.
TensorFlow cannot take a worker back into a running group, so all are restarted, on new ports; the
script resumes from its `ResumableCheckpoint`. A worker that fails soon after a start may be left
out of the next one.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from keras_multigpu.cluster.this_machine import LOOPBACK, free_ports
from keras_multigpu.processes.groups import POLL, Groups, Interrupts

LAST_LINES = 20
"""How many lines of a failed worker are repeated at the end."""

NAMED = re.compile(r"WorkerFailure: worker (\d+) \(")
"""Finds which worker another one blames, such as one that is frozen or ends more slowly."""

SOON = 120.0
"""Seconds after a start within which a worker that fails is left out of the next start."""

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
"""The signals that end all workers."""


class WorkerCommand(NamedTuple):
    """The command line of a worker, and the variables that are added to its environment."""

    command: list[str]
    variables: dict[str, str]


def on_this_machine(
    commands: Sequence[list[str]], variables: Sequence[Mapping[str, str]]
) -> list[WorkerCommand]:
    """Workers on free ports of this machine, with their commands and variables."""
    workers = tuple(f"{LOOPBACK}:{port}" for port in free_ports(len(commands)))
    return [
        WorkerCommand(command, {**own, **variables_of_worker(workers, index)})
        for index, (command, own) in enumerate(zip(commands, variables, strict=True))
    ]


def variables_of_worker(workers: Sequence[str], index: int) -> dict[str, str]:
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Failure:
    """Why a group of workers has ended.

    Attributes:
        what: A sentence without its full stop.
        code: The exit code of the launcher.
        lines: What the worker that failed printed last.
        worker: The worker that failed first.
        is_blamed: Whether another one has named it.
    """

    what: str
    code: int
    lines: list[str]
    worker: int
    is_blamed: bool


class Worker:
    """One worker of a group, and its last lines."""

    def __init__(
        self, index: int, command: WorkerCommand, groups: Groups, printer: "Printer"
    ) -> None:
        self.index = index
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._printer = printer
        # Python writes to a pipe in blocks, and a killed worker's last block would be lost.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.variables}
        self.group = groups.start(command.command, environment, self._write)

    def failure(self) -> Failure | None:
        code = self.group.exit_code()
        if not code:
            return None
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        lines = list(self.lines)
        named = [int(found[1]) for line in lines if (found := NAMED.search(line))]
        return Failure(
            f"worker {self.index} {how}",
            128 - code if code < 0 else code,
            lines,
            [*named, self.index][0],
            bool(named) and named[0] != self.index,
        )

    def _write(self, line: str) -> None:
        self.lines.append(line)
        self._printer.print(f"[worker {self.index}] {line}")


class Printer:
    """Prints lines until the reader goes away, which counts as a SIGTERM."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._lock = threading.Lock()

    def print(self, line: str) -> None:
        with self._lock:
            try:
                print(line, flush=True)  # noqa: T201
            except BrokenPipeError:  # As in `keras-multigpu launch ... | head`.
                # Python flushes its output once more when it ends, and would complain again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                # Not a second signal: the Ctrl-C that was the first may have ended the reader too,
                # and workers are saving.
                self._interrupts.first = self._interrupts.first or signal.SIGTERM


def launch(
    commands: Callable[[int, Sequence[int]], Sequence[WorkerCommand]],
    count: int,
    *,
    min_workers: int | None = None,
    max_restarts: int = 0,
    grace: float = 10.0,
) -> int:
    """Run workers until all have ended well or one has failed too often; return the exit code.

    That is 0, the code of the first worker that failed, or 128 and a signal's number.

    Args:
        commands: Called before each start with its number, from 0 on, and with the places of the
            workers that take part.
        count: How many places there are.
        min_workers: How many workers have to take part; by default all.
        max_restarts: How many times all are started again.
        grace: Seconds that workers have to end.
    """
    restarts = 0
    out: set[int] = set()
    with Interrupts(ENDING) as interrupts:
        printer = Printer(interrupts)
        while True:
            places = [place for place in range(count) if place not in out]
            began = time.monotonic()
            try:
                group = commands(restarts, places)
                failure = run_once(group, printer, interrupts, grace)
            except KeyboardInterrupt:  # The second signal; by now all are killed.
                failure = None
            if interrupts.first is not None:
                say(f"all workers were ended by {interrupts.first.name}.")
                return 128 + interrupts.first
            if failure is None:
                return 0
            if restarts == max_restarts:
                say("\n    ".join([f"{failure.what}. Its last lines:", *failure.lines]))
                return failure.code
            restarts += 1
            if time.monotonic() - began <= SOON:
                out.add(places[failure.worker])
            else:
                out.clear()
            if count - len(out) < (min_workers or count):
                out.clear()
            what = "starting all again"
            if out:
                without = " and ".join(f"number {place}" for place in sorted(out))
                what = f"going on with {count - len(out)} of {count} workers, without {without}"
            say(f"{failure.what}; {what} ({restarts} of {max_restarts}).")


def run_once(
    commands: Sequence[WorkerCommand],
    printer: Printer,
    interrupts: Interrupts,
    grace: float,
) -> Failure | None:
    """Start the workers and wait for their end, or for the first failure."""
    with Groups(grace) as groups:
        workers = [
            Worker(index, command, groups, printer) for index, command in enumerate(commands)
        ]
        failure = None
        while interrupts.first is None and failure is None:
            if all(worker.group.exit_code() == 0 for worker in workers):
                return None
            failure = next(filter(None, (worker.failure() for worker in workers)), None)
            time.sleep(POLL)
    if failure is None or not failure.is_blamed:
        return failure
    # The one that others blame may end after them: by now it has.
    first = workers[failure.worker]
    return replace(failure, what=f"worker {first.index} failed first", lines=list(first.lines))


def say(text: str) -> None:
    print(f"keras-multigpu launch: {text}", file=sys.stderr, flush=True)  # noqa: T201
