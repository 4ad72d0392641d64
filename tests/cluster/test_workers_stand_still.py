"""If one worker stands still, each says where it is, and what it knows of the others."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE
from worker_processes import Workers

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("standing_worker.py")
TIMEOUTS = {"KERAS_MULTIGPU_HEARTBEAT_TIMEOUT": str(PATIENCE)}


def said(workers, index, *texts):
    """What a worker has written, once it has written these."""
    latest = time.monotonic() + PATIENCE
    while not all(text in (output := workers.output(index)) for text in texts):
        assert time.monotonic() < latest, output
        assert workers.processes[index].is_alive(), output
        time.sleep(0.1)
    return output


def assert_ends(workers):
    assert workers.wait() == [0, 0], workers.output(0) + workers.output(1)
    assert "keras_multigpu: Training goes on, after" in workers.output(0)
    assert workers.output(0).count("stands still") == 1


def test_workers_tell_each_other_where_they_wait(tmp_path):
    goes_on = tmp_path / "goes on"
    with Workers(SCRIPT, 2, ("data", goes_on), TIMEOUTS) as workers:
        first = said(workers, 0, "Training stands still", "keras_multigpu: Worker 1 (127.0.0.1:")
        second = said(workers, 1, "Training stands still", "keras_multigpu: Worker 0 (127.0.0.1:")
        goes_on.touch()
        assert_ends(workers)
    for_sums = ") waits for the other workers (epoch 1, step 6)"
    for output in (first, second):
        assert for_sums in output
        assert ") waits for data (epoch 1, step 6)" in output


def test_a_worker_that_says_nothing_is_named(tmp_path):
    with Workers(SCRIPT, 2, ("stopped", tmp_path / "none"), TIMEOUTS) as workers:
        first = said(workers, 0, "says nothing")
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert_ends(workers)
    assert "Worker 1 (127.0.0.1:" in first.splitlines()[-1]
