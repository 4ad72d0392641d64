"""`ThroughputReport`: the parts of a step, the verdict and operations."""

import json
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.naps import Nap, with_naps
from helpers.own_step import UnseenStep

import keras_multigpu as kmg
from keras_multigpu.callbacks import ThroughputReport
from keras_multigpu.callbacks.throughput_report.flops import peak_of
from keras_multigpu.callbacks.throughput_report.report import (
    Throughput,
    throughput_of,
    verdict_on,
)
from keras_multigpu.callbacks.timing import Sums, Timing, no_sums

pytestmark = pytest.mark.usefixtures("python_sees_rows")


def network(replicas=None, *first_layers, **compiled):
    """A small model; of plain Keras, for a fake run, for None."""
    model = keras.Sequential([keras.Input((4,)), *first_layers, keras.layers.Dense(3)])
    model = model if replicas is None else on_replicas(model, replicas)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    return model


X = np.random.default_rng(0).normal(size=(34, 4)).astype("float32")
Y = np.random.default_rng(0).integers(0, 3, 34)


def slow_data(nap):
    """Batches of eight and a last one of two, each after a nap."""

    def wait(x, y):
        def nap_and_give(values):
            time.sleep(nap)
            return values

        x = tf.ensure_shape(tf.numpy_function(nap_and_give, [x], tf.float32), [None, 4])
        return x, y

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(wait)


def reported(model, *callbacks, x=None, **arguments):
    """The callback after two epochs, with its reports."""
    report = ThroughputReport(verbose=0, **arguments)
    data = {"x": X, "y": Y, "batch_size": 8} if x is None else {"x": x}
    model.fit(**data, epochs=2, verbose=0, callbacks=[report, *callbacks])
    return report


def faked(report, *callbacks):
    """Two epochs of a fake run, five steps each, on replicas that compute for 1 and 3 seconds."""
    given = {"x": X, "y": Y, "batch_size": 8, "replicas": 2}
    fake_fit(network(), report, *callbacks, moments=[(0, 1, 4), (0, 3, 4)], **given)


@pytest.mark.slow
def test_the_parts_add_up_to_the_wall_time():
    """In every epoch, and none is negative. The last batch has two examples."""
    model = network(2, steps_per_execution=2)
    began = time.perf_counter()
    reports = reported(model).reports
    whole = time.perf_counter() - began
    first, second = reports
    # Compiling, which is not a part of either, takes most of such a training.
    assert first.wall + second.wall < whole
    assert (first.steps, first.examples) == (3, 18)
    assert (second.steps, second.examples) == (5, 34)
    for report in reports:
        assert list(report.parts) == ["data_wait", "compute", "all_reduce", "host"]
        assert min(report.parts.values()) >= 0
        np.testing.assert_allclose(sum(report.parts.values()), report.wall, rtol=1e-9)
        np.testing.assert_allclose(sum(report.shares.values()), 1)
        assert report.parts["compute"] > 0
        assert report.wall > 0
        assert len(report.devices) == 2


def test_the_parts_by_hand():
    """Two replicas, two steps of ten examples in ten seconds."""
    replicas = np.array([[2, 12, 0, 0, 3.0, 2.0], [2, 8, 0, 0, 4.0, 1.0]])
    timing = Timing(10.0, 2.5, 6.0, 2, Sums(*replicas.T, 5.0, 1.0, 0.5))
    found = throughput_of(3, ["GPU:0", "GPU:1"], timing)
    assert found.parts == {"data_wait": 2.5, "compute": 5.0, "all_reduce": 1.0, "host": 1.5}
    assert (found.straggler, found.slowest, found.hidden) == (1.5, "GPU:1", 0.5)
    assert (found.examples_per_second, found.examples_per_second_per_device) == (2.0, 1.0)
    assert found.step_time == 5.0
    # Clocks that disagree: nothing is negative, and the sum is still the wall time.
    short = throughput_of(3, ["GPU:0", "GPU:1"], timing._replace(wall=8.0))
    assert short.parts == {"data_wait": 2.5, "compute": 5.0, "all_reduce": 0.5, "host": 0.0}


