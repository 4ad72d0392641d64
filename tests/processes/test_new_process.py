"""New processes find their parent's modules, and ignore those in the working folder."""

import ast
import os
import random
import subprocess
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE

import keras_multigpu
from keras_multigpu.cluster import slurm, this_machine
from keras_multigpu.processes import new_process

PACKAGE = Path(keras_multigpu.__file__).parent


def test_files_in_the_working_folder_do_not_shadow_the_standard_library(tmp_path, monkeypatch):
    """`tempfile` imports `random`. An interactive Python has `''` on its path."""
    (tmp_path / "random.py").write_text("raise SystemExit('the working folder was searched')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    ended = subprocess.run(
        new_process.command("tempfile"),
        env=new_process.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_package_is_found_where_it_was_imported_from(monkeypatch):
    monkeypatch.setattr("sys.path", ["", "/somewhere"])
    path = new_process.environment(MORE="1")["PYTHONPATH"]
    assert path == f"/somewhere:{PACKAGE.parent}"


def test_a_new_process_does_not_inherit_the_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_PROCID", "SLURM_STEP_NODELIST"):
        monkeypatch.setenv(name, "0")
        assert name not in new_process.environment()


def test_only_new_process_starts_python():
    with_python = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert with_python == {"new_process.py"}


def programs(folder, monkeypatch, **texts):
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(new_process, "ANSWER_SECONDS", 0.3)


def test_a_driver_that_hangs_does_not_hang_the_import(tmp_path, monkeypatch):
    """Under SLURM, the import asks for the GPUs and for the names of the nodes."""
    hangs = {"nvidia-smi": "exec sleep 300", "scontrol": "exec sleep 300"}
    programs(tmp_path, monkeypatch, **hangs)
    with pytest.raises(TimeoutError, match="`nvidia-smi -L` has not ended.*Expected.*see `dmesg`"):
        this_machine.visible_gpus()
    assert slurm.host_names("gpu[1-3]") == ["gpu1", "gpu2", "gpu3"]


def test_a_program_that_fails_says_nothing(tmp_path, monkeypatch):
    programs(tmp_path, monkeypatch, **{"nvidia-smi": "echo GPU 0; exit 9"})
    assert this_machine.visible_gpus() == []


def test_ports_are_chosen_without_the_user_s_random_numbers():
    state = random.getstate()
    this_machine.free_ports(2)
    assert random.getstate() == state
