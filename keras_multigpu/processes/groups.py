"""Processes that end together, each with all that it has started.

Each is the leader of a process group of its own, so that a Ctrl-C in the terminal reaches this
process alone, which then decides, and so that what a killed process leaves behind can be ended.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from keras_multigpu.checks import printable, runtime_error
from keras_multigpu.processes import new_process

COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""What terminals take for colors and moves."""

POLL = 0.02
"""Seconds between two looks at the processes."""


class Group:
    """A process that leads a process group; each line that the group prints goes to `write`."""

    def __init__(self, process: subprocess.Popen[bytes], write: Callable[[str], None]) -> None:
        self.pid = process.pid
        self.last_line_at = time.monotonic()
        self._process = process
        self._write = write
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """None while the process runs; then its exit code, negative for a signal.

        What the process has left behind is killed first.
        """
        if self._process.returncode is None and self._has_ended():
            # Until its end is noted no other process can get its number.
            self.send(signal.SIGKILL)
            self._process.wait()
            # The end of its output; a process that has left the group may hold it open.
            self._reader.join(timeout=1)
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def _has_ended(self) -> bool:
        if hasattr(os, "waitid"):
            # `WNOWAIT` only looks: the number stays taken until the rest of the group is killed.
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, look) is not None
        # macOS before Python 3.13: `ps` shows an ended process as "Z".
        ps = ["ps", "-o", "stat=", "-p", str(self.pid)]
        return "Z" in subprocess.run(ps, capture_output=True, text=True, check=False).stdout

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.last_line_at = time.monotonic()
                # Colors are left out, and a progress bar goes back to the start of its line.
                text = COLORS.sub("", line.decode(errors="replace"))
                self._write(printable(text.rstrip("\r\n").rpartition("\r")[2].rstrip("\b")))


class Groups:
    """Processes of which none outlives the `with` block, nor this process.

    After SIGTERM a process has `grace` seconds to end.
    """

    def __init__(self, grace: float = 10.0) -> None:
        if os.name != "posix":
            raise runtime_error(
                "Processes cannot be started in groups on this system.",
                "Expected Linux or macOS.",
                "On Windows use WSL2, where TensorFlow has GPUs too.",
                system=os.name,
            )
        self.grace = grace
        self._groups: list[Group] = []

    def __enter__(self) -> "Groups":
        self._watchdog = subprocess.Popen(
            new_process.command("keras_multigpu.processes.watchdog", str(self.grace)),
            env=new_process.environment(),
            stdin=subprocess.PIPE,
            # Neither the terminal's Ctrl-C nor the end of this process's group reaches it.
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.end()
        finally:
            # A second Ctrl-C: no more grace.
            for group in self._groups:
                group.send(signal.SIGKILL)
            while any(group.exit_code() is None for group in self._groups):
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

        It and all that it starts may use these cores, or by default all of this process.
        """
        before = os.sched_getaffinity(0) if cores else None
        try:
            if cores:  # Of this thread; a new process has those of the thread that starts it.
                os.sched_setaffinity(0, cores)
            process = subprocess.Popen(
                command,
                env=environment,
                # A group that is not the terminal's is stopped (SIGTTIN) when it reads from it.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Both in one pipe, so that lines stay in the order in which they were written.
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        finally:
            if before:
                os.sched_setaffinity(0, before)
        self._tell_the_watchdog(process.pid)
        self._groups.append(Group(process, write))
        return self._groups[-1]

    def end(self) -> None:
        """Send SIGTERM to all that run, and kill those that do not end within the grace."""
        for group in self.running():
            group.send(signal.SIGTERM)
            group.send(signal.SIGCONT)  # One that is stopped hears it as well.
        latest = time.monotonic() + self.grace
        while self.running() and time.monotonic() < latest:
            time.sleep(POLL)
        for group in self.running():
            group.send(signal.SIGKILL)
        while self.running():
            time.sleep(POLL)

    def running(self) -> list[Group]:
        """Those that have not ended."""
        for group in list(self._groups):
            if group.exit_code() is not None:
                self._groups.remove(group)
                self._tell_the_watchdog(-group.pid)
        return list(self._groups)

    def _tell_the_watchdog(self, number: int) -> None:
        assert self._watchdog.stdin is not None
        try:
            self._watchdog.stdin.write(b"%d\n" % number)
            self._watchdog.stdin.flush()
        except BrokenPipeError:  # It was killed.
            pass
