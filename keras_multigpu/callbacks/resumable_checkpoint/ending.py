"""When a run ends early: by a signal, which its workers heed together, or by one that fails.

Only the chief writes, as long as it lives. All workers resume from the checkpoint that the chief
has found, and all save and end after the same step, although a signal reaches them at different
times, or only one of them.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder, number_of
from keras_multigpu.callbacks.resumable_checkpoint.states import Callbacks, names_of_stateful
from keras_multigpu.cluster.environment import settings
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.workers import number_of_value

SECONDS = 1.0
"""How often the workers ask each other whether there is anything to do."""

# Steps may become slower after they were counted; more of them are not waited for.
MOST_STEPS = 1000

TURN = 0.2
"""Seconds by which each survivor waits longer than the one before for its turn to write."""

LONGEST_TURN = 3.0
POLL = 0.1

logger = logging.getLogger("keras_multigpu")


class StopSignals:
    """Notes the first signal; a second one takes effect immediately."""

    def __init__(self, names: Sequence[str], noted: Callable[[], None]) -> None:
        self._numbers = [getattr(signal, name) for name in names]
        self._noted = noted
        self._before: dict[int, Any] = {}
        self.pending: int | None = None

    def listen(self) -> None:
        """Handle the signals, which only the main thread can do."""
        self.pending = None
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.info("`fit` runs outside the main thread; signals end it without saving.")
            return
        # A process started in the background ignores Ctrl-C, and keeps doing so.
        heard = [n for n in self._numbers if signal.getsignal(n) is not signal.SIG_IGN]
        for number in heard:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            # None is a handler that Python does not know, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending is None:
            self.pending = number
            name = signal.Signals(number).name
            # Not through a log, which the signal may have interrupted.
            os.write(2, f"\n{name}: saving after this step; repeat to end immediately.\n".encode())
            self._noted()
            return
        self.ignore()
        os.kill(os.getpid(), number)

    def end(self) -> NoReturn:
        """End as the signal would: like Ctrl-C, or with the status of a signal."""
        number = self.pending
        assert number is not None
        self.ignore()
        self.pending = None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # The status that a shell reports for a process ended by a signal.
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Restore the handlers, and repeat a signal that was not acted on."""
        pending, self.pending = self.pending, None
        self.ignore()
        if pending is not None:
            signal.raise_signal(pending)


class Together:
    """The decisions that all workers of one `fit` take together."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.is_chief = group.is_chief
        self.is_spread = group.is_spread
        self.has_all = True
        """Whether this worker has all callbacks with a state that the chief has."""
        self._run = ""
        self._wait = self._done = 0
        self._asked_at = time.monotonic()

    def newest(self, files: CheckpointFolder, callbacks: Callbacks = ()) -> tuple[Any, Any]:
        """The newest whole checkpoint of the chief's folder, and what is in it."""
        found = files.newest() if self.is_chief else None
        if not self.is_spread:
            return found or (None, None)
        number = number_of(found[0]) if found else -1
        stateful = number_of_value(names_of_stateful(callbacks))
        own = [number, int(files.run or "0", 16), stateful]
        ((chiefs, run, of_chief), *_) = self._group.of_processes(own)
        self._run, self.has_all = f"{run:08x}", of_chief == stateful
        if self.is_chief or chiefs < 0:
            return found or (None, None)
        return files.read(chiefs)

    def asked(self, signal: int | None, is_due: bool, now: bool = False) -> tuple[int | None, bool]:
        """Which signal has reached any worker, and whether the chief's clock says "save"."""
        if not self.is_spread:
            return signal, is_due
        self._done += 1
        # Workers ask each other once per second, after a number of steps that the chief sets: an
        # exchange in each step would slow all of them down.
        if self._done < self._wait and not now:
            return None, False
        seconds = max(time.monotonic() - self._asked_at, 1e-6)
        wait = min(max(int(self._done / seconds * SECONDS), 1), MOST_STEPS)
        rows = self._group.of_processes([signal or 0, int(is_due), wait])
        self._done, self._asked_at, self._wait = 0, time.monotonic(), rows[0][2]
        return max(row[0] for row in rows) or None, bool(rows[0][1])

    def takes(self, files: CheckpointFolder) -> bool:
        """Whether this worker, after a failure, is the one that now has the folder to itself.

        The chief has it until its `fit` ends, and then one survivor at a time, the lowest first.
        """
        if self.is_chief:
            return True
        time.sleep(min(self._group.worker * TURN, LONGEST_TURN))
        latest = time.monotonic() + settings().heartbeat_timeout
        while True:
            try:
                files.open(self._run)
                return True
            except ValueError:
                # A chief that is frozen keeps it.
                if time.monotonic() > latest:
                    return False
            time.sleep(POLL)

    def wait(self) -> None:
        """Wait for the others, so that none ends while the chief is still writing."""
        if self.is_spread:
            self._group.agree(False)
