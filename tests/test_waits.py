"""No test waits longer than `PATIENCE`."""

import ast
import os
import sys
from pathlib import Path

import pytest
from helpers import processes_left

TESTS = Path(__file__).parent
# `start_process` itself; jobs, which end with the process that starts them; `make dist`, which
# somebody watches.
APART = ("processes_left.py", "separate_jobs.py", "make_dist.py")
OURS = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if TESTS / "benchmarks" not in path.parents and path.name not in APART
]
WITHOUT_LIMIT = ("communicate", "join", "wait")

# `Workers.wait` has a limit of its own, and writing a checkpoint always ends.
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
        return "should be `start_process` of processes_left.py, which kills what runs too long"
    if name.rpartition(".")[2] in WITHOUT_LIMIT and not call.args and not given:
        return "needs `PATIENCE`"
    return None


def test_every_wait_has_a_limit():
    """A process that hangs fails one test instead of stopping all of them."""
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
