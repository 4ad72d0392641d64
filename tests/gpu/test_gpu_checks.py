"""What `make gpu` runs, on GPUs; on logical CPU devices, all of it but what only GPUs show."""

import json
import sys
from pathlib import Path

import pytest
from helpers.processes_left import as_users_start_it, ended_process

PROGRAM = Path(__file__).with_name("gpu_checks.py")
ON_CPUS = "facts,sums,parity,recurrent,strategies,traces,memory,times,spread,xla,ahead"


def checked(folder, *options, fails=False, **more):
    """The rows of the program's gpu.json, by part and name; it fails if one is not ok."""
    command = [sys.executable, str(PROGRAM), *options]
    ended = ended_process(command, env=as_users_start_it(OUT=str(folder), **more))
    assert ended.returncode == fails, ended.stdout + ended.stderr
    written = folder / "gpu.json"
    assert written.exists(), ended.stdout
    parts = json.loads(written.read_text(encoding="utf-8"))
    return {part: {row["name"]: row for row in found["rows"]} for part, found in parts.items()}


@pytest.mark.in_test_all("all of what is run by hand on GPUs: several minutes")
def test_all_checks_pass_on_cpu_devices(tmp_path):
    """Over TensorFlow's own all-reduce; so on a machine with GPUs none fails for another reason."""
    found = checked(tmp_path, "--cpu", "--within", "1800")
    assert [*found] == ON_CPUS.split(",")
    assert found["facts"]["devices"]["got"] == ["CPU:0", "CPU:1"]
    assert found["ahead"]["steps whose batch came in time"]["got"] == 10
    assert found["traces"]["dense: sums a step, of all devices"]["got"] > 0
    assert (
        found["xla"]["on, ours: programs"]["got"] > 0 == found["xla"]["off, ours: programs"]["got"]
    )


@pytest.mark.slow
def test_what_fails_or_hangs_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch):
    """A check that raises, one that aborts its process, and one that waits for ever."""
    part = tmp_path / "bad.py"
    part.write_text(BAD, encoding="utf-8")
    program = tmp_path / "gpu_checks.py"
    text = PROGRAM.read_text(encoding="utf-8")
    program.write_text(text.replace('    "facts": 60,', '    "bad": 4,'), encoding="utf-8")
    ended = ended_process(
        [sys.executable, str(program), "--cpu", "--only", "bad"],
        env=as_users_start_it(OUT=str(tmp_path)),
    )
    assert ended.returncode == 1
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["bad"]["rows"]
    assert [(row["name"], row["got"], row["ok"]) for row in rows] == [
        ("good", 1, True),
        ("raises", "ValueError: no", False),
        ("aborts", "the process ended", False),
        ("hangs", "nothing for 4 s", False),
        ("good again", 2.5, None),
    ]
    assert "yes bad: good" in ended.stdout
    assert "not ok: bad: raises, bad: aborts, bad: hangs" in ended.stdout


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
