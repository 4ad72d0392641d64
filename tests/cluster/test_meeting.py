"""Workers wait for each other before TensorFlow starts: told whom they wait for, and alike."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes_left import PATIENCE, python_path, start_process, wait_until
from worker_processes import free_ports

from keras_multigpu.cluster import meeting


@pytest.fixture
def addresses():
    """Three workers of this machine."""
    return [f"127.0.0.1:{port}" for port in free_ports(3)]


def started(workers, index, ended):
    """A worker in a thread that notes how its waiting has ended."""

    def wait():
        try:
            meeting.meet(workers, index)
            ended[index] = "all are there"
        except ValueError as error:
            ended[index] = str(error)

    threading.Thread(target=wait, daemon=True).start()


def test_nobody_goes_on_before_all_are_there(addresses, monkeypatch, caplog):
    """In whatever order they come; who is late is named, and strangers count for nothing."""
    monkeypatch.setattr(meeting, "LATE", 0.2)
    ended = {}
    started(addresses, 2, ended)
    started(addresses, 0, ended)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        wait_until(lambda: f"for worker 1 ({addresses[1]}) to start" in caplog.text)
        for said in (b"\xff\n", b"{}\n", b"[1]\n", b""):
            with socket.create_connection(("127.0.0.1", meeting.port_of(addresses[0]))) as line:
                line.sendall(said)
        wait_until(lambda: "for others, of which the chief knows, to start" in caplog.text)
    assert ended == {}
    started(addresses, 1, ended)
    wait_until(lambda: len(ended) == 3)
    assert set(ended.values()) == {"all are there"}


def test_the_port_is_left_to_tensorflow(addresses):
    """Nobody holds it afterwards."""
    ended = {}
    for index in range(3):
        started(addresses, index, ended)
    wait_until(lambda: len(ended) == 3)
    socket.create_server(("127.0.0.1", meeting.port_of(addresses[0])), reuse_port=True).close()


def test_other_clusters_are_named(addresses):
    """On all workers; names of hosts may differ, as `localhost` and `127.0.0.1` do."""
    ended = {}
    local = [each.replace("127.0.0.1", "localhost") for each in addresses]
    started(local, 1, ended)
    started([*addresses, "127.0.0.1:1"], 2, ended)
    started(addresses, 0, ended)
    wait_until(lambda: 0 in ended and 2 in ended)
    assert ended[0] == ended[2]
    assert ended[0].startswith("Worker 2 and the chief have different clusters in TF_CONFIG.")


def test_one_worker_waits_for_nobody():
    meeting.meet(["127.0.0.1:1"], 0)


def calls(address):
    """Whether somebody listens there."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", meeting.port_of(address))).close()
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "number", "ignores"), [(0, signal.SIGTERM, [signal.SIGINT]), (1, signal.SIGINT, [])]
)
def test_a_worker_that_waits_can_be_ended(addresses, index, number, ignores):
    """Inside TensorFlow neither signal reached it; what it ignores from the start does nothing."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    waits = start_process(
        [sys.executable, "-c", "import keras_multigpu"],
        ignores,
        env={
            **os.environ,
            "PYTHONPATH": python_path(Path(__file__).parents[2]),
            "TF_CONFIG": json.dumps(config),
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        stderr=subprocess.DEVNULL,
    )
    if index:
        with socket.create_server(("127.0.0.1", meeting.port_of(addresses[0]))) as chief:
            chief.accept()[0].close()
    else:
        wait_until(lambda: calls(addresses[0]))
    for each in [*ignores, number]:
        waits.send_signal(each)
    assert waits.wait(timeout=PATIENCE) == -number
