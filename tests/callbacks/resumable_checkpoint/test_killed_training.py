"""A real training process is killed at random moments, and the run ends as without kills.

`make test` kills a few times, `make soak` forty times.
"""

import contextlib
import json
import os
import random
import time

import killed_training
import numpy as np
import pytest
from helpers.processes_left import PATIENCE, PROCESSES

KILLS = int(os.environ.get("KMG_KILLS", "0"))
SEED = int(os.environ.get("KMG_KILL_SEED", "0"))
EPOCHS = 5 if KILLS == 0 else 60


def started(folder, **options):
    """Start the training in a process; returns it and what it prints."""
    lines, said = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(
        target=killed_training.main,
        args=(said.send, folder, EPOCHS),
        kwargs=options,
        daemon=True,  # Nobody waits for one that hangs.
    )
    process.start()
    said.close()
    return process, lines


def next_line(lines):
    """What the training prints next; an `EOFError` at its end."""
    assert lines.poll(PATIENCE)
    return lines.recv()


def killed(training, line, delay=0.0):
    """Kill a process some seconds after it has printed a line; False if it ended before."""
    process, lines = training
    with contextlib.suppress(EOFError):
        while not next_line(lines).startswith(line):
            pass
        time.sleep(delay)
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def finished(training):
    process, lines = training
    with contextlib.suppress(EOFError):
        while True:
            next_line(lines)
    process.join(PATIENCE)
    assert process.exitcode == 0


def assert_same_end(whole, folder):
    """All values and the history are equal, bit for bit, and no example was seen twice or never."""
    with np.load(whole / "result.npz") as one, np.load(folder / "result.npz") as other:
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], name)
    texts = [(path / "history.json").read_text() for path in (whole, folder)]
    assert texts[0] == texts[1]
    assert (whole / "log.csv").read_text() == (folder / "log.csv").read_text()
    assert json.loads(texts[1])["uneven"] == [0.0] * EPOCHS
    assert json.loads(texts[1])["val_uneven"] == [0.0] * EPOCHS


@pytest.mark.parametrize("shard", [None, pytest.param("weights", marks=pytest.mark.slow)])
def test_a_killed_training_ends_as_if_nothing_had_happened(shard, tmp_path):
    """Killed in a step, and before a checkpoint is renamed."""
    whole = started(tmp_path / "whole", shard=shard)
    folder = tmp_path / "killed"
    for line, options in [
        ("step 2 1", {}),
        ("in rename", {"pause": 6}),
    ]:
        assert killed(started(folder, shard=shard, **options), line)
    last = started(folder, shard=shard)
    finished(whole)
    finished(last)
    assert_same_end(tmp_path / "whole", folder)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["kmg", "kmg", "lock"]


@pytest.mark.skipif(not KILLS, reason="`make soak` runs it: forty starts of TensorFlow.")
def test_many_kills_at_random_moments(tmp_path):
    """`KMG_KILLS` kills, in as many trainings as needed."""
    chance = random.Random(SEED)
    finished(started(tmp_path / "whole"))
    kills, training = 0, 0
    while kills < KILLS:
        training += 1
        folder = tmp_path / f"training {training}"
        while kills < KILLS:
            # Sometimes while it restores and compiles, mostly while it steps, saves, validates.
            early = chance.random() < 0.15
            line, delay = (
                ("fit", chance.uniform(0, 1)) if early else ("step", chance.uniform(0, 0.5))
            )
            if not killed(started(folder), line, delay):
                break
            kills += 1
        finished(started(folder))
        assert_same_end(tmp_path / "whole", folder)
