"""Lines between workers: on one that breaks without a word its owner has died.

    worker 1 ──┐                  what a worker says before it fails, the chief passes on;
    worker 2 ──┴──> chief         a line that breaks before that, or before a goodbye: it is dead

TensorFlow itself is sure to find a dead worker only when heartbeats are missing, after seconds; an
exchange that is going on may break sooner. But a frozen worker, or one whose machine has lost its
power, breaks no line and is found in no other way. Where only the cluster's own ports are open
there are no lines, only heartbeats.
"""

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.cluster.loopback import is_loopback
from keras_multigpu.cluster.settings import settings
from keras_multigpu.keras_internals import cluster_internals

KEY = "keras_multigpu/lifelines"
"""Under which TensorFlow's coordination service keeps where the chief listens, and a password."""

# Nothing to fail for; a line that breaks without it is that of a dead worker.
GOODBYE = ""

logger = logging.getLogger("keras_multigpu")


def name_of(workers: Sequence[str], index: int) -> str:
    return f"worker {index} ({workers[index]})"


def told(what: str) -> str:
    """A sentence, marked so that it is found among TensorFlow's own words."""
    return f"keras_multigpu: {what} :keras_multigpu"


def in_words(error: BaseException) -> str:
    """An error's class, and what it says; a `KeyboardInterrupt` says nothing."""
    return ": ".join(filter(None, [type(error).__name__, str(error)]))[:2000]


class Lifelines:
    """The lines of this process, to the chief or as the chief to all others; who said goodbye."""

    def __init__(self, workers: Sequence[str], index: int) -> None:
        self._workers, self._index = list(workers), index
        self._lines: dict[int, socket.socket] = {}
        self._is_over = False
        self.ended: list[int] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        atexit.register(self.say_goodbye)

    def fail(self, what: str, heard_from: int | None = None) -> None:
        """Let all workers fail for a reason, unless they fail already."""
        with self._lock:
            known, self._is_over = self._is_over, True
        if known:
            return
        self.say(what, heard_from)
        report(what)

    def say_goodbye(self) -> None:
        """Say that Python ends, and if that is so because of an error."""
        # A process that was forked off has these lines too, and ends while its parent goes on.
        if os.getpid() != self._process:
            return
        # Python keeps here the error that nobody has caught.
        error = getattr(sys, "last_value", None)
        if error is not None:
            name = name_of(self._workers, self._index)
            self.fail(f"{name} failed: {in_words(error)}")
        self._is_over = True
        self.say(GOODBYE)

    def say(self, what: str, heard_from: int | None = None) -> None:
        for other, line in list(self._lines.items()):
            if other != heard_from:
                with contextlib.suppress(OSError):
                    line.sendall(json.dumps(what).encode() + b"\n")

    def accept(self, server: socket.socket, password: str) -> None:
        """Listen to all who know the password, each in a thread of its own."""
        with contextlib.suppress(OSError):  # The socket is closed where a process ends.
            while True:
                line, _ = server.accept()
                in_background(self.greet, line, password)

    def greet(self, line: socket.socket, password: str) -> None:
        """Listen to who says the password and a worker's number; hang up on others."""
        line.settimeout(settings().heartbeat_timeout)
        with contextlib.suppress(OSError, ValueError), line, line.makefile("rb") as words:
            # Whoever is not a worker may send a line without an end.
            said, number = words.readline(100).decode().split()
            # A comparison that takes the same time wherever the first wrong letter is.
            if secrets.compare_digest(said, password) and 0 < int(number) < len(self._workers):
                self.listen(line, words, int(number))

    def connect(self, port: int, password: str) -> None:
        """Call the chief and listen."""
        try:
            chief = host_of(self._workers[0]), port
            line = socket.create_connection(chief, settings().heartbeat_timeout)
            line.sendall(f"{password} {self._index}\n".encode())
        except OSError as error:
            logger.debug("The chief cannot be called at port %d: %s", port, error)
            return
        with line, line.makefile("rb") as words:
            self.listen(line, words, 0)

    def listen(self, line: socket.socket, words: Any, other: int) -> None:
        """Listen to a worker until it says something or its line breaks."""
        line.settimeout(None)
        self._lines[other] = line
        # Unless it says something: the system closes the lines of a process that is killed.
        what = f"{name_of(self._workers, other)} is gone"
        with contextlib.suppress(OSError, ValueError):
            if said := words.readline():
                what = json.loads(said)
        del self._lines[other]
        if what:
            self.fail(what, heard_from=other)
        else:
            self.ended.append(other)


_held: Lifelines | None = None


def hold(workers: Sequence[str], index: int) -> None:
    """Hold the lines of this process until Python ends. All have joined the cluster by now."""
    global _held
    _held = lifelines = Lifelines(workers, index)
    if index == 0:
        server, password = listening(workers), secrets.token_hex(16)
        port = 0 if server is None else server.getsockname()[1]
        cluster_internals.publish(KEY, f"{port} {password}")
        if server is not None:
            in_background(lifelines.accept, server, password)
        return
    try:
        port, password = cluster_internals.published(KEY, settings().heartbeat_timeout).split()
    except tf.errors.OpError as error:
        logger.debug("The chief does not say where it listens: %s", error)
        return
    if int(port):
        in_background(lifelines.connect, int(port), password)


def ended() -> list[int]:
    """The workers that have come to the end of their scripts, as far as this one has heard."""
    return [] if _held is None else _held.ended


def fail(what: str) -> None:
    """Let all workers fail for a reason, each with a sentence that says it."""
    (report if _held is None else _held.fail)(what)


def report(what: str) -> None:
    """Let TensorFlow's exchanges fail, here and by and by everywhere."""
    # Where the cluster has failed already, there is nothing left to tell.
    with contextlib.suppress(tf.errors.OpError):
        cluster_internals.report_error(told(what))


def listening(workers: Sequence[str], port: int = 0) -> socket.socket | None:
    """Where the chief listens, by default at any port: for this machine alone, if all are on it."""
    hosts = [*map(host_of, workers)]
    try:
        if all(map(is_loopback, hosts)):
            family = socket.getaddrinfo(hosts[0], 0)[0][0]
            return socket.create_server((hosts[0], port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        logger.debug("The chief cannot listen: %s", error)
        return None


def host_of(address: str) -> str:
    """The host of `host:port`."""
    return address.rsplit(":", 1)[0].strip("[]")


def in_background(call: Callable[..., None], *arguments: object) -> None:
    """Run a function in a thread that nobody waits for."""
    name = f"keras_multigpu_{call.__name__}"
    threading.Thread(target=call, args=arguments, name=name, daemon=True).start()
