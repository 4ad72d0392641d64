"""Lines between workers: one that breaks without a goodbye means that a worker has died.

    worker 1 ──┐                  what a worker says before it fails, the chief passes on;
    worker 2 ──┴──> chief         a line that breaks before that, or before a goodbye: it has died

They are the connections of the meeting. While TensorFlow joins the workers it waits for all of them
and ignores signals: a thread ends the process as soon as one of the others is gone or gives no sign
of life.

Later TensorFlow's heartbeats find a worker that is frozen, or whose machine has lost its power.
Alone they are not enough (tried on TensorFlow 2.21, two workers, a timeout of 10 s). A worker that
is killed, and one whose script raises, is noticed after 9 s instead of 0.1, and always as "stopped
sending heartbeats". While workers join there are none yet: a chief whose worker never comes waits
silently, and ignores Ctrl-C and SIGTERM.
"""

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster.environment import settings
from keras_multigpu.cluster.lines import Line
from keras_multigpu.keras_internals import cluster_internals

POLL = 0.1
"""Seconds between two looks at the others while TensorFlow joins them."""

logger = logging.getLogger("keras_multigpu")


def name_of(workers: Sequence[str], index: int) -> str:
    return f"worker {index} ({workers[index]})"


def marked(what: str) -> str:
    """A sentence, marked so that it is found among TensorFlow's own words."""
    return f"keras_multigpu: {what} :keras_multigpu"


def in_words(error: BaseException) -> str:
    """An error's class, and what it says; a `KeyboardInterrupt` says nothing."""
    return ": ".join(filter(None, [type(error).__name__, str(error)]))[:2000]


class Lifelines:
    """The lines of this process, to the chief or as the chief to all others; who said goodbye."""

    def __init__(self, workers: Sequence[str], index: int, lines: Mapping[int, Line]) -> None:
        self._workers, self._index = list(workers), index
        self._lines = dict(lines)
        self._is_over = False
        # Who has not been joined by TensorFlow yet; and those who wait for that, with the time at
        # which they were last heard of.
        self._joining = {index, *lines}
        self._heard_at: dict[int, float] = {}
        self.ended: list[int] = []
        self._lock = threading.Lock()
        self._joins = threading.current_thread()
        self._process = os.getpid()
        atexit.register(self.say_goodbye)
        for other, line in lines.items():
            line.connection.settimeout(None)
            in_background(self.listen, line, other)

    def fail(self, what: str, heard_from: int | None = None) -> None:
        """Let all workers fail for a reason, unless they fail already."""
        with self._lock:
            known, self._is_over = self._is_over, True
        if known:
            return
        for other, line in list(self._lines.items()):
            if other != heard_from:
                line.say(fails=what)
        if self._index not in self._joining:
            report(what)
        elif threading.current_thread() is not self._joins:
            end(what, self._workers, self._index)

    def say_goodbye(self) -> None:
        """Say that Python ends, and if that is so because of an error."""
        # A process that was forked off has these lines too, and ends while its parent continues.
        if os.getpid() != self._process:
            return
        # Python keeps uncaught errors here.
        error = getattr(sys, "last_value", None)
        if error is not None:
            name = name_of(self._workers, self._index)
            self.fail(f"{name} failed: {in_words(error)}")
        self._is_over = True
        self._say(goodbye=True)

    def joined(self) -> None:
        """TensorFlow has joined the workers."""
        self._joining.discard(self._index)
        self._say(joined=True)

    def watch(self) -> None:
        """While TensorFlow joins the workers, see that all others live, and heed SIGTERM."""
        wanted, latest = settings(), time.monotonic() + settings().exchange_timeout
        # Until now no thread could run, and what others say has not been read.
        self._heard_at = dict.fromkeys(self._heard_at, time.monotonic())
        while self._index in self._joining and not self._is_over:
            cluster_internals.let_sigterm_end()
            self._say(joins=True)
            now = time.monotonic()
            names = [name_of(self._workers, other) for other in self._joining - {self._index}]
            for other in self._joining & {*self._heard_at}:
                if now - self._heard_at[other] > wanted.heartbeat_timeout:
                    self.fail(f"{name_of(self._workers, other)} gave no sign of life")
            if now > latest:
                who = " and ".join(names) or "the workers"
                self.fail(
                    f"TensorFlow has not joined {who} within {wanted.exchange_timeout} seconds"
                )
            time.sleep(POLL)

    def listen(self, line: Line, other: int) -> None:
        """Listen to a worker until it says that it ends, or its line breaks."""
        # The system closes the lines of a process that is killed.
        what = f"{name_of(self._workers, other)} is gone"
        with contextlib.suppress(EOFError), contextlib.closing(line):
            while (message := line.next()) is not None:
                match message:
                    case {"joins": True}:
                        self._heard_at[other] = time.monotonic()
                    case {"joined": True}:
                        self._joining.discard(other)
                    case {"fails": str(what)}:
                        break
                    case {"goodbye": True}:
                        what = ""
                        break
        del self._lines[other]
        if what:
            self.fail(what, heard_from=other)
        else:
            self.ended.append(other)

    def _say(self, **message: object) -> None:
        for line in list(self._lines.values()):
            line.say(**message)


_held: Lifelines | None = None


@contextlib.contextmanager
def joining(workers: Sequence[str], index: int, lines: Mapping[int, Line]) -> Iterator[None]:
    """Hold the lines of this process until Python ends; in this context TensorFlow joins it."""
    global _held
    if not lines:
        yield
        return
    held = _held = Lifelines(workers, index, lines)
    try:
        begin = functools.partial(in_background, held.watch)
        with cluster_internals.threads_run_while_joining(begin), interruptible():
            yield
    except BaseException as error:
        held.fail(f"{name_of(workers, index)} failed: {in_words(error)}")
        raise
    held.joined()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end this process though it is inside of TensorFlow, unless a handler does more."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(what: str, workers: Sequence[str], index: int) -> None:
    """End this process, which is inside of TensorFlow, with a sentence."""
    text = problem(
        f"{what}.",
        "Expected all workers to join.",
        "Look at what that worker has printed last, then start all of them again.",
        worker=name_of(workers, index),
    )
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"keras_multigpu.cluster.failures.WorkerFailure: {text}\n")
        sys.stderr.flush()
    os._exit(1)


def ended() -> list[int]:
    """The workers that have come to the end of their scripts, as far as this one has heard."""
    return [] if _held is None else _held.ended


def fail(what: str) -> None:
    """Let all workers fail for a reason, each with a sentence that says it."""
    (report if _held is None else _held.fail)(what)


def report(what: str) -> None:
    """Let TensorFlow's exchanges fail, here and soon on all workers."""
    # Where the cluster has failed already, there is nothing left to report.
    with contextlib.suppress(tf.errors.OpError):
        cluster_internals.report_error(marked(what))


def in_background(call: Callable[..., None], *arguments: object) -> None:
    """Run a function in a daemon thread."""
    name = f"keras_multigpu_{call.__name__}"
    threading.Thread(target=call, args=arguments, name=name, daemon=True).start()
