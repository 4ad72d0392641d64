"""Workers wait here until all have begun: TensorFlow would wait silently, and hear no Ctrl-C then.

The chief listens at the port that it has in the cluster, says "go" when all others have called, and
leaves the port to TensorFlow.
"""

import contextlib
import json
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from keras_multigpu.checks import problem
from keras_multigpu.cluster import lifelines
from keras_multigpu.cluster.lifelines import host_of, name_of

GO = "go"
LATE = 10.0
"""After so many seconds, and again and again, a worker says whom it waits for."""

POLL = 0.1
LONGEST = 10_000
"""Bytes of a line; whoever is not a worker may send one without an end."""

logger = logging.getLogger("keras_multigpu")


class Patience:
    """Says from time to time that a worker waits, and for whom."""

    def __init__(self, workers: Sequence[str], index: int) -> None:
        self._workers, self._index = workers, index
        self._began = self._said_at = time.monotonic()

    def tell(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        if now - self._said_at > LATE:
            self._said_at = now
            names = " and ".join(name_of(self._workers, other) for other in missing)
            logger.warning(
                "%s has waited %d s for %s to start. Start the same script there, with the same "
                "`cluster` in TF_CONFIG.",
                name_of(self._workers, self._index).capitalize(),
                now - self._began,
                names or "others, of which the chief knows,",
            )


def meet(workers: Sequence[str], index: int) -> None:
    """Wait until all workers are there; a `ValueError` where they speak of different clusters."""
    if len(workers) > 1:
        (call if index else receive)(workers, index)


def receive(workers: Sequence[str], index: int) -> None:
    """Wait, as the chief, until all others have called."""
    server = lifelines.listening(workers, port_of(workers[0]))
    if server is None:  # TensorFlow says what is wrong with the port.
        return
    lines: dict[int, socket.socket] = {}
    patience, strange = Patience(workers, index), ""
    with server, contextlib.ExitStack() as open_lines:
        server.settimeout(POLL)
        while not strange and (missing := {*range(1, len(workers))} - {*lines}):
            patience.tell(sorted(missing))
            # Whoever calls need not be a worker.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                line = open_lines.enter_context(server.accept()[0])
                line.settimeout(1)
                said = line_from(line)
                lines[int(said["index"])] = line
                strange = difference(workers, said)
        for line in lines.values():
            with contextlib.suppress(OSError):
                line.sendall(json.dumps(strange or GO).encode() + b"\n")
                line.recv(1)  # Who hangs up first keeps the port for a while.
    if strange:
        raise ValueError(strange)


def call(workers: Sequence[str], index: int) -> None:
    """Call the chief until it says that all are there."""
    patience = Patience(workers, index)
    chief = host_of(workers[0]), port_of(workers[0])
    hello = json.dumps({"index": index, "ports": [*map(port_of, workers)]}) + "\n"
    said = None
    while said is None:
        patience.tell([0])
        with contextlib.suppress(OSError, ValueError):
            with socket.create_connection(chief, timeout=1) as line:
                line.sendall(hello.encode())
                line.settimeout(LATE)
                said = answer(line, patience)
        time.sleep(0 if said else POLL)
    if said != GO:
        raise ValueError(said)


def answer(line: socket.socket, patience: Patience) -> Any:
    """What the chief says, once all have called."""
    while True:
        try:
            return line_from(line)
        except TimeoutError:
            patience.tell([])


def difference(workers: Sequence[str], said: Any) -> str:
    """A sentence where a worker has another list than the chief; their names may differ."""
    ports = [*map(port_of, workers)]
    if said["ports"] == ports and 0 < said["index"] < len(ports):
        return ""
    return problem(
        f"Worker {said['index']} and the chief have different clusters in TF_CONFIG.",
        "Expected the same list of workers, in the same order, on all of them.",
        "Write the list once, and give each worker its own `index`.",
        ports_of_chief=ports,
        ports_of_worker=said["ports"],
    )


def line_from(line: socket.socket) -> Any:
    # Left to be collected, it would close inside of a destructor, where a Ctrl-C is lost.
    with line.makefile("rb") as file:
        return json.loads(file.readline(LONGEST))


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
