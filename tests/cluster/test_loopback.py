"""If all workers run on one machine, no other machine can reach their ports."""

import functools
import logging
import os
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.processes_left import PATIENCE

from keras_multigpu.cluster import this_machine
from keras_multigpu.cluster.environment import Cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Only Linux can bind a socket so.")


@pytest.fixture
def server():
    with socket.create_server(("", 0)) as server:
        yield server


def device(server):
    name = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    return name.rstrip(b"\0").decode()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1", "127.0.0.1"], "lo"),
        (["localhost", "127.0.1.1"], "lo"),
        (["[::1]", "127.0.0.1"], "lo"),
        (["127.0.0.1", "node2"], ""),
        (["10.0.0.1", "10.0.0.1"], ""),
    ],
)
def test_a_listening_socket_is_bound_to_loopback(server, hosts, expected):
    """To its loopback device, and only if all workers run on this machine."""
    port = server.getsockname()[1]
    with socket.create_server(("", 0)) as other:
        workers = f"{hosts[0]}:{port}", f"{hosts[1]}:{other.getsockname()[1]}"
        this_machine.keep_to_loopback(Cluster(workers, 0))
        assert (device(server), device(other)) == (expected, "")
    if expected:
        socket.create_connection(("127.0.0.1", port)).close()


REACH = "import socket; socket.create_connection(('10.213.7.1', {}), 0.3)"


@pytest.fixture
def neighbour():
    """Runs Python as if on another machine: in a network namespace with a virtual cable."""
    name = f"kmg{os.getpid()}"
    run = functools.partial(subprocess.run, capture_output=True, timeout=PATIENCE, check=False)
    steps = [
        f"ip netns add {name}",
        f"ip link add {name} type veth peer name cable netns {name}",
        f"ip addr add 10.213.7.1/24 dev {name}",
        f"ip link set {name} up",
        f"ip -n {name} addr add 10.213.7.2/24 dev cable",
        f"ip -n {name} link set cable up",
    ]
    done = run(["sh", "-c", " && ".join(steps)])
    if done.returncode == 0:
        inside = ["ip", "netns", "exec", name, sys.executable, "-c"]
        yield lambda code: run([*inside, code]).returncode
    run(["ip", "link", "del", name])
    run(["ip", "netns", "del", name])
    if done.returncode:
        pytest.skip("Only root can create networks.")


@pytest.mark.skipif(not shutil.which("ip"), reason="`ip` is not installed.")
def test_other_machines_cannot_reach_a_bound_socket(server, neighbour):
    port = server.getsockname()[1]
    assert neighbour(REACH.format(port)) == 0
    this_machine.keep_to_loopback(Cluster((f"127.0.0.1:{port}",), 0))
    assert neighbour(REACH.format(port)) == 1


def test_a_socket_that_cannot_be_bound_is_reported(server, monkeypatch, caplog):
    """As on Linux before 5.7 for users other than root."""

    def refuse(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(this_machine.os, "listdir", refuse)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        this_machine.keep_to_loopback(Cluster((f"127.0.0.1:{server.getsockname()[1]}",), 0))
    assert "Other machines can reach this worker's port" in caplog.text
