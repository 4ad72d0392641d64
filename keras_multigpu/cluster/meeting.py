"""Workers meet here before TensorFlow starts, which would wait silently and ignore Ctrl-C.

    worker 1 ── hello: who I am, what I have ──┐
    worker 2 ── hello ─────────────────────────┴──> chief, at its port of the cluster
    worker 1 <─ I wait for worker 2 ─ ... ─ go ──── chief, once all have called and agree

The connections stay open, see `joint_start`. One that breaks before "go" is dropped: its worker may
have been restarted.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.checks import problem, runtime_error
from keras_multigpu.cluster.connection import Connection
from keras_multigpu.cluster.environment import TFConfig, name_of, place_of, settings
from keras_multigpu.cluster.this_machine import all_on_loopback

LATE = 10.0
"""Seconds between two warnings of a worker that waits for others."""

SILENT = 3 * LATE
"""Seconds without a word from the chief after which a worker calls again."""

POLL = 0.05
"""Seconds between two looks at all connections."""

UNKNOWN = 100
"""How many connections without a hello may be open at a time."""

logger = logging.getLogger("keras_multigpu")


class Hello(NamedTuple):
    """The first message of a worker.

    Attributes:
        worker: Its index.
        ports: The ports in its list of workers.
        same: Values that must be equal on all workers, by name.
        process: Its process and host, for people.
        key: Distinguishes processes that claim the same index.
        failure: Why it cannot take part; empty if it can.
    """

    worker: int
    ports: list[int]
    same: dict[str, str]
    process: str
    key: str
    failure: str = ""

    @classmethod
    def own(cls, workers: Sequence[str], index: int, same: Mapping[str, str]) -> "Hello":
        process = f"process {os.getpid()} on {socket.gethostname()}"
        ports = [place_of(each)[1] for each in workers]
        return cls(index, ports, dict(same), process, secrets.token_hex(8))

    @classmethod
    def from_message(cls, message: Any) -> "Hello":
        """Parse a message; an `EOFError` if it is not a hello."""
        said = message.get("hello")
        kinds = [int, list, dict, str, str, str]
        if not isinstance(said, list) or [*map(type, said)] != kinds:
            raise EOFError("It is not a worker.")
        return cls(*said)


class Waiting:
    """Warns now and then that process `own` waits for some of the processes in `names`."""

    def __init__(self, own: str, names: Sequence[str]) -> None:
        self._own, self._names = own, names
        self._began = self._said_at = time.monotonic()

    def warn(self, missing: Sequence[int], hint: str = "") -> bool:
        """Warn if it is time to, and return whether it was; a `RuntimeError` after the timeout."""
        now, most = time.monotonic(), settings().exchange_timeout
        names = " and ".join(self._names[other] for other in missing)
        what = f"{self._own.capitalize()} has waited"
        if now - self._began > most:
            raise runtime_error(
                f"{what} {most} s for {names} to start.{hint}",
                "Expected all workers to be started within that time.",
                "Start the same script there, with the same `cluster` in TF_CONFIG; if it takes "
                "longer, set KERAS_MULTIGPU_EXCHANGE_TIMEOUT to more seconds.",
                KERAS_MULTIGPU_EXCHANGE_TIMEOUT=most,
            )
        if now - self._said_at <= LATE:
            return False
        self._said_at = now
        logger.warning(
            "%s %d s for %s to start. Start the same script there, with the same `cluster` in "
            "TF_CONFIG.%s",
            what,
            now - self._began,
            names,
            hint,
        )
        return True


def names_of(workers: Sequence[str]) -> list[str]:
    return [name_of(workers, index) for index in range(len(workers))]


def meet(
    workers: Sequence[str], index: int, same: Mapping[str, str], failure: str = ""
) -> dict[int, Connection]:
    """Wait until all workers are there; return the chief's connections to them, or that to it.

    Args:
        workers: Their addresses, the chief's first.
        index: Which of them this process is.
        same: Values that must be equal on all of them, by name.
        failure: Why this process cannot take part; all others then fail with it.

    Raises:
        RuntimeError: On all of them, if their clusters or values differ, a port is taken, or one of
            them does not come.
    """
    if len(workers) == 1:
        return {}
    own = Hello.own(workers, index, same)._replace(failure=failure)
    return call_chief(workers, own) if index else Chief(workers, own).meet()


def wait_for_servers(config: TFConfig) -> None:
    """Let the coordinator wait until all workers and parameter servers listen."""
    others = [
        (f"{role} {index} ({address})", place_of(address))
        for role in ("ps", "worker")
        for index, address in enumerate(config.addresses.get(role, ()))
    ]
    waiting = Waiting("the coordinator", [name for name, _ in others])
    missing = list(range(len(others)))
    while missing:
        waiting.warn(missing)
        for each in list(missing):
            with contextlib.suppress(OSError):
                socket.create_connection(others[each][1], timeout=1).close()
                missing.remove(each)
        time.sleep(POLL if missing else 0)


class Chief:
    """The chief's side of the meeting."""

    def __init__(self, workers: Sequence[str], own: Hello) -> None:
        self._workers, self._own = workers, own
        # Connections without a hello, and when they were opened.
        self._unknown: dict[Connection, float] = {}
        self._present: dict[int, tuple[Connection, Hello]] = {}

    def meet(self) -> dict[int, Connection]:
        """Wait for all others, and return the connection to each."""
        try:
            server = listen_as_chief(self._workers)
        except OSError as error:
            what = ask_chief(self._workers, self._own) or name_taken_port(
                self._workers, 0, os.strerror(error.errno or 0)
            )
            raise RuntimeError(what) from error
        with server:
            server.setblocking(False)
            try:
                self._wait(server)
            except BaseException as error:
                # A Ctrl-C ends the chief alone, which may be restarted.
                if isinstance(error, RuntimeError):
                    self._refuse_all(server, str(error))
                for connection, _ in self._present.values():
                    connection.close()
                raise
            finally:
                for connection in self._unknown:
                    connection.close()
        connections = {index: connection for index, (connection, _) in self._present.items()}
        for connection in connections.values():
            connection.send(go=True)
        return connections

    def _wait(self, server: socket.socket) -> None:
        if self._own.failure:
            raise RuntimeError(self._own.failure)
        waiting = Waiting(name_of(self._workers, 0), names_of(self._workers))
        while missing := self._missing():
            if waiting.warn(missing):
                # If all machines were given the same TF_CONFIG each takes itself for the chief. The
                # one at the chief's address answers.
                is_far = not all_on_loopback(self._workers)
                if is_far and (what := ask_chief(self._workers, self._own)):
                    raise RuntimeError(what)
                for connection, _ in self._present.values():
                    connection.send(waits_for=missing)
            time.sleep(POLL)
            for index, (connection, _) in list(self._present.items()):
                if not self._is_open(connection):
                    del self._present[index]
            for connection, hello in self._hellos(server):
                self._admit(connection, hello)

    def _missing(self) -> list[int]:
        return [index for index in range(1, len(self._workers)) if index not in self._present]

    def _is_open(self, connection: Connection) -> bool:
        """Whether a worker that has said hello, and says no more, is still there."""
        try:
            connection.receive()
        except EOFError:
            connection.close()
            return False
        return True

    def _hellos(self, server: socket.socket) -> Iterator[tuple[Connection, Hello]]:
        """The connections on which workers have just said who they are."""
        with contextlib.suppress(OSError):
            while len(self._unknown) < UNKNOWN:
                accepted, _ = server.accept()
                accepted.setblocking(False)
                self._unknown[Connection(accepted)] = time.monotonic()
        for connection, since in list(self._unknown.items()):
            try:
                if message := connection.receive():
                    hello = Hello.from_message(message)
                    del self._unknown[connection]
                    yield connection, hello
                elif time.monotonic() - since > LATE:
                    raise EOFError("It says nothing.")
            except EOFError:
                connection.close()
                self._unknown.pop(connection, None)

    def _admit(self, connection: Connection, hello: Hello) -> None:
        before, known = self._present.get(hello.worker, (None, None))
        if hello.key == self._own.key:  # The chief has called itself.
            connection.close()
            return
        if hello.worker == 0:
            known = self._own
        elif before and known and hello.key == known.key:
            before.close()
            known = None
        if known:
            what = name_twins(self._workers, known, hello)
            if before:
                before.send(end=what)
                before.close()
        else:
            what = hello.failure or name_difference(self._workers, self._own, hello)
        self._present[hello.worker] = connection, hello
        if what:
            raise RuntimeError(what)
        connection.send(waits_for=self._missing())

    def _refuse_all(self, server: socket.socket, what: str) -> None:
        """Tell all workers why none can continue, including those that come a little later."""
        for connection, _ in self._present.values():
            connection.send(end=what)
        latest = time.monotonic() + LATE
        while self._missing() and time.monotonic() < latest:
            time.sleep(POLL)
            for connection, hello in self._hellos(server):
                connection.send(end=what)
                self._present[hello.worker] = connection, hello


