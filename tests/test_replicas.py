"""The strategy and devices that each request gives, and the requests that are refused."""

import json
import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu import replicas
from keras_multigpu.cluster import joining
from keras_multigpu.keras_internals import cluster_internals

PARAMETER_SERVER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]},
    "task": {"type": "chief", "index": 0},
}
TWO_WORKERS = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
CHIEF_AND_WORKER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1"]},
    "task": {"type": "worker", "index": 0},
}
ONE_WORKER = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """No strategy built yet, and no cluster in the environment."""
    monkeypatch.setattr(replicas, "_strategies", {})
    # This process must not join a cluster.
    monkeypatch.setattr(cluster_internals, "watch_heartbeats", lambda *_: None)
    monkeypatch.setattr(cluster_internals, "has_started", lambda: False)
    monkeypatch.setattr(joining, "_let_sums_overlap", lambda: None)
    monkeypatch.setattr(joining.meeting, "meet", lambda *_, **__: {})
    monkeypatch.setattr(joining.meeting, "wait_for_servers", lambda _: None)
    for name in ("TF_CONFIG", "TPU_NAME", "TF_FORCE_GPU_ALLOW_GROWTH", *SLURM):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are as many GPUs as asked for, and records their settings."""
    machine = SimpleNamespace(growing=[], split={}, started=False)

    def set_memory_growth(gpu, enable):
        if machine.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        assert enable
        machine.growing.append(gpu.name)

    def pretend(count):
        names = [f"/physical_device:GPU:{index}" for index in range(count)]
        devices = {"GPU": [SimpleNamespace(name=name) for name in names]}
        devices["CPU"] = [SimpleNamespace(name="/physical_device:CPU:0")]
        monkeypatch.setattr(tf.config, "get_visible_devices", devices.__getitem__)
        monkeypatch.setattr(
            tf.config,
            "get_logical_device_configuration",
            lambda device: machine.split.get(device.name),
        )
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", set_memory_growth)
        for name in ("OneDeviceStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"):
            monkeypatch.setattr(tf.distribute, name, fake_strategy(name))
        return machine

    return pretend


def fake_strategy(name):
    return lambda *args, **kwargs: SimpleNamespace(
        name=name, args=args, kwargs=kwargs, extended=SimpleNamespace()
    )


def devices_of(strategy):
    return [device.rpartition("device:")[2] for device in strategy.extended.worker_devices]


@pytest.mark.parametrize(
    ("kind", "devices", "expected_class", "expected_devices"),
    [
        ("auto", None, "OneDeviceStrategy", ["CPU:0"]),
        ("auto", 1, "OneDeviceStrategy", ["CPU:0"]),
        ("auto", 2, "MirroredStrategy", ["CPU:0", "CPU:1"]),
        ("auto", ["CPU:5"], "OneDeviceStrategy", ["CPU:5"]),
        ("auto", ["CPU:3", "CPU:1"], "MirroredStrategy", ["CPU:3", "CPU:1"]),
        ("one_device", None, "OneDeviceStrategy", ["CPU:0"]),
        ("one_device", ["cpu:2"], "OneDeviceStrategy", ["CPU:2"]),
        ("mirrored", None, "MirroredStrategy", ["CPU:0"]),
        ("mirrored", 3, "MirroredStrategy", ["CPU:0", "CPU:1", "CPU:2"]),
        ("mirrored", 8, "MirroredStrategy", [f"CPU:{index}" for index in range(8)]),
        ("mirrored", ("/cpu:0", "/device:CPU:1"), "MirroredStrategy", ["CPU:0", "CPU:1"]),
        ("central_storage", 2, "CentralStorageStrategy", ["CPU:0", "CPU:1"]),
    ],
)
def test_each_kind_gives_its_strategy(kind, devices, expected_class, expected_devices):
    """One of TensorFlow's classes, on the given devices in their order."""
    strategy = replicas.strategy(kind, devices=devices)
    assert type(strategy).__name__.startswith(expected_class)
    assert devices_of(strategy) == expected_devices


def test_the_same_request_gives_the_same_object():
    two = replicas.strategy("mirrored", devices=2)
    assert replicas.strategy("mirrored", devices=["CPU:0", "CPU:1"]) is two
    assert replicas.strategy(devices=("/cpu:0", "/cpu:1")) is two
    assert replicas.strategy(devices=3) is not two
    assert replicas.strategy("central_storage", devices=2) is not two


def test_two_strategies_of_one_process_sum_in_turn():
    for count, expected in [(2, 1), (3, 3), (2, 1)]:
        strategy = replicas.strategy(devices=count)

        @tf.function
        def summed(strategy=strategy):
            def add():
                context = tf.distribute.get_replica_context()
                return context.all_reduce("sum", context.replica_id_in_sync_group)

            return strategy.experimental_local_results(strategy.run(add))

        assert [int(value) for value in summed()] == [expected] * count


