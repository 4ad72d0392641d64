"""`train.sbatch` under real SLURM daemons: a controller and two nodes, on two networks.

`make test-all` runs it, as root; where SLURM is not installed, it installs Debian's packages.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import training_to_kill
from helpers.all_replicas import ALL_REPLICAS
from helpers.processes_left import PATIENCE, python_path

import keras_multigpu as kmg

ROOT = Path(__file__).parents[2]
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
NODES = ["gpu07", "gpu08"]

# The nodes have no control groups. SLURM counts the GPUs, and any files may play them. Credentials
# live as briefly as SLURM allows, because a requeued job waits until they have expired.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=gpu07
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
ReturnToService=2
GresTypes=gpu
NodeName=gpu[07-08] CPUs=1 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES State=UP
"""

SCRIPT = """
from pathlib import Path
import training_to_kill
training_to_kill.main(Path.cwd(), epochs={epochs}, alike=False, steps=1)
"""
EPOCHS = 20


@pytest.fixture
def slurm(machines, tmp_path):
    """Runs a command on the first node."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if missing:
        install = ["apt-get", "install", "-qy", "--no-install-recommends", *PACKAGES]
        if not shutil.which("apt-get") or subprocess.run(install, timeout=5 * PATIENCE).returncode:
            pytest.skip(f"No {', '.join(missing)}, and `{' '.join(install)}` fails.")
    # In a short path: those of sockets have a limit.
    folder = Path("/tmp", f"kmg-slurm-{os.getpid()}")
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-3]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    variables = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": python_path(ROOT, ROOT / "tests", Path(__file__).parent),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }

    def run(node, command):
        script = f"hostname {NODES[node]}; exec {command}"
        return subprocess.run(
            ["ip", "netns", "exec", machines[node], "unshare", "--uts", "sh", "-c", script],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        ).stdout

    files = ["socket", "key-file:key", "pid-file:pid", "log-file:log", "seed-file:seed"]
    options = " ".join(
        f"--{option}={folder}/munge.{ending or option}"
        for option, _, ending in (each.partition(":") for each in files)
    )
    try:
        run(0, f"munged --force {options}")
        run(0, "slurmctld -i")
        for node in range(2):
            run(node, "slurmd")
        yield lambda command: run(0, command)
    finally:
        for file in folder.glob("*.pid"):
            os.kill(int(file.read_text()), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def waited_for(found, what, job):
    """The first result of a function that is not empty."""
    end = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < end, f"No {what}: {job()}"
        time.sleep(0.05)
    return value


@pytest.mark.skipif(not ALL_REPLICAS, reason="`make test-all` installs SLURM.")
@pytest.mark.slow
def test_a_requeued_job_ends_as_if_nothing_had_happened(slurm, tmp_path):
    """Bit for bit, after SIGTERM, as SLURM sends before the time limit, and SIGKILL of a worker."""
    (tmp_path / "train.py").write_text(SCRIPT.format(epochs=EPOCHS))
    script = ROOT / "examples" / "cluster" / "train.sbatch"
    job = slurm(f"sbatch --parsable --output=out.txt {script}").strip()
    output = tmp_path / "out.txt"

    def printed():
        return output.read_text() if output.exists() else ""

    def status():
        return slurm(f"scontrol show job {job}") + printed()

    pids = []
    for start, ending in enumerate((f"scancel --signal=TERM {job}", None), start=1):
        # Each worker prints its pid first; the steps of this start follow the last pid.
        waited_for(
            lambda start=start: (
                len(re.findall("^pid", printed(), re.M)) == 2 * start
                and printed().rpartition("pid ")[2].count("step") > 10
            ),
            f"steps after start {start}",
            status,
        )
        pids = re.findall(r"^pid (\d+)", printed(), re.M)
        if ending:
            slurm(ending)
        else:
            os.kill(int(pids[-1]), signal.SIGKILL)
    waited_for(lambda: "JobState=COMPLETED" in slurm(f"scontrol show job {job}"), "end", status)
    assert "Restarts=2" in slurm(f"scontrol show job {job}")
    assert "Ended by SIGTERM after step" in printed()

    kmg.strategy(devices=2)
    expected = training_to_kill.trained(tmp_path / "whole", epochs=EPOCHS, alike=False)
    for worker in range(2):
        with np.load(tmp_path / f"worker{worker}.npz") as found:
            for name, value in zip(found, expected.values(), strict=True):
                np.testing.assert_array_equal(found[name], value, name)
