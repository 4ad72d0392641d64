"""What `make gpu` runs, on GPUs; on two CPU devices, only that the program works."""

import json
import sys
from pathlib import Path

import pytest
from helpers.processes_left import as_users_start_it, ended_process

PROGRAM = Path(__file__).with_name("gpu_checks.py")


def checked(folder, *options, **more):
    """The program's gpu.json; the program fails if something differs."""
    command = [sys.executable, str(PROGRAM), *options]
    ended = ended_process(command, env=as_users_start_it(OUT=str(folder), **more))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = folder / "gpu.json"
    assert written.exists(), ended.stdout
    return json.loads(written.read_text(encoding="utf-8"))


@pytest.mark.in_test_all("starts a process for what is run by hand")
def test_the_program_works_on_two_cpu_devices(tmp_path):
    """So that on a machine with GPUs it fails for no other reason."""
    found = checked(tmp_path, "--cpu", "--only", "facts,ahead")
    assert found["facts"]["facts"]["devices"] == ["/device:CPU:0", "/device:CPU:1"]
    assert found["ahead"]["ahead"]["shares in time"] == {"of": 10, "steps": 10}


@pytest.mark.gpu
def test_two_gpus_train_as_one_does(tmp_path):
    """Plain Keras on one GPU, this package on two; each share is on the GPU that uses it."""
    found = checked(tmp_path, "--only", "facts,parity,ahead", CUDA_VISIBLE_DEVICES=None)
    assert len(found["facts"]["facts"]["devices"]) == 2
    assert {case["verdict"] for case in found["parity"]["parity"].values()} == {"equal"}
