"""Signals that ask a process to end, kept until a good moment comes."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

_log = logging.getLogger("keras_multigpu")


class StopSignals:
    """Notes the first signal; a second one acts at once, as if nobody listened."""

    def __init__(self, names: Sequence[str], noted: Callable[[], None]) -> None:
        self._numbers = [getattr(signal, name) for name in names]
        self._noted = noted
        self._before: dict[int, Any] = {}
        self.pending: int | None = None

    def listen(self) -> None:
        """Take the signals; only the main thread can, and others leave them as they are."""
        self.pending = None
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.info("`fit` runs outside of the main thread; signals end it without saving.")
            return
        # Whoever started the process in the background lets it ignore Ctrl-C; that stays so.
        heard = [n for n in self._numbers if signal.getsignal(n) is not signal.SIG_IGN]
        for number in heard:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Leave the signals to who had them before."""
        for number, handler in self._before.items():
            # None stands for a handler that Python does not know; it cannot be given back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending is None:
            self.pending = number
            name = signal.Signals(number).name
            # Not through a log, in the middle of which the signal may have come.
            os.write(2, f"\n{name}: saving after this step; again to end at once.\n".encode())
            self._noted()
            return
        self.ignore()
        os.kill(os.getpid(), number)

    def end(self) -> NoReturn:
        """End as the signal asks for: as Ctrl-C does, or with the status of a signal."""
        number = self.pending
        assert number is not None
        self.ignore()
        self.pending = None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # The status that a shell sees of a process that a signal has ended.
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Stop listening; a signal that nobody has acted on comes again."""
        pending, self.pending = self.pending, None
        self.ignore()
        if pending is not None:
            signal.raise_signal(pending)
