"""Slots for jobs: a GPU, or some of the CPU's cores, for one job at a time."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.devices import device_count, device_names, require_gpus


class Slot(NamedTuple):
    """A device for one job at a time, with the environment variables and cores that select it."""

    name: str
    variables: dict[str, str]
    cores: frozenset[int] | None = None


def slots(devices: Sequence[str] | int | None) -> list[Slot]:
    """The slots of `devices`: each GPU or, on a machine without any, each core."""
    cores = usable_cores()
    if devices is None:
        devices = device_count("GPU") or len(cores)
    names = device_names(devices)
    if names[0].startswith("GPU"):
        require_gpus(names)
        return [Slot(name, {"CUDA_VISIBLE_DEVICES": cuda_name(name)}) for name in names]
    return [cpu_slot(name, share(cores, index, len(names))) for index, name in enumerate(names)]


def cpu_slot(name: str, cores: list[int]) -> Slot:
    variables = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    threads = dict.fromkeys(variables, str(len(cores)))
    return Slot(name, threads | {"CUDA_VISIBLE_DEVICES": "-1"}, frozenset(cores))


def share(cores: list[int], index: int, count: int) -> list[int]:
    """The cores of slot `index` of `count`; slots share cores if there are too few."""
    if count > len(cores):
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def cuda_name(name: str) -> str:
    """CUDA's name for a GPU that TensorFlow sees here."""
    index = int(tf.config.get_visible_devices("GPU")[int(name[4:])].name.rpartition(":")[2])
    # TensorFlow counts only the GPUs that this variable makes visible.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index].strip() if visible else str(index)
