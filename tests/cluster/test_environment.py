"""TF_CONFIG defines the workers, and other variables their timeouts; nonsense is refused."""

import json
import subprocess
import sys

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it

from keras_multigpu.cluster import environment
from keras_multigpu.cluster.environment import Cluster


@pytest.fixture
def config(monkeypatch):
    def set(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)
        return environment.tf_config()

    return set


def task(role, index, **cluster):
    return {"cluster": cluster, "task": {"type": role, "index": index}}


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_a_chief_comes_before_the_workers(config, chief):
    cluster = {chief: ["a:1"], "worker": ["b:2", "c:3"]}
    workers = ("a:1", "b:2", "c:3")
    assert config(task(chief, 0, **cluster)).cluster == Cluster(workers, 0)
    assert config(task("worker", 1, **cluster)).cluster == Cluster(workers, 2)


@pytest.mark.parametrize(("role", "index"), [("evaluator", 0), ("ps", 0)])
def test_evaluators_and_servers_are_no_workers(config, role, index):
    """An evaluator works alone: a TFJob does not even list it."""
    found = config(task(role, index, worker=["b:2"], ps=["d:4"]))
    assert found.cluster is None
    assert (found.role, found.addresses["ps"]) == (role, ("d:4",))


def test_tf_config_of_kubeflow_is_read(config):
    hosts = ["job-worker-0.team.svc:2222", "job-worker-1.team.svc:2222"]
    found = config(task("worker", 1, worker=hosts) | {"environment": "cloud"})
    assert found.cluster == Cluster(tuple(hosts), 1)


def test_an_index_may_be_a_string(config):
    assert config(task("worker", "1", worker=["b:2", "c:3"])).cluster.index == 1


def test_an_address_may_be_ipv6(config):
    assert config(task("worker", 0, worker=["[::1]:2"])).cluster.workers == ("[::1]:2",)


@pytest.mark.parametrize("value", ["", {}, {"environment": "cloud"}, {"cluster": {}}])
def test_a_tf_config_without_a_cluster_means_one_process(config, value):
    assert config(value) is None


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("{", "is not JSON"),
        ([], "no object as its `cluster`"),
        ('"worker"', "no object as its `cluster`"),
        (task("worker", 0, worker="a:1"), "no list of addresses for 'worker'"),
        (task("worker", 0, worker={"0": "a:1"}), "enableDynamicWorker"),
        ('{"cluster": ' * 20_000 + "{}" + "}" * 20_000, "is not JSON that can be read"),
        ('{"cluster": {"worker": ["a:1"]}, "x": ' + "9" * 5_000 + "}", "is not JSON that can be"),
        (task("worker", "9" * 5_000, worker=["a:1"]), "which `task` this process is"),
        (task("worker", 0, worker=["a:b c:1"]), "'a:b c:1', which is not `host:port`"),
        (task("worker", 0, worker=["a:1\n"]), "which is not `host:port`"),
        (task("worker", 0, worker=["a:" + "9" * 5_000]), "which is not `host:port`"),
        (task("worker", 0, worker=["a:99999"]), "'a:99999', which is not `host:port` .1 to 65535"),
        (task("worker", 0, worker=["a:0"]), "'a:0', which is not `host:port` .1 to 65535"),
        (task("worker", 0, worker=["http://a:1"]), "'http://a:1', which is not `host:port`"),
        (task("worker", 0, worker=[1]), "1, which is not `host:port`"),
        (task("worker", 0, worker=["a:1", "a:1"]), "an address twice"),
        (task("chief", 0, chief=["a:1", "b:2"]), "more than one chief"),
        ({"cluster": {"worker": ["a:1"]}}, "which `task` this process is"),
        ({"cluster": {"worker": ["a:1"]}, "task": "worker"}, "which `task` this process is"),
        (task("worker", None, worker=["a:1"]), "which `task` this process is"),
        (task("worker", True, worker=["a:1"]), "which `task` this process is"),
        (task("worker", 1, worker=["a:1"]), "no 'worker' number 1"),
    ],
)
def test_a_bad_tf_config_is_refused_with_a_reason(config, value, what):
    expected = f"TF_CONFIG .*{what}.* Expected JSON.* Received: TF_C"
    with pytest.raises(ValueError, match=expected) as error:
        config(value)
    assert len(str(error.value)) < 3_000


def test_variables_override_the_default_timeouts(monkeypatch):
    assert environment.settings() == environment.Settings(10, 600, 1)
    monkeypatch.setenv("KERAS_MULTIGPU_EXCHANGE_TIMEOUT", "30")
    assert environment.settings() == environment.Settings(10, 30, 1)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "soon", "9" * 5000])
def test_a_timeout_that_is_no_positive_integer_is_refused(monkeypatch, text):
    monkeypatch.setenv("KERAS_MULTIGPU_HEARTBEAT_TIMEOUT", text)
    with pytest.raises(ValueError, match="KERAS_MULTIGPU_HEARTBEAT_TIMEOUT is not a positive"):
        environment.settings()


@pytest.mark.parametrize(
    ("words", "joins"),
    [
        (["-m", "mine.train"], True),
        (["-mkeras_multigpu", "--version"], False),
    ],
)
@pytest.mark.slow
def test_whatever_is_not_a_command_joins_its_cluster(tmp_path, words, joins):
    """Even where a package imports this one before Python has found the module to run."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("import keras_multigpu\n")
    (folder / "train.py").write_text("import keras_multigpu\nprint('not joined')\n")
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=as_users_start_it() | {"TF_CONFIG": "no JSON"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ("TF_CONFIG" in ended.stderr) == joins, ended.stderr
    assert bool(ended.returncode) == joins
