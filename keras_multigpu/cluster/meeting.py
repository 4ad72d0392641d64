"""Workers meet here before TensorFlow starts, which would wait silently and ignore Ctrl-C.

    worker 1 ── hello: who I am, what I have ──┐
    worker 2 ── hello ─────────────────────────┴──> chief, at its port of the cluster
    worker 1 <─ I wait for worker 2 ─ ... ─ go ──── chief, once all have called and agree

Each worker holds its own port until "go", then leaves it to TensorFlow. The connections stay open,
see `lifelines`. One that breaks before "go" is dropped: its worker may have been restarted.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.checks import problem, runtime_error
from keras_multigpu.cluster.environment import TFConfig, place_of, settings
from keras_multigpu.cluster.lifelines import Line, name_of
from keras_multigpu.cluster.this_machine import all_on_loopback

LATE = 10.0
"""Seconds between two warnings of a worker that waits for others."""

SILENT = 3 * LATE
"""Seconds without a word from the chief after which a worker calls again."""

POLL = 0.1

FREED = 2.0
"""Seconds that a restarted worker waits for its port to become free."""

GUESTS = 100
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


class Patience:
    """Warns now and then that process `own` waits for some of the processes in `names`."""

    def __init__(self, own: str, names: Sequence[str]) -> None:
        self._own, self._names = own, names
        self._began = self._said_at = time.monotonic()

    def remind(self, missing: Sequence[int], hint: str = "") -> bool:
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
) -> dict[int, Line]:
    """Wait until all workers are there; return the chief's lines to them, or one to the chief.

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
    return call_chief(workers, own) if index else Reception(workers, own).receive()


def wait_for_servers(config: TFConfig) -> None:
    """Let the coordinator wait until all workers and parameter servers listen."""
    others = [
        (f"{role} {index} ({address})", place_of(address))
        for role in ("ps", "worker")
        for index, address in enumerate(config.addresses.get(role, ()))
    ]
    patience = Patience("the coordinator", [name for name, _ in others])
    missing = list(range(len(others)))
    while missing:
        patience.remind(missing)
        for each in list(missing):
            with contextlib.suppress(OSError):
                socket.create_connection(others[each][1], timeout=1).close()
                missing.remove(each)
        time.sleep(POLL if missing else 0)


class Reception:
    """The chief's side of the meeting."""

    def __init__(self, workers: Sequence[str], own: Hello) -> None:
        self._workers, self._own = workers, own
        self._selector = selectors.DefaultSelector()
        # Connections that have not said hello, and when they were opened.
        self._guests: dict[Line, float] = {}
        self._present: dict[int, tuple[Line, Hello]] = {}
        # Why nobody can continue, and which workers have been told.
        self._failure = ""
        self._told: set[int] = set()

    def receive(self) -> dict[int, Line]:
        """Wait for all others, and return the line to each."""
        try:
            server = listen_as_chief(self._workers)
        except OSError as error:
            what = ask_chief(self._workers, self._own) or port_is_taken(self._workers, 0, error)
            raise RuntimeError(what) from error
        with self._selector, server:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
            try:
                self._wait()
            except BaseException as error:
                # A Ctrl-C ends the chief alone, which may be restarted.
                if isinstance(error, RuntimeError):
                    self._refuse_all(str(error))
                for line, _ in list(self._present.values()):
                    self._drop(line)
                raise
            finally:
                for line in list(self._guests):
                    self._drop(line)
        lines = {index: line for index, (line, _) in self._present.items()}
        for line in lines.values():
            line.say(go=True)
        return lines

    def _wait(self) -> None:
        if self._own.failure:
            raise RuntimeError(self._own.failure)
        patience = Patience(name_of(self._workers, 0), names_of(self._workers))
        while missing := self._missing():
            if patience.remind(missing):
                # If all machines were given the same TF_CONFIG each takes itself for the chief. The
                # one at the chief's address answers.
                is_far = not all_on_loopback(self._workers)
                if is_far and (what := ask_chief(self._workers, self._own)):
                    raise RuntimeError(what)
                for line, _ in self._present.values():
                    line.say(waits_for=missing)
            self._listen()

    def _refuse_all(self, what: str) -> None:
        """Tell all workers why none can continue, including those that come a little later."""
        self._failure, self._told = what, {*self._present}
        for line, _ in self._present.values():
            line.say(end=what)
        latest = time.monotonic() + LATE
        while not self._told >= {*range(1, len(self._workers))} and time.monotonic() < latest:
            self._listen()

    def _listen(self) -> None:
        """Handle what has arrived, or wait a moment for it."""
        for key, _ in self._selector.select(POLL):
            line = key.data
            if line is None:
                self._accept(key.fileobj)
                continue
            try:
                # After the hello only the end of a line matters.
                if (message := line.next()) and line in self._guests:
                    self._greet(line, Hello.from_message(message))
            except EOFError:
                self._drop(line)
        latest = time.monotonic() - LATE
        for line in [line for line, since in self._guests.items() if since < latest]:
            self._drop(line)

    def _missing(self) -> list[int]:
        return [index for index in range(1, len(self._workers)) if index not in self._present]

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            line = Line(connection)
            self._selector.register(connection, selectors.EVENT_READ, line)
            self._guests[line] = time.monotonic()
            if len(self._guests) > GUESTS:
                self._drop(next(iter(self._guests)))

    def _greet(self, line: Line, hello: Hello) -> None:
        if hello.key == self._own.key:  # The chief has called itself.
            raise EOFError
        if self._failure:
            line.say(end=self._failure)
            self._told.add(hello.worker)
            self._drop(line)
            return
        before, known = self._present.get(hello.worker, (None, None))
        if hello.worker == 0:
            known = self._own
        elif before and known and (hello.key == known.key or before.has_ended()):
            self._drop(before)
            known = None
        del self._guests[line]
        self._present[hello.worker] = line, hello
        if known:
            what = twins(self._workers, known, hello)
            if before:
                before.say(end=what)
                self._drop(before)
        else:
            what = hello.failure or difference(self._workers, self._own, hello)
        if what:
            raise RuntimeError(what)
        line.say(waits_for=self._missing())

    def _drop(self, line: Line) -> None:
        # `select` may have named a line that was dropped since.
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.close()
        self._guests.pop(line, None)
        for index in [index for index, (each, _) in self._present.items() if each is line]:
            del self._present[index]


