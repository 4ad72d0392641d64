"""While TensorFlow joins the workers: ends this process if another one cannot join any more.

TensorFlow waits for all of them, holds Python's lock and ignores signals: it sends no heartbeats
yet, so a chief whose worker never comes would wait silently, deaf to Ctrl-C and SIGTERM. The
connections of the meeting stay open until Python ends, so that a worker that dies breaks them. Once
all have joined, TensorFlow's heartbeats find a worker that is gone.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from keras_multigpu.checks import problem
from keras_multigpu.cluster.connection import Connection
from keras_multigpu.cluster.environment import name_of, settings
from keras_multigpu.keras_internals import cluster_internals

POLL = 0.1
"""Seconds between two looks at the others."""

_open: list[Connection] = []
"""The connections of this process, which the system closes when it ends."""


@contextlib.contextmanager
def watching(
    workers: Sequence[str], index: int, connections: Mapping[int, Connection]
) -> Iterator[None]:
    """Let TensorFlow join this process inside the context, while a thread watches the others."""
    if not connections:
        yield
        return
    _open.extend(connections.values())
    for connection in connections.values():
        connection.socket.setblocking(False)
    has_joined = threading.Event()
    watch = functools.partial(watch_others, workers, index, connections, has_joined)
    thread = threading.Thread(target=watch, name="keras_multigpu_watch", daemon=True)
    try:
        with cluster_internals.threads_run_while_joining(thread.start), interruptible():
            yield
    finally:
        has_joined.set()
    for connection in connections.values():
        connection.send(has_joined=True)


def watch_others(
    workers: Sequence[str],
    index: int,
    connections: Mapping[int, Connection],
    has_joined: threading.Event,
) -> None:
    """End this process with a message if another one is gone or silent, and heed SIGTERM."""
    began, wanted = time.monotonic(), settings()
    last_message = dict.fromkeys(connections, began)
    while not has_joined.is_set():
        cluster_internals.let_sigterm_end()
        now = time.monotonic()
        problems: list[str] = []
        for other, connection in connections.items():
            name = name_of(workers, other)
            connection.send(joins=True)
            try:
                while message := connection.receive():
                    last_message[other] = math.inf if "has_joined" in message else now
                    # The chief alone sees all others.
                    problems += [str(message["fails"])] if "fails" in message else []
            except EOFError:
                # One that has joined may have come to its end.
                if last_message[other] < math.inf:
                    problems.append(f"{name} is gone")
            if now - last_message[other] > wanted.heartbeat_timeout:
                problems.append(f"{name} gave no sign of life")
        if not problems and now - began > wanted.exchange_timeout:
            late = [name_of(workers, other) for other, at in last_message.items() if at < math.inf]
            who = " and ".join(late) or "the workers"
            problems = [f"TensorFlow has not joined {who} within {wanted.exchange_timeout} seconds"]
        if problems and not has_joined.is_set():
            for connection in connections.values():
                connection.send(fails=problems[0])
            exit_with(problems[0], name_of(workers, index))
        time.sleep(POLL)


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
