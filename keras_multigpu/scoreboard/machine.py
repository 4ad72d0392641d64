"""The devices of the scoreboard, a strategy over them, rows of its table, and the facts.

Devices are all GPUs; parts of the only one; or, without any, two logical CPU devices, which sum on
the path that several GPUs take: TensorFlow's own all-reduce.
"""

import functools
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.explanation.memory import memory_of_gpu
from keras_multigpu.processes.new_process import answer
from keras_multigpu.replicas import get_strategy

CPU = not tf.config.list_physical_devices("GPU")
KIND = "CPU" if CPU else "GPU"

SHARE_OF_A_CHIP = 0.8
"""The memory of a split GPU that its parts divide; CUDA and cuDNN need some as well."""


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: What was looked at.
        got: What was found.
        expected: In words; empty where only people can judge.
        ok: Whether it is as expected; None where only people can judge.
        skipped: Why there is no result.
    """

    name: str
    got: Any = None
    expected: str = ""
    ok: bool | None = None
    skipped: str | None = None


Checks = dict[str, Callable[[], Iterable[Row]]]


@functools.cache
def devices() -> list[str]:
    """The names of the devices, which are made at the first call."""
    if chips() > 1:
        return [f"GPU:{number}" for number in range(chips())]
    memory = None if CPU else memory_of_gpu(0)
    limit = {"memory_limit": int(SHARE_OF_A_CHIP * memory / 2**21)} if memory else {}
    parts = [tf.config.LogicalDeviceConfiguration(**limit) for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(KIND)[0], parts)
    return [f"{KIND}:0", f"{KIND}:1"]


@functools.cache
def strategy() -> tf.distribute.Strategy:
    """The strategy over all devices, as users have it on GPUs."""
    # For CPUs `get_strategy` chooses another way to sum.
    names = devices()
    return tf.distribute.MirroredStrategy(names) if CPU else get_strategy("mirrored", names)


def chips() -> int:
    return len(tf.config.list_physical_devices(KIND))


def details() -> dict[str, Any]:
    first, *_ = tf.config.list_physical_devices(KIND)
    found: dict[str, Any] = tf.config.experimental.get_device_details(first)
    return found


def no_tf32() -> str | None:
    """Why there is no TensorFloat-32 here; None if there is."""
    if CPU:
        return "CPUs have no TF32"
    return None if details().get("compute_capability", (0,)) >= (8,) else "this GPU has no TF32"


def checks() -> Checks:
    return {"machine": facts}


def facts() -> list[Row]:
    build, names = tf.sysconfig.get_build_info(), devices()
    rows = [
        Row(
            "Python, TensorFlow, Keras",
            [platform.python_version(), tf.__version__, keras.__version__],
        ),
        Row("CUDA, cuDNN", [build.get("cuda_version"), build.get("cudnn_version")]),
        Row("devices", names),
        Row("chips", f"{chips()} x {details().get('device_name', platform.machine())}"),
        Row("parts of one chip", len(names) > chips()),
        Row("CPU cores", len(os.sched_getaffinity(0))),
    ]
    if CPU or not shutil.which("nvidia-smi"):
        return [*rows, Row("links", skipped="there is no nvidia-smi")]
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    return [*rows, Row("driver", driver[:1]), Row("links", answer("nvidia-smi", "topo", "-m"))]
