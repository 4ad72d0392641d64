"""What is known of GPUs by their names, and which of TensorFlow's devices they are."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.callbacks.throughput_report.device_peaks import peak_of
from keras_multigpu.callbacks.throughput_report.device_peaks import peak_of_devices

MODEL = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
NAMES = {"first": "Tesla V100S-PCIE-32GB", "second": "Tesla T4"}


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("Tesla V100S-PCIE-32GB", "float16", 130e12),
        ("Tesla V100S-PCIE-32GB", "float32", 16.4e12),
        ("Tesla V100S-PCIE-32GB", "bfloat16", None),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-DGXS-32GB", "float16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float16", None),
        ("GRID A100-10C", "float16", None),
    ],
)
def test_parts_of_gpus_and_rare_ones(name, dtype, expected):
    """None rather than a wrong one."""
    assert peak_of(name, dtype) == (expected and pytest.approx(expected))


@pytest.fixture
def gpus(monkeypatch):
    """Let TensorFlow tell of these visible GPUs and so many devices, which this machine lacks."""

    def see(visible, devices):
        found = {"get_visible_devices": visible, "list_logical_devices": range(devices)}
        for function, answer in found.items():
            monkeypatch.setattr(tf.config, function, lambda kind, answer=answer: list(answer))
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda device: {"device_name": NAMES[device]},
        )

    return see


def test_only_visible_gpus_are_counted(gpus):
    """`GPU:0` is the first visible one, whatever its number among all."""
    gpus(["second"], 1)
    assert peak_of_devices(["/device:GPU:0"], MODEL) == 8.1e12
    assert peak_of_devices(["/device:GPU:1"], MODEL) is None
    gpus(["second", "first"], 2)
    assert peak_of_devices(["/device:GPU:0", "/device:GPU:1"], MODEL) == pytest.approx(24.5e12)


def test_a_gpu_that_is_split_is_unknown(gpus):
    """Its parts have no peak of their own."""
    gpus(["first"], 2)
    assert peak_of_devices(["/device:GPU:0", "/device:GPU:1"], MODEL) is None


def test_cpus_have_no_peak():
    """Only GPUs are known."""
    assert peak_of_devices(["/device:CPU:0"], MODEL) is None
