"""Workers meet before TensorFlow starts: each logs whom it waits for, and all must be alike."""

import contextlib
import json
import logging
import os
import re
import socket
import threading
from pathlib import Path
from signal import SIGTERM

import pytest
from helpers.processes_left import PATIENCE, wait_until
from worker_processes import Workers, free_ports

from keras_multigpu.cluster import meeting
from keras_multigpu.cluster.connection import LONGEST, Connection
from keras_multigpu.cluster.environment import TFConfig, place_of

ALIKE = {"the number of devices": "1 CPUs", "the versions of packages": "Keras 3"}


@pytest.fixture
def addresses():
    return [f"127.0.0.1:{port}" for port in free_ports(3)]


@pytest.fixture
def started(monkeypatch):
    """Starts a worker in a thread; its result is stored under its name or index."""
    ended, connections = {}, []

    def wait(workers, index, alike, name, failure):
        try:
            connections.extend(meeting.meet(workers, index, alike, failure).values())
            ended[name] = "all are there"
        except RuntimeError as error:
            ended[name] = str(error)

    def start(workers, index, alike=ALIKE, name=None, failure=""):
        name = index if name is None else name
        arguments = workers, index, alike, name, failure
        threading.Thread(target=wait, args=arguments, daemon=True).start()
        return ended

    yield start
    # A worker that still waits must not reach into the next test.
    monkeypatch.setenv("KERAS_MULTIGPU_EXCHANGE_TIMEOUT", "1")
    for each in [*connections, *VISITORS]:
        each.close()
    VISITORS.clear()


VISITORS = []
"""The connections that a test has opened."""


def visitor(address):
    def connects():
        with contextlib.suppress(OSError):
            VISITORS.append(socket.create_connection(place_of(address)))
            return True
        return False

    wait_until(connects)
    return VISITORS[-1]


def hello(addresses, index, key="another", **changed):
    """A worker that has sent its greeting, and nothing more."""
    own = meeting.Hello.own(addresses, index, ALIKE)._replace(key=key, **changed)
    connection = Connection(visitor(addresses[0]))
    connection.send(hello=own)
    return connection


def answer(connection):
    """The next message, except those that list whom the chief waits for."""
    connection.socket.settimeout(PATIENCE)
    while "waits_for" in (message := connection.receive()):
        pass
    return message


def test_nobody_continues_before_all_workers_have_come(addresses, started, monkeypatch, caplog):
    monkeypatch.setattr(meeting, "LATE", 0.3)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        started(addresses, 2)
        ended = started(addresses, 0)
        missing = f"for worker 1 ({addresses[1]}) to start"
        for index in (0, 2):
            waits = f"Worker {index} ({addresses[index]}) has waited"
            wait_until(
                lambda waits=waits: any(
                    waits in each and missing in each for each in caplog.messages
                )
            )
    assert ended == {}
    started(addresses, 1)
    wait_until(lambda: len(ended) == 3)
    assert set(ended.values()) == {"all are there"}


