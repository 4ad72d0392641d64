"""Starts the workers of one training, watches them, ends them together, starts them again.

A worker that fails, by an exception, a signal or silence, leaves the others waiting for it, so they
are all ended. TensorFlow cannot take a worker back into a running group, so all are restarted, on
new ports; the script resumes where `ResumableCheckpoint` left off. One that fails soon after its
start does not answer, and the others may go on without it.
"""

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_multigpu.cluster.worker_commands import WorkerCommand
from keras_multigpu.processes.groups import POLL, Group, Groups, Interrupts

LAST_LINES = 20
"""How many lines of a failed worker are repeated at the end."""

PORT_IS_TAKEN = ("Address already in use", "Could not start gRPC server")
"""What a worker prints whose port was taken since it was found free."""

NAMED = re.compile(r"WorkerFailure: worker (\d+) \(")
"""In what a worker prints which other one it blames, as one that froze or ends more slowly."""

OTHER_PORTS = 3
"""How many times in a row other ports are tried."""

SOON = 120.0
"""Seconds after a start within which a worker that fails is left out of the next start."""

TIMED_OUT = 124
"""What `timeout` ends with."""

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
"""The signals that end all workers."""


@dataclass(frozen=True)
class Failure:
    """Why a group of workers has ended, in a sentence, and which of them has failed, if known.

    `code` is what the launcher ends with.
    """

    what: str
    code: int
    lines: list[str]
    worker: int | None = None
    took_port: bool = False


class Worker:
    """One worker of a group, whose processes end together."""

    def __init__(
        self, index: int, command: WorkerCommand, groups: Groups, printer: "Printer"
    ) -> None:
        self.index = index
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._printer = printer
        # Into a pipe Python writes in blocks, and a killed worker's last one would be lost.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.variables}
        self.group: Group = groups.start(command.command, environment, self._write)

    def failure(self) -> Failure | None:
        code = self.group.exit_code()
        if not code:
            return None
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        lines = list(self.lines)
        taken = any(text in line for line in lines for text in PORT_IS_TAKEN)
        code = 128 - code if code < 0 else code
        named = [int(found[1]) for line in lines if (found := NAMED.search(line))]
        blamed = [*named, self.index][0]
        return Failure(f"worker {self.index} {how}", code, lines, blamed, taken)

    def _write(self, line: str) -> None:
        self.lines.append(line)
        self._printer.print(f"[worker {self.index}] {line}")


class Printer:
    """Prints lines as long as they are read; a reader that goes away counts as a SIGTERM."""

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
                # Not as a second signal: the first, a Ctrl-C, may have ended the reader too, and
                # workers are saving.
                self._interrupts.first = self._interrupts.first or signal.SIGTERM


def launch(
    commands: Callable[[int, Sequence[int]], Sequence[WorkerCommand]],
    count: int,
    *,
    min_workers: int | None = None,
    max_restarts: int = 0,
    max_silence: float | None = None,
    grace: float = 10.0,
) -> int:
    """Run workers until all have ended well, or one has failed too often; the exit code.

    That is 0, the code of the first worker that failed, or 128 and a signal's number.

    Args:
        commands: Is called with 0, 1, 2, ... for each start of the group, which takes other ports
            each time, and with the places that take part, of `count` in all.
        min_workers: How many have to take part; by default all.
    """
    starts = restarts = other_ports = 0
    out: set[int] = set()
    with Interrupts(ENDING) as interrupts:
        printer = Printer(interrupts)
        while True:
            places = [place for place in range(count) if place not in out]
            began = time.monotonic()
            try:
                group = commands(starts, places)
                failure = run_once(group, printer, interrupts, max_silence, grace)
            except KeyboardInterrupt:  # The second signal; by now all are killed.
                failure = None
            starts += 1
            if interrupts.first is not None:
                say(f"all workers were ended by {interrupts.first.name}.")
                return 128 + interrupts.first
            if failure is None:
                return 0
            if failure.took_port and other_ports < OTHER_PORTS:
                other_ports += 1
                say(f"the port of a worker was taken ({failure.what}); trying others.")
            elif restarts < max_restarts:
                restarts, other_ports = restarts + 1, 0
                if failure.worker is None or time.monotonic() - began > SOON:
                    out.clear()
                else:
                    out.add(places[failure.worker])
                if count - len(out) < (min_workers or count):
                    out.clear()
                what = "starting all again"
                if out:
                    what = f"going on with {count - len(out)} of {count} workers, without "
                    what += " and ".join(f"number {place}" for place in sorted(out))
                say(f"{failure.what}; {what} ({restarts} of {max_restarts}).")
            else:
                say("\n    ".join([f"{failure.what}. Its last lines:", *failure.lines]))
                return failure.code


def run_once(
    commands: Sequence[WorkerCommand],
    printer: Printer,
    interrupts: Interrupts,
    max_silence: float | None,
    grace: float,
) -> Failure | None:
    """Start the workers and wait for their end, or for the first failure."""
    with Groups(grace) as groups:
        workers = [
            Worker(index, command, groups, printer) for index, command in enumerate(commands)
        ]
        while interrupts.first is None:
            failures = [failure for worker in workers if (failure := worker.failure())]
            if failures:
                return failures[0]
            running = [worker for worker in workers if worker.group.exit_code() is None]
            if not running:
                return None
            quiet = time.monotonic() - max(worker.group.last_line_at for worker in workers)
            if max_silence is not None and quiet > max_silence:
                names = ", ".join(str(worker.index) for worker in running)
                what = f"no worker printed a line for {max_silence:g} s; still running: {names}"
                return Failure(what, TIMED_OUT, list(running[0].lines))
            time.sleep(POLL)
    return None


def say(text: str) -> None:
    print(f"keras-multigpu launch: {text}", file=sys.stderr, flush=True)  # noqa: T201