def test_one_log_line_says_what_was_chosen_and_why(caplog):
    with caplog.at_level("INFO", logger="keras_multigpu"):
        for _ in range(2):
            replicas.strategy()
            replicas.strategy(devices=2)
            replicas.strategy("central_storage", devices=["CPU:1"])
    assert caplog.messages == [
        "Strategy: one_device on CPU:0 (no GPU found).",
        "Strategy: mirrored on CPU:0, CPU:1 (`devices` names 2).",
        "Strategy: central_storage on CPU:1 (asked for).",
    ]


@pytest.mark.parametrize(
    ("kind", "devices", "message"),
    [
        ("auto", [], "`devices` is neither a number nor a list with names in it"),
        ("auto", "CPU:0", "`devices` is neither a number nor a list with names in it"),
        ("auto", 0, "`devices` is not a positive integer"),
        ("auto", True, "`devices` is not a positive integer"),
        ("auto", ["CPU:0", "NPU:1"], "There is no device named 'NPU:1'"),
        ("auto", ["CPU"], "There is no device named 'CPU'"),
        ("auto", ["CPU:0", "/cpu:0"], "`devices` names a device twice"),
        ("auto", ["CPU:0", "GPU:0"], "`devices` mixes GPUs and CPUs"),
        ("auto", ["GPU:0"], "`devices` asks for more GPUs than there are"),
        ("one_device", 2, "2 devices were given for one"),
        ("tpu", 2, "`devices` was given for 'tpu'"),
        ("multi_worker", ["CPU:0"], "`devices` was given for 'multi_worker'"),
        ("mirored", None, "`kind` has an unknown value"),
        ("multi_worker", None, "'multi_worker' needs a cluster, and none was found"),
        ("parameter_server", None, "'parameter_server' needs a cluster, and none was found"),
        ("tpu", None, "'tpu' needs a TPU, and none was found: .*"),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(kind, devices, message):
    with pytest.raises(ValueError, match=f"^{message}.* Expected .*Received: "):
        replicas.strategy(kind, devices=devices)


@pytest.mark.parametrize("name", ["my-tpu", "", "grpc://127.0.0.1:1"])
def test_a_missing_tpu_is_named_without_waiting(name, monkeypatch):
    """For a name TensorFlow raises a `URLError`; for an address it would wait forever."""
    monkeypatch.setenv("TPU_NAME", name)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(ValueError, match=f"none was found: .*refused.*TPU_NAME='{name}'"):
        replicas.strategy("tpu")


def test_only_the_open_scopes_strategy_can_be_asked_for():
    two = replicas.strategy(devices=2)
    with two.scope():
        assert replicas.strategy(devices=2) is two
        assert replicas.default_strategy() is two
        with pytest.raises(RuntimeError, match="inside another strategy's scope.*devices=3"):
            replicas.strategy(devices=3)


def test_the_last_request_becomes_the_default():
    assert devices_of(replicas.default_strategy()) == ["CPU:0"]
    replicas.strategy(devices=3)
    two = replicas.strategy(devices=2)
    replicas.get_strategy("one_device")
    assert replicas.default_strategy() is two
    assert devices_of(replicas.default_strategy(3)) == ["CPU:0", "CPU:1", "CPU:2"]
    assert replicas.default_strategy() is two


@pytest.mark.parametrize(
    ("environment", "expected_kind"),
    [
        ({}, "one_device"),
        ({"TF_CONFIG": ""}, "one_device"),
        ({"TF_CONFIG": json.dumps(ONE_WORKER)}, "one_device"),
        ({"TF_CONFIG": json.dumps(TWO_WORKERS)}, "multi_worker"),
        ({"TF_CONFIG": json.dumps(CHIEF_AND_WORKER)}, "multi_worker"),
        ({"TF_CONFIG": json.dumps(PARAMETER_SERVER)}, "parameter_server"),
        (SLURM, "multi_worker"),
        (
            SLURM
            | {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            "one_device",
        ),
        (SLURM | {"TF_CONFIG": json.dumps(ONE_WORKER)}, "one_device"),
        # A batch script without `srun` is one process, even if SLURM reserved two tasks.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "one_device"),
    ],
)
def test_auto_reads_the_cluster_first(monkeypatch, environment, expected_kind):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    built = []
    monkeypatch.setattr(joining, "cluster_resolver", lambda kind: None)
    monkeypatch.setattr(replicas, "_build", lambda kind, *_: built.append(kind))
    replicas.strategy()
    assert built == [expected_kind]


def test_tf_config_reaches_the_strategies_of_a_cluster(monkeypatch):
    """TensorFlow's classes for workers and parameter servers get the cluster from TF_CONFIG."""
    for name in ("MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        monkeypatch.setattr(tf.distribute, name, fake_strategy(name))
    for config, kind in ((TWO_WORKERS, "multi_worker"), (PARAMETER_SERVER, "parameter_server")):
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(cluster_internals, "has_started", lambda: True)
        with pytest.raises(RuntimeError, match="TensorFlow started .*`import keras_multigpu`"):
            replicas.strategy(kind)
    monkeypatch.setattr(cluster_internals, "has_started", lambda: False)
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO_WORKERS))
    workers = replicas.strategy("multi_worker").kwargs["cluster_resolver"]
    assert workers.cluster_spec().as_dict() == TWO_WORKERS["cluster"]
    monkeypatch.setenv("TF_CONFIG", json.dumps(PARAMETER_SERVER))
    servers = replicas.strategy("parameter_server").args[0]
    assert servers.cluster_spec().as_dict() == PARAMETER_SERVER["cluster"]


def test_slurm_reaches_the_strategy_and_chooses_the_gpus(monkeypatch, gpus, caplog):
    """CUDA_VISIBLE_DEVICES is set before TensorFlow looks for GPUs."""
    machine = gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    looked = tf.config.get_visible_devices

    def look(kind):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        return looked(kind)

    monkeypatch.setattr(tf.config, "get_visible_devices", look)
    one_node = {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert kmg.cluster.is_chief()
    for name, value in (SLURM | one_node).items():
        monkeypatch.setenv(name, value)
    strategy = replicas.strategy()
    assert strategy.name == "MultiWorkerMirroredStrategy"
    resolver = strategy.kwargs["cluster_resolver"]
    port = 15_000 + 7 * 7 * 16
    workers = [f"node1:{port}", f"node1:{port + 1}"]
    assert resolver.cluster_spec().as_dict() == {"worker": workers}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert len(machine.growing) == 2
    assert not kmg.cluster.is_chief()
    assert "trains alone" not in caplog.text
    replicas.strategy(devices=["GPU:0"])
    assert "several workers, which then trains alone" in caplog.text


@pytest.mark.parametrize(
    ("present", "devices", "expected_class", "expected_devices"),
    [
        (1, None, "OneDeviceStrategy", "GPU:0"),
        (2, None, "MirroredStrategy", ("GPU:0", "GPU:1")),
        (4, 2, "MirroredStrategy", ("GPU:0", "GPU:1")),
        (4, ["GPU:3"], "OneDeviceStrategy", "GPU:3"),
        (4, ["gpu:3", "GPU:1"], "MirroredStrategy", ("GPU:3", "GPU:1")),
    ],
)
def test_gpus_are_preferred_to_cpus(gpus, present, devices, expected_class, expected_devices):
    machine = gpus(present)
    strategy = replicas.strategy(devices=devices)
    assert (strategy.name, strategy.args[0]) == (expected_class, expected_devices)
    assert machine.growing == [f"/physical_device:GPU:{index}" for index in range(present)]


def test_more_gpus_than_present_are_refused(gpus):
    gpus(2)
    for devices in (3, ["GPU:0", "GPU:2"]):
        with pytest.raises(ValueError, match="more GPUs than there are. Expected at most the 2"):
            replicas.strategy(devices=devices)


def test_a_gpu_split_by_the_user_keeps_its_parts(gpus):
    machine = gpus(1)
    machine.split["/physical_device:GPU:0"] = ["one half", "the other half"]
    assert replicas.strategy().args[0] == ("GPU:0", "GPU:1")
    assert machine.growing == []


def test_a_strategy_of_cpus_leaves_gpus_alone(gpus):
    machine = gpus(2)
    assert replicas.strategy(devices=["CPU:0"]).args == ("CPU:0",)
    assert machine.growing == []


def test_memory_growth_that_is_set_too_late_is_a_warning(gpus, monkeypatch, caplog):
    """A notebook that has used TensorFlow still gets its GPUs."""
    machine = gpus(2)
    machine.started = True
    assert replicas.strategy().name == "MirroredStrategy"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in caplog.text
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    assert replicas.strategy(devices=["GPU:0"]).name == "OneDeviceStrategy"


@pytest.mark.usefixtures("sums_on_one_device")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("CPU:0", "CPU:1"), "ReductionToOneDevice"),
        (("GPU:0", "GPU:2"), "NoneType"),  # TensorFlow's own choice: NCCL.
        (("GPU:0", "GPU:1"), "ReductionToOneDevice"),  # Two halves of one GPU.
    ],
)
def test_the_devices_decide_how_mirrored_replicas_sum(gpus, names, expected):
    gpus(2).split["/physical_device:GPU:0"] = ["one half", "the other half"]
    assert type(replicas._cross_device_ops(names)).__name__ == expected
