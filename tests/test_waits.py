"""No test waits longer than `PATIENCE`."""

import ast
import os
import sys
from pathlib import Path

import pytest
from helpers import processes_left

TESTS = Path(__file__).parent
# `start_process` itself; jobs that a test starts, which end with their process; `make dist`, which
# somebody watches.
APART = ("processes_left.py", "separate_jobs.py", "make_dist.py")
OURS = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if TESTS / "benchmarks" not in path.parents and path.name not in APART
]
WITHOUT_LIMIT = ("communicate", "join", "wait")

# `Workers.wait` has its limit inside, and a checkpoint is written or is not.
FINE = ("worker.wait", "workers.wait", "writer.wait", "multiprocessing.parent_process().join")


def endless(call):
    """Why a call may never return, or None."""
    name = ast.unparse(call.func)
    if name in FINE:
        return None
    given = {argument.arg for argument in call.keywords}
    if name == "subprocess.run" and "timeout" not in given:
        return "has no `timeout=PATIENCE`"
    if name == "subprocess.Popen":
        return "is to be `start_process`, of processes_left.py, which kills what runs too long"
    if name.rpartition(".")[2] in WITHOUT_LIMIT and not call.args and not given:
        return "takes `PATIENCE`"
    return None


def test_every_wait_has_a_limit():
    """So that a process that hangs fails a test, and does not stop all."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node.func)} {why}"
        for path in OURS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and (why := endless(node))
    ]
    assert not found, "\n".join(found)


SILENT = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.slow
def test_a_silent_process_is_killed(monkeypatch):
    """Whether a test waits for a line or for its end."""
    process = processes_left.start_process(SILENT, patience=0.5)
    assert process.wait(processes_left.PATIENCE) == -9
    monkeypatch.setattr(processes_left, "PATIENCE", 1)
    assert processes_left.ended_process(SILENT, env=os.environ).returncode == -9