NOT_THE_CHIEF = (
    " Another program answers at {}, or the chief is already training and has to be restarted, too."
)


def call_chief(workers: Sequence[str], own: Hello) -> dict[int, Connection]:
    """Call the chief until it says that all are there, and return the connection to it."""
    waiting = Waiting(name_of(workers, own.worker), names_of(workers))
    began = time.monotonic()
    while True:
        hint = ""
        with contextlib.suppress(OSError):
            if connection := wait_for_go(workers, own, waiting):
                return {0: connection}
            hint = NOT_THE_CHIEF.format(workers[0])
        if own.failure and time.monotonic() - began > LATE:
            raise RuntimeError(own.failure)
        waiting.warn([0], hint)
        time.sleep(POLL)


def wait_for_go(workers: Sequence[str], own: Hello, waiting: Waiting) -> Connection | None:
    """A connection to the chief, once it says that all are there; None if a stranger answers."""
    missing, hint, answered_at = [0], "", time.monotonic()
    indices = range(len(workers))
    with contextlib.ExitStack() as until_go:
        connection = Connection(connect(workers))
        until_go.callback(connection.close)
        connection.send(hello=own)
        while time.monotonic() - answered_at < SILENT:
            waiting.warn(missing, hint)
            try:
                message = connection.receive()
            except EOFError:
                return None
            match message:
                case None:
                    # The chief would first say whom it waits for.
                    hint = "" if missing != [0] else NOT_THE_CHIEF.format(workers[0])
                    continue
                case {"go": True}:
                    until_go.pop_all()
                    return connection
                case {"end": str(what)}:
                    raise RuntimeError(what)
                case {"waits_for": [*others]} if all(each in indices for each in others):
                    missing, hint = others, ""
            answered_at = time.monotonic()
    return None


