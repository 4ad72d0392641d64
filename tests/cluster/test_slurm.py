"""SLURM's variables define the workers: hosts in SLURM's order, ports that depend on the job."""

import pytest

from keras_multigpu.cluster import slurm
from keras_multigpu.cluster.environment import Cluster

# The variables that `srun` sets, according to its manual, on two nodes with two tasks each.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_DISTRIBUTION": "block",
}
FIRST = 15_000 + 4711 * 7 * 16 % 16_000


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Puts a program of this name on the path, or none."""

    def make(script=None):
        monkeypatch.setenv("PATH", str(tmp_path))
        if script:
            (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "scontrol").chmod(0o755)

    return make


def task(index, **changed):
    variables = STEP | {"SLURM_PROCID": str(index)} | changed
    return {name: value for name, value in variables.items() if value is not None}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node", ["node"]),
        ("n[2,10]", ["n2", "n10"]),  # Not as text, which would put 10 first.
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("gpu[07-09,11],login", ["gpu07", "gpu08", "gpu09", "gpu11", "login"]),
        ("rack[1-2]node[3,5]", ["rack1node3", "rack1node5", "rack2node3", "rack2node5"]),
        ("n[1-2].site.org,c-3", ["n1.site.org", "n2.site.org", "c-3"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_list_of_nodes_is_read(scontrol, nodes, expected):
    scontrol()
    assert slurm.host_names(nodes) == expected


def test_scontrol_is_asked_if_it_is_installed(scontrol):
    scontrol('[ "$*" = "show hostnames n[1-2]" ] && echo n2 && echo n1')
    assert slurm.host_names("n[1-2]") == ["n2", "n1"]
    # As on a machine that cannot reach SLURM's controller.
    scontrol("echo error >&2; exit 1")
    assert slurm.host_names("n[1-2]") == ["n1", "n2"]


@pytest.mark.parametrize(
    "nodes", ["", "n[1-2", "n1]", "n[]", "n[a]", "n[2-1]", "n[1-2-3]", "a,,b", "a b", "a,"]
)
def test_a_bad_list_of_nodes_is_named(scontrol, nodes):
    scontrol()
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST cannot be used: it is not a list"):
        slurm.host_names(nodes)


def test_tasks_of_a_node_have_consecutive_ports():
    workers = (f"gpu07:{FIRST}", f"gpu07:{FIRST + 1}", f"gpu08:{FIRST}", f"gpu08:{FIRST + 1}")
    for index in range(4):
        assert slurm.cluster(task(index)) == Cluster(workers, index)


@pytest.mark.parametrize(
    ("distribution", "counts", "expected"),
    [
        ("block", "2(x3),1", [0, 0, 1, 1, 2, 2, 3]),
        ("cyclic", "2(x3),1", [0, 1, 2, 3, 0, 1, 2]),
        ("cyclic:block", "2,2", [0, 1, 0, 1]),
        ("block:cyclic,NoPack", "2,2", [0, 0, 1, 1]),
        ("plane", "4,3", [0, 0, 1, 1, 0, 0, 1]),
        (None, "1,2", [0, 1, 1]),
    ],
)
def test_each_task_finds_its_node(distribution, counts, expected):
    """In the layouts that the manual of `srun` describes."""
    nodes = [f"n{node}" for node in range(1 + max(expected))]
    variables = task(
        0,
        SLURM_STEP_NODELIST=",".join(nodes),
        SLURM_STEP_TASKS_PER_NODE=counts,
        SLURM_DISTRIBUTION=distribution,
        SLURM_DIST_PLANESIZE="2",
    )
    workers = slurm.cluster(variables).workers
    assert [worker.split(":")[0] for worker in workers] == [nodes[node] for node in expected]
    assert len(set(workers)) == len(workers)


def test_a_step_without_counts_takes_those_of_the_job():
    variables = task(3, SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE="2(x2)")
    assert slurm.cluster(variables).index == 3


@pytest.mark.parametrize(("job", "step"), [("4712", "0"), ("4711", "1"), ("4710", "0")])
def test_neighbouring_jobs_and_steps_use_other_ports(job, step):
    ours = {port_of(worker) for worker in slurm.cluster(task(0)).workers}
    theirs = slurm.cluster(task(0, SLURM_JOB_ID=job, SLURM_STEP_ID=step)).workers
    assert ours.isdisjoint(map(port_of, theirs))
    assert all(15_000 <= port < 32_000 for port in map(port_of, theirs))


def port_of(worker):
    return int(worker.split(":")[1])


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_a_batch_script_without_srun_is_one_process(missing):
    """Even if SLURM reserved several tasks for it."""
    assert slurm.cluster(task(0, **{missing: None})) is None


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "TASKS_PER_NODE .* 3 nodes, .* lists 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE .*`2\\(x3\\),1`"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID .* there are 4 tasks"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID .* not a whole number"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID .* not a whole number"),
        ({"SLURM_NODEID": "1"}, "SLURM_NODEID .* task 0 was expected on node 0"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION .* order of the tasks"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE .* not a whole number"),
    ],
)
def test_contradictory_variables_are_named(changed, what):
    with pytest.raises(ValueError, match=f"{what}.* Expected the variables that `srun` sets"):
        slurm.cluster(task(0, **changed))


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [("block", ["0,1", "2,3", "0,1", "2,3"]), ("cyclic", ["0,1", "0,1", "2,3", "2,3"])],
)
def test_tasks_of_a_node_share_its_gpus(monkeypatch, distribution, expected):
    """SLURM shows every task all of them, but no two tasks use the same one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for index, own in enumerate(expected):
        variables = task(index, SLURM_DISTRIBUTION=distribution)
        cluster = slurm.cluster(variables)
        assert slurm.own_gpus(cluster, variables) == {"CUDA_VISIBLE_DEVICES": own}


@pytest.mark.parametrize("name", ["SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND"])
def test_gpus_that_slurm_has_assigned_are_left_alone(monkeypatch, name):
    """In each task, CUDA numbers them from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    variables = task(1, **{name: "1"})
    assert slurm.own_gpus(slurm.cluster(variables), variables) == {}


def test_tasks_without_gpus_have_none_to_share():
    assert slurm.own_gpus(slurm.cluster(task(0)), task(0)) == {}


def test_too_few_gpus_for_the_tasks_of_a_node_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="too few GPUs for the workers"):
        slurm.own_gpus(slurm.cluster(task(0)), task(0))
