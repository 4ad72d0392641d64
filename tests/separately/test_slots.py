"""Each slot has a GPU of its own or, without GPUs, some cores."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_multigpu.separately import slots


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that TensorFlow sees the GPUs with these numbers."""

    def pretend(*numbers):
        devices = [SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in numbers]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)

    return pretend


@pytest.mark.parametrize(
    ("visible", "seen", "devices", "expected"),
    [
        (None, (0, 1), None, ["0", "1"]),
        (None, (0, 1), 1, ["0"]),
        ("2,3", (0, 1), None, ["2", "3"]),
        ("GPU-a, GPU-b", (0, 1), ["GPU:1"], ["GPU-b"]),
        (None, (1, 3), None, ["1", "3"]),  # The program has hidden two from TensorFlow.
    ],
)
def test_the_process_of_a_job_sees_one_gpu(gpus, monkeypatch, visible, seen, devices, expected):
    """The process sees only this GPU, under CUDA's name."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus(*seen)
    found = slots.slots(devices)
    assert [slot.variables for slot in found] == [{"CUDA_VISIBLE_DEVICES": e} for e in expected]
    assert [slot.cores for slot in found] == [None] * len(expected)


def test_a_gpu_that_does_not_exist_is_refused(gpus):
    gpus(0, 1)
    with pytest.raises(ValueError, match="asks for more GPUs than there are"):
        slots.slots(["GPU:2"])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [[2, 3, 5, 7, 8]]),
        (2, [[2, 3], [5, 7, 8]]),
        (5, [[2], [3], [5], [7], [8]]),
        (6, [[2], [3], [5], [7], [8], [2]]),
    ],
)
def test_cores_are_divided_among_jobs(count, expected):
    """Every core is used, and jobs share one only if there are too few."""
    assert [slots.share([2, 3, 5, 7, 8], index, count) for index in range(count)] == expected


def test_without_gpus_each_core_is_a_slot(monkeypatch):
    monkeypatch.setattr(slots, "usable_cores", lambda: [1, 4])
    assert [slot.name for slot in slots.slots(None)] == ["CPU:0", "CPU:1"]
    assert [slot.cores for slot in slots.slots(None)] == [{1}, {4}]