def connect(workers: Sequence[str]) -> socket.socket:
    """A connection to the chief's port."""
    return socket.create_connection(place_of(workers[0]), timeout=1)


def ask_chief(workers: Sequence[str], own: Hello) -> str:
    """Why this process is not the chief, if another chief answers at its address."""
    with contextlib.suppress(OSError, EOFError), connect(workers) as opened:
        connection = Connection(opened)
        connection.send(hello=own)
        for _ in range(3):
            match connection.receive():
                case {"end": str(what)}:
                    return what
                case None:
                    break
    return ""


def name_twins(workers: Sequence[str], one: Hello, other: Hello) -> str:
    """The error when two processes claim to be the same worker."""
    return problem(
        f"Two processes claim to be {name_of(workers, one.worker)}: {one.process} and "
        f"{other.process}.",
        "Expected one process for each worker.",
        "Give each its own `index` in TF_CONFIG, and end what is left of an earlier run.",
        index=one.worker,
    )


def name_difference(workers: Sequence[str], own: Hello, said: Hello) -> str:
    """The error when a worker does not fit the chief; host names may differ."""
    if said.ports != own.ports or not 0 < said.worker < len(workers):
        return problem(
            f"Worker {said.worker} and the chief have different clusters in TF_CONFIG.",
            "Expected the same list of workers, in the same order, on all of them.",
            "Write the list once, and give each worker its own `index`.",
            ports_of_chief=own.ports,
            ports_of_worker=said.ports,
        )
    differing = [name for name, value in own.same.items() if said.same.get(name) != value]
    if differing:
        return problem(
            f"{name_of(workers, said.worker).capitalize()} and the chief differ in "
            f"{' and '.join(differing)}.",
            "Expected the same on all workers.",
            "Give each as many devices, and install the same packages on all machines.",
            of_chief=[own.same[name] for name in differing],
            of_worker=[said.same.get(name) for name in differing],
        )
    return ""


def name_taken_port(workers: Sequence[str], index: int, reason: str) -> str:
    return problem(
        f"{name_of(workers, index).capitalize()} cannot bind its port: {reason}.",
        "Expected no other program to listen there, on the machine of that worker.",
        "End the process that has it (`ss -ltnp` names it), or choose another port in TF_CONFIG, "
        "on all workers.",
        address=workers[index],
    )


def listen_as_chief(workers: Sequence[str]) -> socket.socket:
    """Listen at the chief's port, for this machine alone if all workers are on it."""
    host, port = place_of(workers[0])
    if all_on_loopback(workers):
        family = socket.getaddrinfo(host, 0)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
