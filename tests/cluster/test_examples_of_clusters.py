"""The manifests of `examples/cluster/` are what Kubernetes and SLURM take, and train as they stand.

Two machines are two namespaces of the network, whose files of hosts have the names that SLURM and
Kubernetes give to machines. Only root can make them.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.processes_left import PATIENCE, python_path, start_process

from keras_multigpu.cluster import environment
from keras_multigpu.cluster.environment import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.fixture(scope="module")
def manifests():
    with (EXAMPLES / "tfjob.yaml").open() as file:
        return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(file)}


def test_the_manifest_is_a_tfjob(manifests):
    job = manifests["TFJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["metadata"]["name"]
    assert set(job["spec"]) == {"runPolicy", "tfReplicaSpecs"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
    assert job["spec"]["tfReplicaSpecs"].keys() <= {"Chief", "Worker", "Evaluator", "PS"}
    for replicas in job["spec"]["tfReplicaSpecs"].values():
        assert set(replicas) == {"replicas", "restartPolicy", "template"}
        assert replicas["restartPolicy"] in ("Always", "OnFailure", "ExitCode", "Never")
        (container,) = replicas["template"]["spec"]["containers"]
        # The operator looks for these names.
        assert container["name"] == "tensorflow"
        assert [port["name"] for port in container["ports"]] == ["tfjob-port"]
        volumes = {volume["name"] for volume in replicas["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_only_workers_reach_workers(manifests):
    policy = manifests["NetworkPolicy"]
    label = {"training.kubeflow.org/job-name": manifests["TFJob"]["metadata"]["name"]}
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    assert policy["spec"]["podSelector"] == {"matchLabels": label}
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": label}}], "ports": [{"port": 2222}]}
    ]


def test_each_pod_of_the_indexed_job_is_one_worker(tmp_path, monkeypatch):
    """By the TF_CONFIG that its command makes of the number that Kubernetes gives it."""
    with (EXAMPLES / "indexed_job.yaml").open() as file:
        service, job = yaml.safe_load_all(file)
    pods = job["spec"]["template"]["spec"]
    assert (job["spec"]["completionMode"], service["spec"]["clusterIP"]) == ("Indexed", "None")
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pods["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf %s "$TF_CONFIG"\n')
    python.chmod(0o755)
    count = job["spec"]["completions"]
    assert count == job["spec"]["parallelism"] > 1
    hosts = tuple(f"train-{index}.workers:2222" for index in range(count))
    for index in range(count):
        said = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        monkeypatch.setenv("TF_CONFIG", said.stdout)
        assert environment.tf_config().cluster == Cluster(hosts, index)


def test_the_batch_script_is_one():
    """Its options stand before the first command; `srun` starts the tasks."""
    path = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], timeout=PATIENCE, check=True)
    text = path.read_text()
    options, _, commands = text.rpartition("#SBATCH")
    assert options.startswith("#!/bin/bash\n")
    assert not [line for line in options.splitlines() if line and not line.startswith("#")]
    assert {"nodes", "ntasks-per-node", "signal"} <= set(re.findall(r"--([\w-]+)=", options))
    assert re.search(r"^srun .*python train.py", commands, re.MULTILINE)


# As on one device, but for a line that every script of several workers has.
TRAINING = """
import argparse

import keras
import numpy as np
{line}
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = min(parser.parse_args().epochs, 5)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
{distribute}
model.compile(keras.optimizers.SGD(0.01), "mse")
model.fit(x, x[:, :1], batch_size=4, epochs=epochs, shuffle=False, verbose=0)
weights = np.concatenate([each.ravel() for each in model.get_weights()]).tolist()
print(f"weights {{weights}}\\n", end="", flush=True)
"""

# `srun` starts a task on each node, with these variables, and waits; the first failure is its own.
SRUN = """#!{python}
import itertools, os, subprocess, sys
command = [*itertools.dropwhile(lambda word: word.startswith("--"), sys.argv[1:])]
step = dict(
    SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="gpu[07-08]", SLURM_NTASKS="2",
    SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_DISTRIBUTION="block",
    SLURM_LOCALID="0",
)
tasks = [
    subprocess.Popen(
        ["ip", "netns", "exec", machine, *command],
        env=os.environ | step | dict(SLURM_PROCID=str(index), SLURM_NODEID=str(index)),
    )
    for index, machine in enumerate({machines!r})
]
sys.exit(max([task.wait() for task in tasks]))
"""


@pytest.fixture(scope="module")
def machines():
    """Two namespaces that find each other by name."""
    names = [f"kmg{os.getpid()}{letter}" for letter in "ab"]
    folders = [Path("/etc/netns", name) for name in names]
    steps = [f"ip netns add {name}" for name in names]
    steps.append(f"ip link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
    for number, name in enumerate(names, start=1):
        steps.append(f"ip -n {name} addr add 10.213.8.{number}/24 dev cable")
        steps += [f"ip -n {name} link set {device} up" for device in ("cable", "lo")]
    done = subprocess.run(
        ["sh", "-c", " && ".join(steps)], capture_output=True, timeout=PATIENCE, check=False
    )
    if done.returncode == 0:
        hosts = "".join(
            f"10.213.8.{index + 1} gpu0{7 + index} keras-multigpu-worker-{index}.default.svc\n"
            for index in range(2)
        )
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        yield names
    for name, folder in zip(names, folders, strict=True):
        subprocess.run(
            ["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE, check=False
        )
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        pytest.skip("Only root can make a network.")


@pytest.fixture
def variables(tmp_path):
    text = TRAINING.format(
        line="import keras_multigpu as kmg", distribute="model = kmg.distribute(model)"
    )
    (tmp_path / "train.py").write_text(text)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": python_path(Path(__file__).parents[2]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def assert_as_on_one_device(printed, epochs, tmp_path, monkeypatch, capsys):
    (tmp_path / "alone.py").write_text(TRAINING.format(line="", distribute=""))
    monkeypatch.setattr(sys, "argv", ["alone.py", "--epochs", str(epochs)])
    runpy.run_path(str(tmp_path / "alone.py"))
    (expected,) = weights_in(capsys.readouterr().out)
    one, other = weights_in(printed)
    assert one == other
    np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-5)


def weights_in(printed):
    return [json.loads(line) for line in re.findall(r"^weights (.*)$", printed, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ip"), reason="Networks are made with `ip`.")
def test_the_batch_script_trains_on_two_nodes(machines, variables, tmp_path, monkeypatch, capsys):
    program = tmp_path / "srun"
    program.write_text(SRUN.format(python=sys.executable, machines=machines))
    program.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(EXAMPLES / "train.sbatch")],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert_as_on_one_device(ended.stdout, 100, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ip"), reason="Networks are made with `ip`.")
def test_the_job_trains_in_two_pods(manifests, machines, variables, tmp_path, monkeypatch, capsys):
    job = manifests["TFJob"]
    workers = job["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    port, name = workers["ports"][0]["containerPort"], job["metadata"]["name"]
    cluster = {"worker": [f"{name}-worker-{index}.default.svc:{port}" for index in range(2)]}
    command = [word.replace("/app", str(tmp_path)) for word in workers["command"]]
    pods = [
        start_process(
            ["ip", "netns", "exec", machine, *command],
            env=variables
            | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for machine, task in zip(
            machines, [{"type": "worker", "index": index} for index in range(2)], strict=True
        )
    ]
    printed = [pod.communicate(timeout=PATIENCE)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0]
    assert_as_on_one_device("".join(printed), 3, tmp_path, monkeypatch, capsys)
