"""What `make gpu` runs, on GPUs; on logical CPU devices, all of it but what only GPUs show."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.all_replicas import ALL_REPLICAS
from helpers.processes_left import as_users_start_it, start_process

PROGRAM = Path(__file__).with_name("gpu_checks.py")
LIMIT = 1800
"""Seconds; a third of it on two idle cores."""
PARTS = "facts,sums,parity,recurrent,strategies,traces,memory,times,spread,xla,ahead"


def run(program, folder, *options, **more):
    """The ended program, which has limits of its own: a part may print nothing for minutes."""
    command = [sys.executable, str(program), "--within", str(LIMIT), *options]
    process = start_process(
        command,
        patience=2 * LIMIT,
        env=as_users_start_it(OUT=str(folder), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process.communicate(timeout=2 * LIMIT)[0], process.returncode


def checked(folder, *options, **more):
    """The rows of gpu.json, by part and name; none has failed."""
    output, status = run(PROGRAM, folder, *options, **more)
    assert status == 0, output
    written = folder / "gpu.json"
    assert written.exists(), output
    parts = json.loads(written.read_text(encoding="utf-8"))
    return {part: {row["name"]: row for row in found["rows"]} for part, found in parts.items()}


@pytest.mark.skipif(not ALL_REPLICAS, reason="Several minutes: `make test-all` runs it.")
def test_all_checks_pass_on_cpu_devices(tmp_path):
    """Over TensorFlow's own all-reduce; so on a machine with GPUs none fails for another reason."""
    found = checked(tmp_path, "--cpu")
    assert [*found] == PARTS.split(",")
    assert found["facts"]["devices"]["got"] == ["CPU:0", "CPU:1"]
    assert found["ahead"]["steps whose batch came in time"]["got"] == 10
    assert found["traces"]["dense: sums a step, of all devices"]["got"] > 0
    assert found["xla"]["on, ours: programs"]["got"] > 0
    assert found["xla"]["off, ours: programs"]["got"] == 0


@pytest.mark.slow
def test_what_fails_or_hangs_is_a_row_and_the_rest_goes_on(tmp_path):
    """A check that raises, one that aborts its process, and one that waits for ever."""
    part = tmp_path / "bad.py"
    part.write_text(BAD, encoding="utf-8")
    program = tmp_path / "gpu_checks.py"
    text = PROGRAM.read_text(encoding="utf-8")
    program.write_text(text.replace('    "facts": 60,', '    "bad": 4,'), encoding="utf-8")
    output, status = run(program, tmp_path, "--cpu", "--only", "bad")
    assert status == 1
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["bad"]["rows"]
    assert [(row["name"], row["got"], row["ok"]) for row in rows] == [
        ("good", 1, True),
        ("raises", "ValueError: no", False),
        ("aborts", "the process ended", False),
        ("hangs", "nothing for 4 s", False),
        ("good again", 2.5, None),
    ]
    assert "yes bad: good" in output
    assert "not ok: bad: raises, bad: aborts, bad: hangs" in output


BAD = """
import os, time
from collections import namedtuple
Row = namedtuple("Row", "name expected got ok")
def raises():
    raise ValueError("no")
def checks():
    return {
        "good": lambda: Row("good", 1, 1, True),
        "raises": raises,
        "aborts": os.abort,
        "hangs": lambda: time.sleep(600),
        "good again": lambda: [Row("good again", "", 2.5, None)],
    }
"""


def test_each_part_has_a_module(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import gpu_checks

    assert ",".join(gpu_checks.PARTS) == PARTS
    assert all(callable(importlib.import_module(part).checks) for part in gpu_checks.PARTS)


def test_a_sum_is_hidden_as_long_as_another_kernel_runs(monkeypatch):
    """Of a sum from 10 to 30, 15 to 25 has kernels beside it; a copy does not compute."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from traces import Event, hidden_share

    def share(*events):
        return hidden_share([Event(*event) for event in events])

    sums = ("ncclDevKernel_AllReduce_Sum_f32", 10, 30)
    assert share(sums, ("gemm", 15, 20), ("relu", 18, 25), ("gemm", 40, 90)) == 0.5
    assert share(sums, ("gemm", 0, 12), ("MemcpyD2H", 12, 30)) == 0.1
    assert share(sums, ("gemm", 0, 100)) == 1.0
    assert share(sums, ("gemm", 30, 100)) == 0.0


@pytest.mark.gpu
def test_several_gpus_train_as_one_does(tmp_path):
    """Plain Keras on one GPU, this package on all; each share is on the GPU that uses it."""
    parts = "facts,sums,parity,recurrent,strategies,ahead"
    found = checked(tmp_path, "--only", parts, CUDA_VISIBLE_DEVICES=None)
    assert len(found["facts"]["devices"]["got"]) > 1
