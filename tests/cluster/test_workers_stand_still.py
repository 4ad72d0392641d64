"""If one worker stands still, each says where it is, and what it knows of the others."""

import os
import re
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
    while not all(re.search(text, (output := workers.output(index))) for text in texts):
        assert time.monotonic() < latest, output
        assert workers.processes[index].is_alive(), output
        time.sleep(0.1)
    return output


def assert_ends(workers, times):
    assert workers.wait() == [0, 0], workers.output(0) + workers.output(1)
    assert workers.output(0).count("keras_multigpu: Training goes on, after") == times
    assert workers.output(0).count("stands still") == times


def test_workers_tell_each_other_where_they_wait(tmp_path):
    """For data, and then in a step: for the sum that one has come to, and the other has not."""
    other = r"Worker 0 \(127.*\) waits for the other workers \(epoch 1, step 6\)"
    data = r"Worker 1 \(127.*\) waits for data \(epoch 1, step 6\)"
    step = r"Worker {} \(127.*\) is in a step: CPU:0 has come to sum {} of 3 \(.*epoch 1, step 8\)"
    with Workers(SCRIPT, 2, (tmp_path,), TIMEOUTS) as workers:
        for index in (0, 1):
            said(workers, index, "Training stands still", other, data)
        (tmp_path / "data").touch()
        for index in (0, 1):
            said(workers, index, step.format(0, 1), step.format(1, 2))
        (tmp_path / "step").touch()
        assert_ends(workers, 2)


def test_a_worker_that_says_nothing_is_named(tmp_path):
    """And the sum that it has come to is known from the others."""
    (tmp_path / "data").touch()
    with Workers(SCRIPT, 2, (tmp_path,), TIMEOUTS) as workers:
        while not (tmp_path / "waits for step").exists():
            said(workers, 0, "")
            time.sleep(0.1)
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        (tmp_path / "step").touch()
        first = said(workers, 0, "says nothing")
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert_ends(workers, 1)
    assert "Worker 1 (127.0.0.1:" in first.splitlines()[-1]
    found = r"CPU:0 has come to sum 2 of 3 \(standing_worker.py:\d+\), all replicas to sum 1 "
    assert re.search(found, first), first
