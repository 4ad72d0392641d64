"""Workers wait here until all have started: TensorFlow would wait silently, and ignore Ctrl-C.

    worker 1 ── hello: who I am, what I have ──┐
    worker 2 ── hello ─────────────────────────┴──> chief, at its port of the cluster
    worker 1 <─ I wait for worker 2 ─ ... ─ go ──── chief, once all have called and are same

Each holds its own port meanwhile, and leaves it to TensorFlow then. The lines stay, see
`lifelines`. A line that ends before "go" is dropped: its worker may have been started again.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.checks import problem, runtime_error
from keras_multigpu.cluster.environment import TFConfig, place_of, settings
from keras_multigpu.cluster.lifelines import name_of
from keras_multigpu.cluster.lines import Line
from keras_multigpu.cluster.loopback import all_on_loopback

LATE = 10.0
"""Seconds between two warnings of a worker that waits for others."""

SILENT = 3 * LATE
"""Seconds of silence at the chief's port after which a worker calls again."""

POLL = 0.1

FREED = 2.0
"""Seconds within which a restarted worker finds its port free."""

GUESTS = 100
"""How many connections may be open that have not said hello yet."""

logger = logging.getLogger("keras_multigpu")


class Hello(NamedTuple):
    """What a worker says first.

    Attributes:
        worker: Which one it is.
        ports: Those of its list of workers.
        same: What has to be the same on all workers, by what it is called.
        process: Where it runs, for people.
        key: Distinguishes processes that claim to be the same worker.
        failure: Why it cannot take part, or nothing.
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
    def of(cls, message: Any) -> "Hello":
        """The hello in a message; an `EOFError` if there is none."""
        said = message.get("hello")
        kinds = [int, list, dict, str, str, str]
        if not isinstance(said, list) or [*map(type, said)] != kinds:
            raise EOFError("It is not a worker.")
        return cls(*said)


class Patience:
    """Logs from time to time for whom a process waits, and raises an error at last.

    Args:
        own: The name of this process.
        names: Those of the processes that it may wait for.
    """

    def __init__(self, own: str, names: Sequence[str]) -> None:
        self._own, self._names = own, names
        self._began = self._said_at = time.monotonic()

    @classmethod
    def of(cls, workers: Sequence[str], index: int) -> "Patience":
        names = [name_of(workers, each) for each in range(len(workers))]
        return cls(names[index], names)

    def remind(self, missing: Sequence[int], hint: str = "") -> bool:
        """Whether a warning was due; a `RuntimeError` if the time is up."""
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


def meet(
    workers: Sequence[str], index: int, same: Mapping[str, str], failure: str = ""
) -> dict[int, Line]:
    """Wait until all workers are there; the lines to them, or as another than the chief to it.

    Args:
        workers: Their addresses, the chief's first.
        index: Which of them this process is.
        same: What has to be the same on all of them, by name.
        failure: Why this one cannot take part, which is then sent to all.

    Raises:
        RuntimeError: On all of them, if they do not belong together, the port of one is taken, or
            one does not come.
    """
    if len(workers) == 1:
        return {}
    own = Hello.own(workers, index, same)._replace(failure=failure)
    return call(workers, own) if index else Reception(workers, own).all_called()


def wait_for_servers(config: TFConfig) -> None:
    """Wait, as their coordinator, until all workers and parameter servers listen."""
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
    """Where the chief waits for all others to call."""

    def __init__(self, workers: Sequence[str], own: Hello) -> None:
        self._workers, self._own = workers, own
        self._ready = selectors.DefaultSelector()
        self._guests: dict[Line, float] = {}
        self._hellos: dict[int, Hello] = {}
        self._lines: dict[int, Line] = {}

    def all_called(self) -> dict[int, Line]:
        """The line of each, once all others are there and know it."""
        try:
            server = self._server()
        except OSError as error:
            what = said_at_port(self._workers, self._own) or port_is_taken(self._workers, 0, error)
            raise RuntimeError(what) from error
        with self._ready, server:
            server.setblocking(False)
            self._ready.register(server, selectors.EVENT_READ)
            try:
                self._wait()
            except BaseException as error:
                # A Ctrl-C ends the chief alone, which may be started again.
                if isinstance(error, RuntimeError):
                    self._refuse_all(str(error))
                for line in [*self._lines.values()]:
                    self._drop(line)
                raise
            finally:
                for line in [*self._guests]:
                    self._drop(line)
        for line in self._lines.values():
            line.say(go=True)
        return self._lines

    def _server(self) -> socket.socket:
        _, port = place_of(self._workers[0])
        # TensorFlow will listen at every address; here only those that workers call will do.
        bound(port).close()
        return listening(self._workers, port)

    def _wait(self) -> None:
        if self._own.failure:
            raise RuntimeError(self._own.failure)
        patience = Patience.of(self._workers, 0)
        while missing := self._missing():
            if patience.remind(missing):
                # Where all were given the same TF_CONFIG each takes itself for the chief, and the
                # address says who is.
                is_far = not all_on_loopback(self._workers)
                if is_far and (what := said_at_port(self._workers, self._own)):
                    raise RuntimeError(what)
                self._send_missing(self._lines.values())
            self._listen(self._greet)

    def _refuse_all(self, what: str) -> None:
        """Tell all workers why none can continue, also those that come a little later."""
        informed = {*self._lines}

        def refuse(line: Line, hello: Hello) -> None:
            line.say(end=what)
            informed.add(hello.worker)
            self._drop(line)

        for line in self._lines.values():
            line.say(end=what)
        latest = time.monotonic() + LATE
        while not informed >= {*range(1, len(self._workers))} and time.monotonic() < latest:
            self._listen(refuse)

    def _listen(self, greet: Callable[[Line, Hello], None]) -> None:
        """Hear what there is to hear, for a moment."""
        for key, _ in self._ready.select(POLL):
            line = key.data
            if line is None:
                self._accept(key.fileobj)
                continue
            try:
                # After its hello it only matters whether a worker is still there.
                if (message := line.next()) and line in self._guests:
                    greet(line, Hello.of(message))
            except EOFError:
                self._drop(line)
        latest = time.monotonic() - LATE
        for line in [line for line, since in self._guests.items() if since < latest]:
            self._drop(line)

    def _missing(self) -> list[int]:
        return [index for index in range(1, len(self._workers)) if index not in self._lines]

    def _send_missing(self, lines: Iterable[Line]) -> None:
        for line in lines:
            line.say(waits_for=self._missing())

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            line = Line(connection)
            self._ready.register(connection, selectors.EVENT_READ, line)
            self._guests[line] = time.monotonic()
            if len(self._guests) > GUESTS:
                self._drop(next(iter(self._guests)))

    def _greet(self, line: Line, hello: Hello) -> None:
        if hello.key == self._own.key:  # The chief has called itself.
            raise EOFError
        known = self._own if hello.worker == 0 else self._hellos.get(hello.worker)
        before = self._lines.get(hello.worker)
        if before and known and (hello.key == known.key or before.has_ended()):
            self._drop(before)
            known = None
        del self._guests[line]
        self._lines[hello.worker], self._hellos[hello.worker] = line, hello
        if known:
            what = twins(self._workers, known, hello)
            if before:
                before.say(end=what)
                self._drop(before)
        else:
            what = hello.failure or difference(self._workers, self._own, hello)
        if what:
            raise RuntimeError(what)
        self._send_missing([line])

    def _drop(self, line: Line) -> None:
        # One that was dropped already may still be among those that `select` has named.
        with contextlib.suppress(KeyError, ValueError):
            self._ready.unregister(line.connection)
        line.close()
        self._guests.pop(line, None)
        for index in [index for index, each in self._lines.items() if each is line]:
            del self._lines[index], self._hellos[index]


def call(workers: Sequence[str], own: Hello) -> dict[int, Line]:
    """Call the chief until it says that all are there; the line to it."""
    patience, began = Patience.of(workers, own.worker), time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            if not own.failure:
                held.enter_context(bound(place_of(workers[own.worker])[1]))
        except OSError as error:
            own = own._replace(failure=port_is_taken(workers, own.worker, error))
        while True:
            hint = ""
            with contextlib.suppress(OSError):
                if line := answered(workers, own, patience):
                    return {0: line}
                hint = NOT_THE_CHIEF.format(workers[0])
            if own.failure and time.monotonic() - began > LATE:
                raise RuntimeError(own.failure)
            patience.remind([0], hint)
            time.sleep(POLL)


def answered(workers: Sequence[str], own: Hello, patience: Patience) -> Line | None:
    """A line to the chief, once it says that all are there; None if another program answers."""
    missing, hint, heard_at = [0], "", time.monotonic()
    indices = range(len(workers))
    with contextlib.ExitStack() as until_go:
        line = Line(called(workers))
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
                    # The chief says first whom it waits for.
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


NOT_THE_CHIEF = (
    " Another program answers at {}, or the chief is already training and has to be restarted, too."
)


def called(workers: Sequence[str]) -> socket.socket:
    """A connection to the chief's port."""
    return socket.create_connection(place_of(workers[0]), timeout=1)