class Hoard(keras.callbacks.Callback):
    """Holds 200 MiB after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.held = np.ones(200 * 2**20 // 8)


def test_the_peak_of_memory():
    """On CPUs it is that of the process."""
    report = ThroughputReport(verbose=0)
    faked(report, Hoard())
    first, second = report.reports
    assert first.peak_memory == [first.peak_memory[0]] * 2
    assert 0 < first.peak_memory[0] < psutil.virtual_memory().total
    # Free memory is used again, so the peak may rise by less.
    held = psutil.Process().memory_info().rss
    assert second.peak_memory == [second.peak_memory[0]] * 2
    assert held <= second.peak_memory[0] * 1.05
    assert "of the process" in str(second)


def test_the_fullest_device_is_named():
    timing = Timing(1.0, 0.0, 1.0, 2, no_sums(2))
    for name, told in (
        ("GPU:{}", "on GPU:1"),
        ("GPU:0 of worker {}", "on GPU:0 of worker 1"),
        ("CPU:0 of worker {}", "of the process of worker 1"),
    ):
        devices = [name.format(number) for number in range(2)]
        found = str(throughput_of(3, devices, timing)._replace(peak_memory=[2**30, 3 * 2**30]))
        assert f"peak memory              3.0 GiB   {told}\n" in found


@with_naps
def test_a_step_that_cannot_be_inspected_is_timed_as_a_whole(nap):
    layers = Nap(nap / 3), keras.layers.Dense(1)
    model = on_replicas(UnseenStep(*layers), 2)
    model.compile("sgd", "mse", steps_per_execution=2)
    report = reported(model, x=slow_data(nap)).report
    assert list(report.parts) == ["data_wait", "step", "host"]
    np.testing.assert_allclose(sum(report.parts.values()), report.wall, rtol=1e-9)
    assert report.parts["step"] > 0.3 * nap * report.steps
    # The next batch is read while a step runs.
    assert report.parts["data_wait"] > 0.33 * nap * report.steps
    assert "The parts of this `train_step` cannot be seen" in report.verdict
    assert "step, as a whole" in str(report)


def test_it_prints_the_last_table_or_all(capsys):
    for verbose in (1, 2):
        faked(report := ThroughputReport(verbose=verbose))
        printed = capsys.readouterr().out
        assert printed.count("Throughput of epoch") == verbose
        assert str(report.report) in printed
    assert [line.split()[0] for line in str(report.report).splitlines()[1:7]] == [
        *("examples", "step", "wait", "compute", "all-reduce", "host")
    ]


def test_it_writes_json_after_each_epoch(tmp_path):
    """In two trainings with one object; the first step of each runs before anything is timed."""
    path = tmp_path / "report.json"
    report = ThroughputReport(path=path, verbose=0)
    for _ in range(2):
        faked(report)
        found = json.loads(path.read_text())["epochs"]
        assert [(one["epoch"], one["steps"]) for one in found] == [(0, 4), (1, 5)]
        assert found[1]["verdict"] == report.report.verdict
        assert found[1]["utilisation"] is report.report.utilisation is None
        assert sum(found[1]["shares"].values()) == pytest.approx(1)
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


class Loop(keras.layers.Layer):
    """A product in a loop that ends by itself."""

    def call(self, x):
        def body(x):
            return (tf.linalg.matmul(x, tf.eye(4)),)

        return tf.while_loop(lambda x: tf.reduce_sum(x) > 1.0, body, (x,))[0]


def counted(layers, replicas=2, **compiled):
    """The last report of a training in batches of 8 and 4, without a compiled step."""
    model = on_replicas(keras.Sequential([keras.Input((6, 4)), *layers]), replicas)
    model.compile("sgd", "mse", **compiled)
    report = ThroughputReport(verbose=0)
    targets = np.zeros((20, *model.output_shape[1:]))
    model.fit(np.zeros((20, 6, 4)), targets, batch_size=8, epochs=2, verbose=0, callbacks=[report])
    return report.report


@pytest.mark.parametrize(("replicas", "compiled"), [(1, {}), (2, {"micro_batches": 2})])
def test_the_operations_of_a_step_by_hand(replicas, compiled):
    """Two for each term of a sum; the first layer has no gradient of its inputs."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(5), keras.layers.Dense(3)]
    found = counted(layers, replicas, **compiled)
    each = 2 * (2 * 24 * 5 + 3 * 5 * 3)
    assert found.step_flops == round(each * 20 / 3)
    np.testing.assert_allclose(found.flops_per_second, each * found.examples_per_second, rtol=1e-3)
    assert "model FLOPs" in str(found) and found.utilisation is None


@pytest.mark.slow
def test_a_recurrent_layer_counts_each_of_its_steps():
    found = counted([keras.layers.GRU(3)])
    assert found.step_flops == round((2 * 6 * 4 * 9 * 2 + 3 * 6 * 3 * 9 * 2) * 20 / 3)


