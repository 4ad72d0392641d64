"""The manifests of `examples/cluster/` are valid for Kubernetes and SLURM."""

import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.processes_left import PATIENCE

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
    """Its operator looks for these names."""
    job = manifests["TFJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    for replicas in job["spec"]["tfReplicaSpecs"].values():
        (container,) = replicas["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert [port["name"] for port in container["ports"]] == ["tfjob-port"]


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
