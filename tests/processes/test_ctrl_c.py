"""Ctrl-C ends what this process has started, and all that those processes have started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it, lives, start_process, wait_until

SCRIPT = """
import functools, os, subprocess, sys, time

def wait(name):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{name}.{os.getpid()}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)

if __name__ == "__main__":
    import keras_multigpu as kmg
"""

CALLS = {
    "jobs, and one that waits": (
        "kmg.train_separately([functools.partial(wait, name) for name in 'abc'], devices=2)"
    ),
    "workers": "kmg.cluster.local(functools.partial(wait, 'a'), 2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_ctrl_c_ends_all_processes(call, tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}    {call}\n")
    process = start_process(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=as_users_start_it(Path(__file__).parents[2]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    found = []

    def have_started():
        found[:] = [path.read_text().split() for path in tmp_path.glob("?.*")]
        return len(found) == 2 and all(len(each) == 2 for each in found)

    wait_until(have_started)
    pids = [int(pid) for each in found for pid in each]
    assert all(map(lives, pids))
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT and b"KeyboardInterrupt" in error
    wait_until(lambda: not any(map(lives, pids)))
    assert not list(tmp_path.glob("c.*")), "The third job does not start."