NOT_THE_CHIEF = (
    " Another program answers at {}, or the chief is already training and has to be restarted, too."
)


def call_chief(workers: Sequence[str], own: Hello) -> dict[int, Line]:
    """Call the chief until it says that all are there, and return the line to it."""
    patience = Patience(name_of(workers, own.worker), names_of(workers))
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            if not own.failure:
                held.enter_context(bound(place_of(workers[own.worker])[1]))
        except OSError as error:
            own = own._replace(failure=port_is_taken(workers, own.worker, error))
        while True:
            hint = ""
            with contextlib.suppress(OSError):
                if line := wait_for_go(workers, own, patience):
                    return {0: line}
                hint = NOT_THE_CHIEF.format(workers[0])
            if own.failure and time.monotonic() - began > LATE:
                raise RuntimeError(own.failure)
            patience.remind([0], hint)
            time.sleep(POLL)


def wait_for_go(workers: Sequence[str], own: Hello, patience: Patience) -> Line | None:
    """A line to the chief, once it says that all are there; None if another program answers."""
    missing, hint, heard_at = [0], "", time.monotonic()
    indices = range(len(workers))
    with contextlib.ExitStack() as until_go:
        line = Line(connect(workers))
        until_go.callback(line.close)
        line.say(hello=own)
        while time.monotonic() - heard_at < SILENT:
            patience.remind(missing, hint)
            try:
                message = line.next()
            except EOFError:
                return None
            match message:
                case None:
                    # The chief would first say whom it waits for.
                    hint = "" if missing != [0] else NOT_THE_CHIEF.format(workers[0])
                    continue
                case {"go": True}:
                    until_go.pop_all()
                    return line
                case {"end": str(what)}:
                    raise RuntimeError(what)
                case {"waits_for": [*others]} if all(each in indices for each in others):
                    missing, hint = others, ""
            heard_at = time.monotonic()
    return None


def connect(workers: Sequence[str]) -> socket.socket:
    """A connection to the chief's port."""
    return socket.create_connection(place_of(workers[0]), timeout=1)


def ask_chief(workers: Sequence[str], own: Hello) -> str:
    """Why this process is not the chief, if another chief answers at its address."""
    with contextlib.suppress(OSError, EOFError), connect(workers) as connection:
        line = Line(connection)
        line.say(hello=own)
        for _ in range(3):
            match line.next():
                case {"end": str(what)}:
                    return what
                case None:
                    break
    return ""


def twins(workers: Sequence[str], one: Hello, other: Hello) -> str:
    """The error when two processes claim to be the same worker."""
    return problem(
        f"Two processes claim to be {name_of(workers, one.worker)}: {one.process} and "
        f"{other.process}.",
        "Expected one process for each worker.",
        "Give each its own `index` in TF_CONFIG, and end what is left of an earlier run.",
        index=one.worker,
    )


def difference(workers: Sequence[str], own: Hello, said: Hello) -> str:
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


def port_is_taken(workers: Sequence[str], index: int, error: OSError) -> str:
    return problem(
        f"{name_of(workers, index).capitalize()} cannot bind its port: {error.strerror}.",
        "Expected no other program to listen there, on the machine of that worker.",
        "End the process that has it (`ss -ltnp` names it), or choose another port in TF_CONFIG, "
        "on all workers.",
        address=workers[index],
    )


def bound(port: int) -> socket.socket:
    """A socket that holds a port at every address, as TensorFlow will, without listening."""
    latest = time.monotonic() + FREED
    while True:
        held = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            # Otherwise a port whose connections have just ended counts as taken.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if held.family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind(("", port))
            # If it stayed set another process could bind the port too.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            return held
        except OSError:
            held.close()
            if time.monotonic() > latest:
                raise
        time.sleep(POLL)


def listen_as_chief(workers: Sequence[str]) -> socket.socket:
    """Listen at the chief's port, for this machine alone if all workers are on it."""
    host, port = place_of(workers[0])
    # TensorFlow will need the port at every address.
    bound(port).close()
    if all_on_loopback(workers):
        family = socket.getaddrinfo(host, 0)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
