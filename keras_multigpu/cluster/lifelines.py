"""Connections between workers that find a dead worker at once, from the meeting to the end.

    worker 1 ──┐                  a worker says why it fails, and the chief passes that on;
    worker 2 ──┴──> chief         a line that breaks without that or a goodbye: a worker has died

While TensorFlow joins the workers it waits for all of them and ignores signals. Meanwhile a thread
ends this process as soon as another worker is gone or gives no sign of life.

Once they have joined, TensorFlow's heartbeats find a worker that is frozen, or whose machine has
lost its power. Alone they are not enough (TensorFlow 2.21, two workers, a timeout of 10 s): they
notice a killed worker, or one whose script raises, after 9 s instead of 0.1, and always as "stopped
sending heartbeats". And while workers join there are none: a chief whose worker never comes waits
silently, and ignores Ctrl-C and SIGTERM.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster.environment import settings
from keras_multigpu.keras_internals import cluster_internals

LONGEST = 100_000
"""Bytes of a message, at most."""

POLL = 0.1
"""Seconds between two looks at the others while TensorFlow joins them."""


class Line:
    """One end of a connection that carries JSON objects, one in each line of text.

    The other end need not be a worker: a message that is too long, nested too deeply or not JSON
    counts as the end of the line. Whether `next` waits is up to the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def say(self, **message: Any) -> None:
        """Send a message; it is lost if the other end has hung up."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def next(self) -> dict[str, Any] | None:
        """The next message; None if it does not come in time, an `EOFError` at the end."""
        try:
            while b"\n" not in self._rest:
                if len(self._rest) > LONGEST:
                    raise EOFError("A message has no end.")
                got = self.connection.recv(LONGEST)
                if not got:
                    raise EOFError("The line has ended.")
                self._rest += got
            said, self._rest = self._rest.split(b"\n", 1)
            message = json.loads(said)
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError(str(error)) from error
        if not isinstance(message, dict):
            raise EOFError("A message is not an object.")
        return message

    def has_ended(self) -> bool:
        """Whether the other end is known to have hung up; does not wait."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()


def name_of(workers: Sequence[str], index: int) -> str:
    return f"worker {index} ({workers[index]})"


def in_words(error: BaseException) -> str:
    """An error's class and message; a `KeyboardInterrupt` has no message."""
    return ": ".join(filter(None, [type(error).__name__, str(error)]))[:2000]


class Lifelines:
    """The lines of this process: the chief's to all others, or another worker's to the chief."""

    def __init__(self, workers: Sequence[str], index: int, lines: Mapping[int, Line]) -> None:
        self._workers, self._index = list(workers), index
        self._lines = dict(lines)
        self._is_over = False
        # Workers that TensorFlow has not joined yet, and when each of them last spoke.
        self._joining = {index, *lines}
        self._heard_at: dict[int, float] = {}
        # Workers that have said goodbye.
        self.ended: list[int] = []
        self._lock = threading.Lock()
        self._joining_thread = threading.current_thread()
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
        elif threading.current_thread() is not self._joining_thread:
            exit_with(what, name_of(self._workers, self._index))

    def say_goodbye(self) -> None:
        """Tell the others that Python ends, or which error ends it."""
        # A forked process inherits these lines, and may end while its parent continues.
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
        """Note that TensorFlow has joined this worker."""
        self._joining.discard(self._index)
        self._say(joined=True)

    def watch(self) -> None:
        """While TensorFlow joins the workers, see that all others live, and heed SIGTERM."""
        wanted, latest = settings(), time.monotonic() + settings().exchange_timeout
        # Until now no thread could run, so nothing has been read.
        self._heard_at = dict.fromkeys(self._heard_at, time.monotonic())
        while self._index in self._joining and not self._is_over:
            cluster_internals.let_sigterm_end()
            self._say(joins=True)
            now = time.monotonic()
            for other in self._joining & {*self._heard_at}:
                if now - self._heard_at[other] > wanted.heartbeat_timeout:
                    self.fail(f"{name_of(self._workers, other)} gave no sign of life")
            if now > latest:
                names = [name_of(self._workers, other) for other in self._joining - {self._index}]
                who = " and ".join(names) or "the workers"
                self.fail(
                    f"TensorFlow has not joined {who} within {wanted.exchange_timeout} seconds"
                )
            time.sleep(POLL)

    def listen(self, line: Line, other: int) -> None:
        """Read what a worker says until it says that it ends, or its line breaks."""
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
    """Let TensorFlow join this process inside the context; its lines are held to the end."""
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
    """Let Ctrl-C end this process inside TensorFlow, unless the program handles it itself."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_with(what: str, worker: str) -> None:
    """End this process, whose main thread is inside TensorFlow, with an error message."""
    text = problem(
        f"{what}.",
        "Expected all workers to join.",
        "Look at what that worker has printed last, then start all of them again.",
        worker=worker,
    )
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"keras_multigpu.cluster.failures.WorkerFailure: {text}\n")
        sys.stderr.flush()
    os._exit(1)


def ended() -> list[int]:
    """The workers that are known to have come to the end of their scripts."""
    return [] if _held is None else _held.ended


def fail(what: str) -> None:
    """Let all workers fail, each with this sentence."""
    (report if _held is None else _held.fail)(what)


def report(what: str) -> None:
    """Let TensorFlow's exchanges fail, here and soon on all workers."""
    # If the cluster has failed already nothing is left to report.
    with contextlib.suppress(tf.errors.OpError):
        # `failures` finds the sentence by these marks among TensorFlow's own words.
        cluster_internals.report_error(f"keras_multigpu: {what} :keras_multigpu")


def in_background(call: Callable[..., None], *arguments: object) -> None:
    """Run a function in a daemon thread."""
    name = f"keras_multigpu_{call.__name__}"
    threading.Thread(target=call, args=arguments, name=name, daemon=True).start()
