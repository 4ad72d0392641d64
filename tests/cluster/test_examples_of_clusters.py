"""The manifests of `examples/cluster/` are what Kubernetes and SLURM take."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from keras_multigpu.cluster import environment
from keras_multigpu.cluster.environment import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.fixture(scope="module")
def manifests():
    """Those of the file, by their kind."""
    with (EXAMPLES / "tfjob.yaml").open() as file:
        return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(file)}


def test_the_manifest_is_a_tfjob(manifests):
    """With all that Kubeflow's operator asks for."""
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
    """By the label that the operator gives to the pods of the job, and at its port."""
    policy = manifests["NetworkPolicy"]
    label = {"training.kubeflow.org/job-name": manifests["TFJob"]["metadata"]["name"]}
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    assert policy["spec"]["podSelector"] == {"matchLabels": label}
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": label}}], "ports": [{"port": 2222}]}
    ]


def test_each_container_of_the_job_is_one_worker(manifests, monkeypatch):
    """With the TF_CONFIG that the operator makes of the manifest."""
    job = manifests["TFJob"]
    name, workers = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]["Worker"]
    (container,) = workers["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    count = workers["replicas"]
    hosts = tuple(f"{name}-worker-{index}.default.svc:{port}" for index in range(count))
    assert count > 1
    for index in range(count):
        config = {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": index},
            "environment": "cloud",
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert environment.tf_config().cluster == Cluster(hosts, index)


def test_the_batch_script_is_one():
    """Its options stand before the first command; `srun` starts the tasks."""
    path = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options, _, commands = text.rpartition("#SBATCH")
    assert options.startswith("#!/bin/bash\n")
    assert not [line for line in options.splitlines() if line and not line.startswith("#")]
    assert {"nodes", "ntasks-per-node", "signal"} <= set(re.findall(r"--([\w-]+)=", options))
    assert re.search(r"^srun .*python train.py", commands, re.MULTILINE)
