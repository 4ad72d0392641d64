"""Notes a Ctrl-C, so that a process can end its children before it ends itself."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While the `with` block lasts `first` is the first signal; the next is `KeyboardInterrupt`.

    One that this process ignores stays ignored: by that a shell lets what runs in the background
    live on after a Ctrl-C, and `nohup` after the end of its terminal.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.first: signal.Signals | None = None
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        # In a thread Python hears no signals; nothing happens there.
        if threading.current_thread() is threading.main_thread():
            heard = [n for n in self._numbers if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._note) for each in heard}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            raise KeyboardInterrupt
        self.first = signal.Signals(number)
