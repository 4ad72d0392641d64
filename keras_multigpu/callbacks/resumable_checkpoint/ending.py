"""How a run ends early: after a signal, or after a worker has failed.

Only the chief writes, as long as it lives. All workers resume from the checkpoint that the chief
found, and all end after the same step, although a signal may reach them at different times, or only
one of them.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.cluster.environment import settings
from keras_multigpu.training.replica_group import ReplicaGroup

SECONDS = 1.0
"""How often the workers exchange signals, in seconds."""

# Steps may become slower, so workers never wait for more of them.
MOST_STEPS = 1000

TURN = 0.2
"""After a failure, each survivor waits this many seconds longer than the one before it."""

LONGEST_TURN = 3.0
POLL = 0.1

logger = logging.getLogger("keras_multigpu")


class StopSignals:
    """Records the first signal; a second one takes effect immediately."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._before: dict[int, Any] = {}
        self.pending: int | None = None

    def listen(self) -> None:
        """Handle the signals, which works in the main thread only."""
        self.pending = None
        if threading.current_thread() is not threading.main_thread():
            logger.info("`fit` runs outside the main thread; signals end it without saving.")
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            # A process started in the background ignores Ctrl-C, and keeps doing so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            # None stands for a handler that was not set in Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending is None:
            self.pending = number
            name = signal.Signals(number).name
            # Not through the log, which the signal may have interrupted.
            os.write(2, f"\n{name}: saving after this step; repeat to end immediately.\n".encode())
            self._on_first()
            return
        self.ignore()
        os.kill(os.getpid(), number)

    def end(self) -> NoReturn:
        """End as the signal would: like Ctrl-C, or with the status of a signal."""
        number, self.pending = self.pending, None
        assert number is not None
        self.ignore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt("everything is saved; run the same command again to resume")
        # The status that a shell reports for a process ended by a signal.
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Restore the handlers, and repeat a signal that came too late to be handled."""
        pending, self.pending = self.pending, None
        self.ignore()
        if pending is not None:
            signal.raise_signal(pending)


class Consensus:
    """The decisions that all workers of one `fit` make together."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.is_chief = group.is_chief
        self.is_spread = group.is_spread
        self._run = ""
        self._interval = self._steps = 0
        self._asked_at = time.monotonic()

    def newest(self, files: CheckpointFolder) -> tuple[Any, Any]:
        """The newest complete checkpoint of the chief's folder, and its content."""
        number, content = (files.newest() if self.is_chief else None) or (-1, None)
        if self.is_spread:
            own = [number, int(files.run or "0", 16)]
            ((number, run), *_) = self._group.exchange_numbers(own)
            self._run = f"{run:08x}"
        if number < 0:
            return None, None
        return files.at(number), content if self.is_chief else files.read(number)

    def poll(self, signal: int | None, is_due: bool, now: bool = False) -> tuple[int | None, bool]:
        """The signal that has reached any worker, and whether the chief has to save by its clock.

        Workers exchange these once per second, after a number of steps that the chief sets, because
        an exchange in each step would slow all of them down. `now` does not wait for it.
        """
        if not self.is_spread:
            return signal, is_due
        self._steps += 1
        if self._steps < self._interval and not now:
            return None, False
        seconds = max(time.monotonic() - self._asked_at, 1e-6)
        interval = min(max(int(self._steps / seconds * SECONDS), 1), MOST_STEPS)
        rows = self._group.exchange_numbers([signal or 0, int(is_due), interval])
        self._steps, self._asked_at, self._interval = 0, time.monotonic(), rows[0][2]
        return max(row[0] for row in rows) or None, bool(rows[0][1])

    def take_over(self, files: CheckpointFolder) -> bool:
        """Whether this worker, after a failure, is the one to write.

        The chief is, as long as it lives, and then one survivor at a time, the lowest first.
        """
        if self.is_chief:
            return True
        if isinstance(files.path, str):
            # Nothing in a bucket says whether the chief, which saves too, is gone.
            return False
        time.sleep(min(self._group.worker * TURN, LONGEST_TURN))
        latest = time.monotonic() + settings().heartbeat_timeout
        while True:
            try:
                files.open(self._run)
                return True
            except ValueError:
                # A chief that hangs still holds the folder.
                if time.monotonic() > latest:
                    return False
            time.sleep(POLL)

    def wait(self) -> None:
        """Wait for the others, so that none ends while the chief is still writing."""
        if self.is_spread:
            self._group.any_worker(False)
