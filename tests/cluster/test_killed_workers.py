"""Killed workers: the run ends with the weights of an undisturbed one.

`make test` kills once: one of two workers dies, and the other saves its state and continues alone.
`make soak` sends SIGKILL twenty times to one of 2 to 4 workers, at random moments, and also SIGTERM
and SIGSTOP. The launcher restarts all workers or continues with those left, or each worker
restarts by itself, as in Kubernetes.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import training_to_kill
from helpers.processes_left import PATIENCE, python_path, start_process

import keras_multigpu as kmg
from keras_multigpu.cluster.this_machine import free_ports

SCRIPT = Path(training_to_kill.__file__)
ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("KMG_KILL_SEED", "0"))
STEPS = 9
KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP

BY_ITSELF = """
for index in {indices}; do
    export TF_CONFIG='{config}'
    TF_CONFIG=${{TF_CONFIG/INDEX/$index}}
    (until "$@"; do echo "starts again after code $?"; done) 2>&1 | sed -u "s/^/[worker $index] /" &
done
wait
"""
"""Restarts each worker that ends with an error, at the same address and without the others."""


def launched(workers, least, restarts):
    """Starts workers by the launcher."""
    options = {"--workers": workers, "--max-restarts": restarts}
    options |= {"--min-workers": least} if restarts else {}
    words = [word for pair in options.items() for word in map(str, pair)]
    return [sys.executable, "-m", "keras_multigpu", "launch", *words]


def each_by_itself(workers):
    """Starts workers that find each other again."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    task = {"type": "worker", "index": "INDEX"}
    config = json.dumps({"cluster": {"worker": addresses}, "task": task})
    line = BY_ITSELF.format(indices=" ".join(map(str, range(workers))), config=config)
    return ["bash", "-c", line, "bash", sys.executable]


def followed(command, workers, signals, folder, *arguments):
    """Start a training, signal a worker some steps after each start, and read all output.

    Returns:
        The lines printed, and for each SIGKILL how many of the survivors' steps were lost.
    """
    folder.mkdir()
    process = start_process(
        [*command, SCRIPT, folder, *map(str, arguments)],
        patience=PATIENCE * workers * (1 + len(signals)),
        env={
            **os.environ,
            "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    chance, lines, pids, lost, left = random.Random(SEED), [], {}, [], list(signals)
    wait, done, killed = chance.randrange(1, 12), -1, None
    for line in process.stdout:
        lines.append(line)
        if started := re.match(r"\[worker (\d)\] pid (\d+)", line):
            pids[started[1]] = int(started[2])
        if step := re.match(r"\[worker (\d)\] step (\d+) (\d+)", line):
            number = STEPS * int(step[2]) + int(step[3])
            if step[1] in pids:
                lost += [] if killed is None else [done + 1 - number]
                killed, wait = None, wait - 1
            done = number if step[1] != killed else done
        if left and wait <= 0 and pids:
            time.sleep(chance.random() / 50)
            victim, signalled = chance.choice(sorted(pids)), left.pop(0)
            os.kill(pids[victim], signalled)
            killed = victim if signalled == KILL else None
            wait, pids = chance.randrange(2, 6 * workers), {}
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 0, "".join(lines)
    assert not left, "".join(lines)
    return lines, lost


CASES = {"those left of 2": (launched, 2, 1, [KILL])}
if os.environ.get("KMG_KILLS"):
    CASES |= {
        "2 again": (launched, 2, 2, [*[KILL] * 4, TERM, *[KILL] * 3, STOP]),
        "3 by themselves": (each_by_itself, 3, 3, [KILL] * 6),
        "those left of 4": (launched, 4, 2, [KILL] * 6),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_workers_end_as_if_nothing_had_happened(case, tmp_path):
    """Bit for bit if all are started again. At most the step under way is lost."""
    start, workers, least, signals = CASES[case]
    epochs, alike = 2 + len(signals), ["--alike"] * (least < workers)
    command = start(workers, least, len(signals)) if start is launched else start(workers)
    arguments = ["--epochs", epochs, *alike]
    lines, lost = followed(command, workers, signals, tmp_path / "killed", *arguments)
    sys.stdout.write(f"{case}: {len(signals)} signals, steps lost: {lost}\n")
    assert max(lost, default=0) <= 0, "".join(lines)
    assert any("Ended by SIGTERM after step" in line for line in lines) == (TERM in signals)
    if workers == 3:
        # One process would sum the values of three workers in another order.
        followed(launched(3, 3, 0), 3, [], tmp_path / "whole", *arguments)
        expected = np.load(tmp_path / "whole" / "worker0.npz")
    else:
        kmg.strategy(devices=workers)
        expected = training_to_kill.trained(tmp_path / "whole", epochs=epochs, alike=bool(alike))
    ended = sorted((tmp_path / "killed").glob("worker*.npz"))
    assert least <= len(ended) <= workers
    for path in ended:
        with np.load(path) as found:
            # Names of layers depend on how many models a process has made.
            for name, value in zip(found, expected.values(), strict=True):
                rounding = {"rtol": 2e-5, "atol": 1e-6} if alike else {"rtol": 0, "atol": 0}
                np.testing.assert_allclose(found[name], value, err_msg=name, **rounding)