def said_at_port(workers: Sequence[str], own: Hello) -> str:
    """Why this process is not the chief, if another one at its address says so."""
    with contextlib.suppress(OSError, EOFError), called(workers) as connection:
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
    """A sentence where two processes claim to be the same worker."""
    return problem(
        f"Two processes claim to be {name_of(workers, one.worker)}: {one.process} and "
        f"{other.process}.",
        "Expected one process for each worker.",
        "Give each its own `index` in TF_CONFIG, and end what is left of an earlier run.",
        index=one.worker,
    )


def difference(workers: Sequence[str], own: Hello, said: Hello) -> str:
    """A sentence where a worker does not belong to the chief; the names of hosts may differ."""
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
    """Holds a port as TensorFlow will, at every address, and does not listen."""
    latest = time.monotonic() + FREED
    while True:
        held = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            # Otherwise a port whose connections have just ended counts as taken.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if held.family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind(("", port))
            # And with it another process could have the port as well.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            return held
        except OSError:
            held.close()
            if time.monotonic() > latest:
                raise
        time.sleep(POLL)


def listening(workers: Sequence[str], port: int = 0) -> socket.socket:
    """Where the chief listens: for this machine alone, if all workers are on it."""
    if all_on_loopback(workers):
        host, _ = place_of(workers[0])
        family = socket.getaddrinfo(host, 0)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
