"""Lines between workers: who dies is named, with its reason if it gave one; who leaves is not."""

import socket
import sys

import pytest
from processes_left import wait_until

from keras_multigpu.cluster import lifelines
from keras_multigpu.cluster.lifelines import Lifelines

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
PASSWORD = "open"


@pytest.fixture
def workers(monkeypatch):
    """A chief and two others, with their lines."""
    told = []
    monkeypatch.delattr(sys, "last_value", raising=False)  # Of another test.
    monkeypatch.setattr(lifelines, "report", told.append)
    chief, *others = made = [Lifelines(ADDRESSES, index) for index in range(3)]
    with lifelines.listening(ADDRESSES) as server:
        lifelines.in_background(chief.accept, server, PASSWORD)
        for other in others:
            lifelines.in_background(other.connect, server.getsockname()[1], PASSWORD)
        wait_until(lambda: [len(each._lines) for each in made] == [2, 1, 1])
        yield made, told, server.getsockname()
        for each in made:
            each.say_goodbye()


def hang_up(worker):
    """What the system does for a process that dies."""
    for line in list(worker._lines.values()):
        line.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_worker_is_named_by_all_others(workers, dead):
    """Also by those that have no line to it."""
    made, told, _ = workers
    made[dead]._is_over = True  # It says nothing any more.
    hang_up(made[dead])
    wait_until(lambda: len(told) == 2)
    assert told == [f"worker {dead} ({ADDRESSES[dead]}) is gone"] * 2


def test_a_dead_chief_is_named(workers):
    """By each of the others."""
    made, told, _ = workers
    made[0]._is_over = True
    hang_up(made[0])
    wait_until(lambda: len(told) == 2)
    assert told == [f"worker 0 ({ADDRESSES[0]}) is gone"] * 2


def test_what_a_worker_says_before_it_ends_is_what_counts(workers):
    """And not that its line is broken then."""
    made, told, _ = workers
    made[2].fail("worker 2 failed: a\nbug")
    hang_up(made[2])
    wait_until(lambda: len(told) == 3)
    assert told == ["worker 2 failed: a\nbug"] * 3


def test_an_error_that_ends_python_is_told(workers, monkeypatch):
    """Wherever in the script it was."""
    made, told, _ = workers
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("a bug"), raising=False)
    made[1].say_goodbye()
    wait_until(lambda: len(told) == 3)
    assert told == [f"worker 1 ({ADDRESSES[1]}) failed: ZeroDivisionError: a bug"] * 3
    monkeypatch.delattr(sys, "last_value")


def test_who_says_goodbye_is_not_dead(workers):
    """Its script has come to its end."""
    made, told, _ = workers
    made[1].say_goodbye()
    wait_until(lambda: made[0].ended == [1])
    made[0].fail("the end")
    wait_until(lambda: len(told) == 2)
    assert told == ["the end"] * 2


@pytest.mark.parametrize("hello", [b"wrong 1\n", b"open 7\n", b"open\n", b"\xff\n", b""])
def test_a_stranger_is_not_listened_to(workers, hello):
    """Nothing that it says counts, nor that it goes."""
    made, told, address = workers
    with socket.create_connection(address) as stranger:
        stranger.sendall(hello + b'"all is lost"\n')
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert len(made[0]._lines) == 2
    assert told == []
