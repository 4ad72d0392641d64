"""`keras-multigpu doctor` names what is wrong, in environments where it really is."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.processes_left import PATIENCE, python_path

from keras_multigpu.cluster.this_machine import free_ports
from keras_multigpu.commands import main

DOCTOR = [sys.executable, "-m", "keras_multigpu", "doctor", "--json"]
TMPFS = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
"""Runs a script in a mount namespace of its own."""


def can_mount():
    command = [*TMPFS, "mount -t tmpfs none /mnt"]
    unshare = shutil.which("unshare")
    return unshare and not subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode


def diagnosed(only, *words, command=DOCTOR, **variables):
    """The exit code of a real command, and the answer of each check."""
    ended = subprocess.run(
        [*command, *(["--only", *only.split()] if only else []), *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert not ended.stderr, ended.stderr
    return ended.returncode, answers(ended.stdout)


def answers(text):
    return {each["check"]: each for each in json.loads(text)["checks"]}


@pytest.fixture
def doctor(tmp_path, monkeypatch, capfd):
    """As `diagnosed`, but only the checks run in another process. `tmp_path` is importable."""
    monkeypatch.syspath_prepend(tmp_path)

    def examine(only, *words, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["doctor", "--json", "--only", *only.split(), *words])
        return code, answers(capfd.readouterr().out)

    return examine


def config(*addresses):
    cluster = {"worker": ["127.0.0.1:" + str(free_ports(1)[0]), *addresses]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("only", "variables", "says"),
    [
        (
            "tensorflow step",
            {"KERAS_BACKEND": "jax"},
            "Keras looks for 'jax', which is not installed",
        ),
        ("cluster", {"TF_CONFIG": '{"cluster":'}, "TF_CONFIG is not JSON that can be read"),
        ("cluster", {"KERAS_MULTIGPU_CPU_DEVICES": "two"}, "is not a positive whole number"),
        (
            "cluster",
            {
                "SLURM_PROCID": "7",
                "SLURM_STEP_NODELIST": "n[1-2]",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            "SLURM_PROCID cannot be used: there are 4 tasks",
        ),
    ],
)
def test_a_wrong_variable_is_named(doctor, only, variables, says):
    code, found = doctor(only, **variables)
    ((name, answer),) = found.items()
    assert (code, name, answer["verdict"]) == (1, only.split()[0], "wrong")
    assert says in answer["says"] and answer["do"]


def test_doctor_warns_of_processes_that_train_apart(doctor):
    code, found = doctor("cluster", RANK="0", WORLD_SIZE="2", MASTER_ADDR="a")
    assert (code, found["cluster"]["verdict"]) == (0, "look")
    assert "each of which trains alone" in found["cluster"]["says"]


@pytest.mark.parametrize(
    ("state", "code", "verdict", "says"),
    [
        ("closed", 0, "look", "nothing listens at {}"),
        ("open", 0, "ok", "{} answers in "),
        pytest.param("silent", 1, "wrong", "{} cannot be reached (", marks=pytest.mark.slow),
    ],
)
def test_an_unreachable_worker_is_named(doctor, state, code, verdict, says):
    """A full queue of connections is as silent as a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        address = "{}:{}".format(*server.getsockname())
        if state == "closed":
            server.close()
        if state == "silent":
            first.connect(server.getsockname())
        found_code, found = doctor("cluster", TF_CONFIG=config(address))
    answer = found["cluster"]
    assert (found_code, answer["verdict"]) == (code, verdict), answer
    assert says.format(address) in answer["says"]


@pytest.mark.skipif(not can_mount(), reason="no mounts of its own")
@pytest.mark.parametrize(
    ("options", "says"), [("ro", "Read-only file system"), ("size=1m", "No space left on device")]
)
def test_a_folder_that_cannot_be_written_is_named(tmp_path, options, says):
    script = f'mount -t tmpfs -o {options} none {tmp_path} && exec "$0" "$@"'
    words = ["--folder", str(tmp_path / "run")]
    code, found = diagnosed("folder", *words, command=[*TMPFS, script, *DOCTOR])
    assert (code, found["folder"]["verdict"]) == (1, "wrong")
    assert found["folder"]["says"] == f"{tmp_path} cannot be written: {says}"


def module(folder, name, body):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)


def test_a_tensorflow_that_cannot_be_imported_is_reported(tmp_path):
    """Checks that need it are left out; the command itself works without it."""
    module(tmp_path, "tensorflow", "raise ImportError('libcudart.so.12: no such file')")
    code, found = diagnosed("step", PYTHONPATH=python_path(tmp_path))
    assert code == 1 and list(found) == ["tensorflow"]
    assert "imported: ImportError: libcudart.so.12: no such file" in found["tensorflow"]["says"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        # Although its process has a child that sleeps.
        ("import subprocess; subprocess.run(['sleep', '600'])", "no answer within 4 s"),
        ("import os; os.abort()", "the process ended with SIGABRT"),
    ],
)
def test_a_check_that_hangs_or_crashes_does_not_stop_the_others(doctor, tmp_path, body, says):
    module(tmp_path, "tensorflow", body)
    code, found = doctor("folder tensorflow", "--limit", "4")
    assert code == 1 and found["tensorflow"]["says"] == says and found["tensorflow"]["do"]
    assert any("tensorflow/__init__.py" in line for line in found["tensorflow"]["output"])
    assert found["folder"]["verdict"] == "ok"


SMI = "#!/bin/sh\necho 'NVIDIA H100, 570.1, 81559, 4'\necho 'NVIDIA H100, 570.1, 81559, 70000'\n"


@pytest.mark.slow
def test_a_whole_examination_leaves_the_machine_unchanged(tmp_path):
    """While GPUs are hidden, another training runs, and nobody joins the cluster."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "run").mkdir()
    words = ["--folder", str(tmp_path / "run")]
    code, found = diagnosed(
        "",
        *words,
        TF_CONFIG=config("127.0.0.1:1"),
        CUDA_VISIBLE_DEVICES="-1",
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
    )
    assert code == 0, found
    assert set(found) == {"folder", "cluster", "tensorflow", "gpus", "step"}
    what = "TensorFlow sees 0 of 2 GPUs; CUDA_VISIBLE_DEVICES='-1' hides the others"
    assert (found["gpus"]["verdict"], found["gpus"]["says"]) == ("look", what)
    assert found["cluster"]["verdict"] == "look"
    assert found["step"]["says"].startswith("two steps on 2 logical CPU devices and on one agree")
    assert not list((tmp_path / "run").iterdir())