STRANGE = {
    "not text": b"\xff\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "nested": b"[" * 50_000 + b"\n",
    "without an end": b"a" * (3 * LONGEST),
    "other types": b'{"hello": ["1", {}, [], 1, 2, 3]}\n',
    "empty": b"",
}


@pytest.mark.parametrize("words", STRANGE.values(), ids=STRANGE)
def test_a_stranger_does_not_end_the_meeting(addresses, started, words):
    ended = started(addresses[:2], 0)
    with visitor(addresses[0]) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    started(addresses[:2], 1)
    wait_until(lambda: len(ended) == 2)
    assert set(ended.values()) == {"all are there"}


def test_a_worker_that_died_after_its_greeting_may_come_again(addresses, started, caplog):
    """While others are missing. Otherwise the chief would send "go" to a dead connection."""
    ended = started(addresses, 0)
    dead = hello(addresses, 1)
    assert dead.receive() == {"waits_for": [2]}
    dead.close()
    other = hello(addresses, 2)
    wait_until(lambda: other.receive() == {"waits_for": [1]})
    assert ended == {}
    again = hello(addresses, 1, key="again")
    assert answer(other) == answer(again) == {"go": True}
    wait_until(lambda: ended == {0: "all are there"})


def test_two_processes_that_claim_one_index_are_named(addresses, started):
    ended = started(addresses, 0)
    first = hello(addresses, 1, key="1", process="process 7 on node1")
    assert "waits_for" in first.receive()
    second = hello(addresses, 1, key="2", process="process 9 on node2")
    what = answer(first)["end"]
    assert answer(second)["end"] == what
    started(addresses, 2)
    wait_until(lambda: ended == {0: what, 2: what})
    assert what.startswith(
        f"Two processes claim to be worker 1 ({addresses[1]}): process 7 on node1 and "
        "process 9 on node2. Expected one process for each worker. Give each its own `index`"
    )


def test_two_chiefs_are_named(addresses, started, monkeypatch):
    """The second finds its port taken, and asks by whom."""
    monkeypatch.setattr(meeting, "LATE", 0.1)
    ended = started(addresses, 0)
    visitor(addresses[0]).close()
    started(addresses, 0, name="again")
    wait_until(lambda: len(ended) == 2)
    assert ended[0] == ended["again"]
    assert ended[0].startswith(f"Two processes claim to be worker 0 ({addresses[0]})")


def test_a_port_of_the_chief_that_is_taken_is_named(addresses, started):
    with socket.create_server(place_of(addresses[0])):
        ended = started(addresses, 0)
        wait_until(lambda: ended)
    assert ended[0].startswith(
        f"Worker 0 ({addresses[0]}) cannot bind its port: Address already in use. "
    )
    assert ended[0].endswith(f"Received: address='{addresses[0]}'")


@pytest.mark.parametrize("index", [0, 1])
def test_the_meeting_waits_no_longer_than_an_exchange(addresses, started, monkeypatch, index):
    monkeypatch.setattr(meeting, "LATE", 0.1)
    monkeypatch.setenv("KERAS_MULTIGPU_EXCHANGE_TIMEOUT", "1")
    ended = started(addresses[:2], index)
    wait_until(lambda: ended)
    other = f"worker {1 - index} ({addresses[1 - index]})"
    assert f"has waited 1 s for {other} to start. Expected all" in ended[index]


def test_workers_wait_while_another_program_has_the_port_of_the_chief(addresses, started, caplog):
    with socket.create_server(place_of(addresses[0])) as stranger:
        with caplog.at_level(logging.WARNING, "keras_multigpu"), pytest.MonkeyPatch.context() as m:
            m.setattr(meeting, "LATE", 1.5)
            m.setattr(meeting, "SILENT", 3)
            ended = started(addresses[:2], 1)
            silent = stranger.accept()[0]
            wait_until(lambda: "the chief is already training" in caplog.text)
            strange = stranger.accept()[0]
            strange.sendall(b"\0\0\x12\4\0\n")
    silent.close()
    strange.close()
    started(addresses[:2], 0)
    wait_until(lambda: len(ended) == 2)
    assert set(ended.values()) == {"all are there"}


@pytest.mark.parametrize(
    ("more", "changed", "what"),
    [
        # Host names may differ, such as `localhost` and `127.0.0.1`.
        (["127.0.0.1:1"], {}, "Worker 2 and the chief have different clusters in TF_CONFIG."),
        # With one device and two devices they would wait forever.
        (
            [],
            {"the number of devices": "2 CPUs"},
            r"Worker 2 \(.*\) and the chief differ in the number of devices. Expected.*"
            r"Received: of_chief=\['1 CPUs'\], of_worker=\['2 CPUs'\]$",
        ),
    ],
)
def test_all_workers_name_one_that_differs(addresses, started, more, changed, what):
    ended = started(addresses, 0)
    started([each.replace("127.0.0.1", "localhost") for each in addresses], 1)
    started([*addresses, *more], 2, ALIKE | changed)
    wait_until(lambda: len(ended) == 3)
    assert ended[0] == ended[1] == ended[2]
    assert re.match(what, ended[0])


@pytest.mark.parametrize("index", [0, 1])
def test_all_workers_learn_why_one_cannot_take_part(addresses, started, index):
    """For example because it has started TensorFlow too early."""
    ended = started(addresses, index, {}, failure="it came too late")
    for other in {0, 1, 2} - {index}:
        started(addresses, other)
    wait_until(lambda: len(ended) == 3)
    assert set(ended.values()) == {"it came too late"}


def test_the_coordinator_waits_for_servers_and_workers(addresses, monkeypatch, caplog):
    """It logs for whom."""
    monkeypatch.setattr(meeting, "LATE", 0.2)
    monkeypatch.setenv("KERAS_MULTIGPU_EXCHANGE_TIMEOUT", "1")
    roles = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    config = TFConfig(roles, "chief", 0)
    with socket.create_server(place_of(addresses[1])):
        with caplog.at_level(logging.WARNING, "keras_multigpu"):
            missing = f"waited 1 s for worker 0 \\({addresses[2]}\\) to start"
            with pytest.raises(RuntimeError, match=f"The coordinator has {missing}"):
                meeting.wait_for_servers(config)
        assert f"for worker 0 ({addresses[2]}) to start" in caplog.text
        with socket.create_server(place_of(addresses[2])):
            meeting.wait_for_servers(config)


@pytest.mark.slow
def test_a_waiting_worker_can_be_ended(addresses):
    """Inside TensorFlow, no signal would reach it."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    script = Path(__file__).with_name("joining_worker.py")
    with Workers(script, 1, (), {"TF_CONFIG": json.dumps(config)}) as worker:
        visitor(addresses[0]).close()
        os.kill(worker.processes[0].pid, SIGTERM)
        assert worker.wait() == [-SIGTERM]


@pytest.mark.slow
def test_a_port_of_a_worker_that_is_taken_is_named(addresses):
    """By that worker; the chief says that it is gone."""
    cluster = {"worker": addresses[:2]}
    each = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": n}})}
        for n in (0, 1)
    ]
    script = Path(__file__).with_name("joining_worker.py")
    with socket.create_server(("", place_of(addresses[1])[1])):
        with Workers(script, 2, of_each=tuple(each)) as workers:
            assert workers.wait() == [1, 1]
            said = [workers.output(n) for n in (0, 1)]
    assert f"WorkerFailure: worker 1 ({addresses[1]}) is gone. " in said[0]
    assert f"RuntimeError: Worker 1 ({addresses[1]}) cannot bind its port: Could not" in said[1]
