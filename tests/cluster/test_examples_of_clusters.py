"""The manifests of `examples/cluster/` are valid for Kubernetes and SLURM, and train unchanged.

Two network namespaces play two machines: see `conftest.py`.
"""

import json
import os
import re
import runpy
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


def manifests_of(name):
    """The manifests of a file by their kinds."""
    with (EXAMPLES / name).open() as file:
        return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(file)}


@pytest.fixture(scope="module")
def manifests():
    return manifests_of("tfjob.yaml")


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
    name = manifests["TFJob"]["metadata"]["name"]
    assert_only_reach_each_other(manifests, {"training.kubeflow.org/job-name": name})


def assert_only_reach_each_other(manifests, label):
    policy = manifests["NetworkPolicy"]
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    assert policy["spec"]["podSelector"] == {"matchLabels": label}
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": label}}], "ports": [{"port": 2222}]}
    ]


def test_each_pod_of_the_indexed_job_is_one_worker(monkeypatch):
    manifests = manifests_of("indexed_job.yaml")
    service, job = manifests["Service"], manifests["Job"]
    pods = job["spec"]["template"]["spec"]
    assert (job["spec"]["completionMode"], service["spec"]["clusterIP"]) == ("Indexed", "None")
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    count = job["spec"]["completions"]
    assert count == job["spec"]["parallelism"]
    hosts = [f"train-{index}.workers:2222" for index in range(count)]
    assert_each_is_one_worker(pods, hosts, monkeypatch)


def test_each_node_of_the_trainjob_is_one_worker(monkeypatch):
    """Its fields were compared with the schemas of Kubeflow Trainer's CRDs of August 2026."""
    manifests = manifests_of("trainjob.yaml")
    runtime, job = manifests["TrainingRuntime"], manifests["TrainJob"]
    name = job["metadata"]["name"]
    kind, found = runtime["kind"], runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"] == {"kind": kind, "name": found}
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = nodes["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # JobSet names a pod by the set, the job in it, the copy of the job and the index.
    count = runtime["spec"]["mlPolicy"]["numNodes"]
    hosts = [f"{name}-{nodes['name']}-0-{index}.{name}:2222" for index in range(count)]
    assert_each_is_one_worker(nodes["template"]["spec"]["template"]["spec"], hosts, monkeypatch)
    assert_only_reach_each_other(manifests, {"jobset.sigs.k8s.io/jobset-name": name})


def assert_each_is_one_worker(pods, hosts, monkeypatch):
    """According to the TF_CONFIG that Kubernetes makes from a pod's index."""
    assert len(hosts) == 2 and pods["restartPolicy"] == "OnFailure"
    index, config = pods["containers"][0]["env"]
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index["valueFrom"] == {"fieldRef": {"fieldPath": annotation}}
    for number in range(len(hosts)):
        value = config["value"].replace(f"$({index['name']})", str(number))
        monkeypatch.setenv(config["name"], value)
        assert environment.tf_config().cluster == Cluster(tuple(hosts), number)


def test_the_batch_script_is_valid():
    """Its options come before the first command, and `srun` starts the tasks."""
    path = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], timeout=PATIENCE, check=True)
    options = path.read_text().partition("\nsrun")[0].splitlines()
    assert options[0] == "#!/bin/bash"
    assert not [line for line in options if line and not line.startswith("#")]


# The script for one device, in which {line} and {distribute} are empty, or for several workers.
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

# Like `srun`, it starts a task on each node with these variables, waits, and fails if one fails.
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


@pytest.mark.in_test_all("test_slurm.py reads SLURM's variables")
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


@pytest.mark.in_test_all("the batch script starts the same training")
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
