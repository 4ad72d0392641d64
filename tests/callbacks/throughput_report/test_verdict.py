"""The verdict names what limits the speed, and settings that help."""

import keras
import numpy as np
import pytest
from test_throughput_report import X, Y, network

import keras_multigpu as kmg
from keras_multigpu.callbacks.throughput_report.report import Throughput, verdict_on


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
