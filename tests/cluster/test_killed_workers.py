"""Workers of a launched training are killed; its weights are those of one that was left alone.

`make test` does it twice: once by SIGKILL, after which all start again, and once a worker is asked
to end by SIGTERM, which all have to follow, and one process goes on. `make soak` starts all again
after ten times SIGKILL, after SIGTERM, and after one that freezes, and draws the moments anew.
"""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import training_to_kill
from helpers.processes_left import PATIENCE, python_path, start_process

import keras_multigpu as kmg

SCRIPT = Path(training_to_kill.__file__)
ROOT = Path(__file__).parents[2]
SIGNALS = [signal.SIGKILL]
if os.environ.get("KMG_KILLS"):
    SIGNALS = [*SIGNALS, signal.SIGTERM, *[signal.SIGKILL] * 9, signal.SIGSTOP]
SEED = int(os.environ.get("KMG_KILL_SEED", "0"))
RESTARTS = len(SIGNALS)
EPOCHS = 2 + len(SIGNALS) // 2


def launched(folder, *more, workers=2, restarts=RESTARTS, epochs=EPOCHS):
    folder.mkdir(exist_ok=True)
    launch = ["launch", "--workers", str(workers), "--max-restarts", str(restarts)]
    script = [SCRIPT, folder, "--epochs", str(epochs), *more]
    return start_process(
        [sys.executable, "-m", "keras_multigpu", *launch, *script],
        patience=PATIENCE * (1 + RESTARTS),
        env={
            **os.environ,
            "PYTHONPATH": python_path(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def followed(launcher, *signals, code=0):
    """Read what a training prints to its end; send a worker a signal some steps after each start.

    Args:
        launcher: The process.
        signals: One for each start.
        code: The exit code that is expected.

    Returns:
        The lines.
    """
    chance, lines, pids, signals = random.Random(SEED), [], {}, list(signals)
    left = chance.randrange(2, 11)
    for line in launcher.stdout:
        lines.append(line)
        if started := re.match(r"\[worker (\d)\] pid (\d+)", line):
            pids[started[1]] = int(started[2])
        # Both workers say so: one to five steps, and a checkpoint lies behind every fourth.
        left -= bool(re.match(r"\[worker \d\] step", line))
        if signals and left <= 0 and len(pids) == 2:
            os.kill(pids[chance.choice("01")], signals.pop(0))
            left, pids = chance.randrange(2, 11), {}
    launcher.stdout.close()
    assert launcher.wait(timeout=PATIENCE) == code, "".join(lines)
    assert not signals
    return lines


@pytest.mark.slow
def test_killed_workers_end_as_if_nothing_had_happened(tmp_path):
    """On both workers bit for bit as in one process; each kill costs one restart of all."""
    lines = followed(launched(tmp_path / "killed"), *SIGNALS)
    assert sum("starting all again" in line for line in lines) == len(SIGNALS)
    ended = any("Ended by SIGTERM after step" in line for line in lines)
    assert ended == (signal.SIGTERM in SIGNALS)
    kmg.strategy(devices=2)
    expected = training_to_kill.trained(tmp_path / "whole", epochs=EPOCHS, alike=False)
    for worker in range(2):
        with np.load(tmp_path / "killed" / f"worker{worker}.npz") as found:
            # The names of layers count the models of a process.
            for name, value in zip(found, expected.values(), strict=True):
                np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.slow
def test_fewer_workers_go_on(tmp_path, capfd):
    """One goes on where two were asked to end, and ends as a process that was never disturbed."""
    two = launched(tmp_path / "fewer", "--alike", restarts=0, epochs=2)
    lines = followed(two, signal.SIGTERM, code=143)
    assert any("Ended by SIGTERM after step" in line for line in lines)
    capfd.readouterr()
    found = training_to_kill.trained(tmp_path / "fewer", epochs=2, alike=True)
    assert 0 < capfd.readouterr().out.count("step ") < 18
    expected = training_to_kill.trained(tmp_path / "whole", epochs=2, alike=True)
    for (name, value), one in zip(found.items(), expected.values(), strict=True):
        np.testing.assert_allclose(value, one, 2e-5, 1e-6, name)
