"""Lifelines: when a worker dies, the others report it and why; leaving is not a failure."""

import contextlib
import socket
import sys

import pytest
from helpers.processes_left import wait_until

from keras_multigpu.cluster import lifelines
from keras_multigpu.cluster.lifelines import Lifelines, Line

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]


@pytest.fixture
def workers(monkeypatch):
    told = []
    monkeypatch.delattr(sys, "last_value", raising=False)  # Of another test.
    monkeypatch.setattr(lifelines, "report", told.append)
    pairs = [tuple(map(Line, socket.socketpair())) for _ in range(2)]
    lines = [{1: pairs[0][0], 2: pairs[1][0]}, {0: pairs[0][1]}, {0: pairs[1][1]}]
    made = [Lifelines(ADDRESSES, index, own) for index, own in enumerate(lines)]
    for each in made:
        each.joined()
    yield made, told
    for each in made:
        each.say_goodbye()


def hang_up(worker):
    for line in list(worker._lines.values()):
        with contextlib.suppress(OSError):  # Its own thread was faster: the line is closed.
            line.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_worker_is_named_by_all_others(workers, dead):
    made, told = workers
    made[dead]._is_over = True  # It reports nothing any more.
    hang_up(made[dead])
    wait_until(lambda: len(told) == 2)
    assert told == [f"worker {dead} ({ADDRESSES[dead]}) is gone"] * 2


def test_the_reason_that_a_dying_worker_gives_is_reported(workers):
    made, told = workers
    made[2].fail("worker 2 failed: a\nbug")
    hang_up(made[2])
    wait_until(lambda: len(told) == 3)
    assert told == ["worker 2 failed: a\nbug"] * 3


def test_an_error_that_ends_python_is_reported_as_the_reason(workers, monkeypatch):
    made, told = workers
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("a bug"), raising=False)
    made[1].say_goodbye()
    wait_until(lambda: len(told) == 3)
    assert told == [f"worker 1 ({ADDRESSES[1]}) failed: ZeroDivisionError: a bug"] * 3
    monkeypatch.delattr(sys, "last_value")


def test_a_worker_that_says_goodbye_is_not_dead(workers):
    made, told = workers
    made[1].say_goodbye()
    wait_until(lambda: made[0].ended == [1])
    made[0].fail("the end")
    wait_until(lambda: len(told) == 2)
    assert told == ["the end"] * 2


def test_nonsense_on_a_line_ends_it(workers):
    """Another program may have taken it over."""
    made, told = workers
    next(iter(made[1]._lines.values())).connection.sendall(b"{" * 10 + b"\n")
    wait_until(lambda: len(told) == 3)
    # Two report it; the third is the worker that lost its line.
    assert told.count(f"worker 1 ({ADDRESSES[1]}) is gone") == 2


def test_a_long_reason_arrives_complete(workers):
    made, told = workers
    what = lifelines.in_words(ValueError("\N{SNOWMAN}" * 5000))
    made[2].fail(what)
    wait_until(lambda: len(told) == 3)
    assert told == [what] * 3
