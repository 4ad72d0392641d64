"""Joining blocks inside TensorFlow. A worker that waits in vain ends with a message.

One worker is real. A socket plays the other: it sends what workers send, and then misbehaves.
"""

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE, wait_until
from worker_processes import Workers, free_ports

from keras_multigpu.cluster import meeting
from keras_multigpu.cluster.connection import Connection
from keras_multigpu.cluster.environment import place_of

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("joining_worker.py")


@contextlib.contextmanager
def joining(index, **settings):
    """A real worker inside TensorFlow, its address, and the other worker's connection to it."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    variables = {f"KERAS_MULTIGPU_{name}": str(value) for name, value in settings.items()}
    with contextlib.ExitStack() as ends:
        if index:
            server = ends.enter_context(socket.create_server(place_of(addresses[0])))
        worker = ends.enter_context(
            Workers(SCRIPT, 1, (), {**variables, "TF_CONFIG": json.dumps(config)})
        )
        if index:
            server.settimeout(PATIENCE)
            opened = server.accept()[0]
            server.close()
        else:
            wait_until(worker.outputs[0].exists)
            wait_until(lambda: "alike" in worker.output(0))
            opened = connected(addresses[0])
        ends.callback(opened.close)
        opened.settimeout(PATIENCE)
        connection = Connection(opened)
        if not index:
            alike = json.loads(worker.output(0).split("alike ")[1].splitlines()[0])
            connection.send(hello=meeting.Hello.own(addresses, 1, alike))
        else:
            connection.send(go=True)
        while connection.receive() != {"joins": True}:
            pass
        yield worker, addresses, connection


def connected(address):
    found = []

    def connects():
        with contextlib.suppress(OSError):
            found.append(socket.create_connection(place_of(address)))
        return found

    wait_until(connects)
    return found[0]


def test_a_worker_that_dies_while_it_joins_is_named():
    """TensorFlow would wait forever, deaf to Ctrl-C and SIGTERM."""
    with joining(0) as (worker, addresses, connection):
        connection.close()
        assert worker.wait() == [1]
        other = f"worker 1 ({addresses[1]})"
        assert f"WorkerFailure: {other} is gone. Expected all workers to join." in worker.output(0)


def test_a_worker_that_never_joins_is_named():
    with joining(1, EXCHANGE_TIMEOUT=3) as (worker, addresses, _):
        assert worker.wait() == [1]
        what = f"TensorFlow has not joined worker 0 ({addresses[0]}) within 3 seconds."
        assert what in worker.output(0)


def test_a_joining_worker_can_be_ended():
    with joining(0) as (worker, _, connection):
        # TensorFlow has taken SIGTERM for itself by now.
        for _ in range(5):
            assert connection.receive() == {"joins": True}
        os.kill(worker.processes[0].pid, signal.SIGTERM)
        assert worker.wait() == [-signal.SIGTERM]
