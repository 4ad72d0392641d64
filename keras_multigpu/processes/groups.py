"""Child processes that end together, each with everything it has started.

Each is the leader of its own process group. So a Ctrl-C in the terminal reaches this process alone,
which then decides, and whatever a killed child leaves behind can be ended too.

    python -m keras_multigpu.processes.groups GRACE

is the watchdog, which ends the groups if this process dies without doing so.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from keras_multigpu.checks import printable
from keras_multigpu.processes import new_process

COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""The escape codes by which terminals change colors and move the cursor."""

POLL = 0.02
"""Seconds between two looks at the processes."""


def ending(code: int | None) -> str:
    """The name of the signal that ended a process, or its exit code."""
    return signal.Signals(-code).name if code and code < 0 else f"code {code}"


class Group:
    """A process that leads a process group; `write` gets each line that the group prints."""

    def __init__(self, process: subprocess.Popen[bytes], write: Callable[[str], None]) -> None:
        self.pid = process.pid
        self._process = process
        self._write = write
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs.

        What the process has left behind is killed first.
        """
        if self._process.returncode is None and self._has_ended():
            # Until `wait` collects the exit code no other process can get this process ID.
            self.send(signal.SIGKILL)
            self._process.wait()
            # Read the rest of its output, which a process outside the group may hold open.
            self._reader.join(timeout=1)
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            _signal_group(self.pid, number)

    def _has_ended(self) -> bool:
        # `WNOWAIT` only looks: the ID stays taken until the rest of the group is killed.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, look) is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                # Drop colors, and all but the last state of a progress bar.
                text = COLORS.sub("", line.decode(errors="replace"))
                self._write(printable(text.rstrip("\r\n").rpartition("\r")[2].rstrip("\b")))


class Groups:
    """Process groups that outlive neither the `with` block nor this process.

    Each process has `grace` seconds to end after SIGTERM.
    """

    def __init__(self, grace: float = 10.0) -> None:
        self._grace = grace
        self._groups: list[Group] = []

    def __enter__(self) -> "Groups":
        self._watchdog = subprocess.Popen(
            new_process.command(__name__, str(self._grace)),
            env=new_process.environment(),
            stdin=subprocess.PIPE,
            # Out of reach of the terminal's Ctrl-C, and of whoever ends this process's group.
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for group in self._running():
                group.send(signal.SIGTERM)
                group.send(signal.SIGCONT)  # A stopped process hears nothing else.
            latest = time.monotonic() + self._grace
            while self._running() and time.monotonic() < latest:
                time.sleep(POLL)
        finally:  # Also after a second Ctrl-C, which ends the grace.
            for group in self._groups:
                group.send(signal.SIGKILL)
            while self._running():
                time.sleep(POLL)
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        write: Callable[[str], None],
        cores: frozenset[int] | None = None,
    ) -> Group:
        """Start a process; a thread calls `write` with each line that it prints.

        The process and its children may use these cores, by default all cores of this process.
        """
        before = os.sched_getaffinity(0) if cores else None
        try:
            if cores:  # A new process inherits the cores of the thread that starts it.
                os.sched_setaffinity(0, cores)
            process = subprocess.Popen(
                command,
                env=environment,
                # A background group is stopped (SIGTTIN) when it reads from the terminal.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # One pipe for both keeps lines in the order in which they were written.
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        finally:
            if before:
                os.sched_setaffinity(0, before)
        self._tell_watchdog(process.pid)
        self._groups.append(Group(process, write))
        return self._groups[-1]

    def _running(self) -> list[Group]:
        for group in list(self._groups):
            if group.exit_code() is not None:
                self._groups.remove(group)
                self._tell_watchdog(-group.pid)
        return list(self._groups)

    def _tell_watchdog(self, number: int) -> None:
        assert self._watchdog.stdin is not None
        try:
            self._watchdog.stdin.write(b"%d\n" % number)
            self._watchdog.stdin.flush()
        except BrokenPipeError:  # It was killed.
            pass


def watch(grace: float) -> None:
    """Be the watchdog: read `12` when group 12 starts, `-12` when it ends, and end what is left.

    The input ends when the process that writes it does.
    """
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    latest = time.monotonic() + grace
    groups = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    while groups and time.monotonic() < latest:
        time.sleep(POLL)
        groups = {group for group in groups if _signal_group(group, 0)}
    for group in groups:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal; False if nothing of the group is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Interrupts:
    """Notes signals, so that a process can end its children before it ends itself.

    Inside the `with` block `first` is the first signal; a second one raises `KeyboardInterrupt`. A
    signal that this process ignores stays ignored: shells start background jobs like that, to
    survive a Ctrl-C, and so does `nohup`.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.first: signal.Signals | None = None
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Python handles signals in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            handled = [n for n in self._numbers if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._note) for each in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            raise KeyboardInterrupt
        self.first = signal.Signals(number)


if __name__ == "__main__":
    watch(float(sys.argv[1]))