def test_a_loop_of_unknown_length_has_no_figure():
    found = counted([Loop(), keras.layers.Dense(3)])
    assert found.step_flops is found.flops_per_second is found.utilisation is None


@pytest.mark.parametrize(
    ("name", "dtype", "uses_tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 989e12),
        ("NVIDIA H100 PCIe", "float32", True, 378e12),
        ("NVIDIA A100-SXM4-40GB", "float32", False, 19.5e12),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7e12),
        ("Tesla T4", "float16", True, 65e12),
        ("Tesla T4", "bfloat16", True, None),
        ("NVIDIA L4", "float64", True, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float32", True, None),
        ("NVIDIA A10G", "float32", True, None),
        ("", "float32", True, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_name(name, dtype, uses_tf32, expected):
    assert peak_of(name, dtype, uses_tf32) == expected


# The verdict.


def shares(**parts):
    """A measurement with these parts of 100 seconds."""
    straggler = parts.pop("straggler", 0.0)
    parts = {"data_wait": 0.0, "compute": 0.0, "all_reduce": 0.0, "host": 0.0, **parts}
    return Throughput(0, ["CPU:0"] * 2, 10, 100.0, 100.0, parts, straggler)


@pytest.mark.parametrize(
    ("found", "data", "expected"),
    [
        (
            shares(data_wait=61, compute=39),
            kmg.data.from_arrays(X, Y, augment=lambda x, y: (x, y)),
            'input-bound: 61% waiting; try cache="memory" or a folder, a larger replica batch, '
            "moving the augmentation into the first layers of the model",
        ),
        (
            shares(data_wait=61, compute=39),
            kmg.data.from_arrays(X, Y, cache="memory"),
            "input-bound: 61% waiting; try a larger replica batch",
        ),
        (
            shares(data_wait=61, compute=39),
            X,
            "input-bound: 61% waiting; try one of `kmg.data.from_*`, with cache=, `.cache()` and "
            "`.prefetch(tf.data.AUTOTUNE)` on a `tf.data.Dataset`, a larger replica batch",
        ),
        (
            shares(all_reduce=30, compute=45, host=25),
            X,
            "communication-bound: 30% in the all-reduce; try a larger replica batch (with "
            "micro_batches= if memory is short), faster links between the devices, or fewer "
            "devices",
        ),
        (
            shares(host=55, compute=45),
            X,
            "host-bound: 55% outside of the devices; try compile(steps_per_execution=8), "
            "a larger replica batch, callbacks that do less work after each step",
        ),
        (
            shares(compute=90, host=10),
            X,
            "compute-bound: 90% computing; try mixed precision: "
            'keras.config.set_dtype_policy("mixed_bfloat16"), more devices',
        ),
        (
            shares(compute=90, host=10, straggler=40),
            X,
            "held up by the slowest replica: 40% waiting for it; try `ReplicaMetrics`, which shows "
            "whether it always is, checking what else runs on its device",
        ),
    ],
)
def test_the_verdict_names_the_largest_part_and_what_helps(found, data, expected):
    """Besides computation, if the part is a fifth or more."""
    model = network(2, jit_compile=False)
    assert verdict_on(found, model, data) == expected


@pytest.mark.parametrize(
    ("replicas", "compiled", "suggested"),
    [
        (1, {"jit_compile": False}, True),
        (1, {"jit_compile": True}, False),
        (1, {"run_eagerly": True, "jit_compile": False}, False),
        (1, {"micro_batches": 2, "jit_compile": False}, False),
        (2, {"jit_compile": False}, False),
    ],
)
@pytest.mark.parametrize("found", [shares(host=55, compute=45), shares(compute=90, host=10)])
def test_xla_is_suggested_where_it_compiles_a_step_as_one_program(
    found, replicas, compiled, suggested
):
    model = network(replicas, **compiled)
    assert ("jit_compile=True" in verdict_on(found, model, X)) == suggested


def test_cropping_is_suggested_for_image_files(tmp_path):
    for number in range(4):
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        image = np.zeros((8, 8, 3))
        keras.utils.save_img(tmp_path / str(number % 2) / f"{number}.png", image, scale=False)
    data = kmg.data.from_directory(tmp_path, image_size=(8, 8))
    assert "random_crop" in verdict_on(shares(data_wait=61, compute=39), network(2), data)


def test_faster_links_are_suggested_in_mixed_precision_too():
    """Gradients still travel in float32."""
    found, model = shares(all_reduce=90, compute=10), network(2)
    model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    assert verdict_on(found, model, X).endswith(
        "faster links between the devices, or fewer devices"
    )
