"""What every check needs: the devices, a strategy over them, rows of the table, and processes.

On GPUs the devices are all GPUs, or parts of the only one. With `--cpu` they are logical CPU
devices, and sums take the path that they take on several GPUs: TensorFlow's own all-reduce.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import keras_multigpu as kmg

CPU = "--cpu" in sys.argv
KIND = "CPU" if CPU else "GPU"
PROGRAM = Path(__file__).with_name("gpu_checks.py")
OPTIONS = ["--cpu"] if CPU else []
SHARE_OF_A_CHIP = 0.8
"""The memory of a split GPU that its parts divide; CUDA and cuDNN need some as well."""

_strategies: dict[tuple[str, ...], tf.distribute.Strategy] = {}


class Row(NamedTuple):
    """A line of the table; `ok` is None for a figure that can only be compared by people."""

    name: str
    expected: Any
    got: Any
    ok: bool | None = None


Check = Callable[[], Row | list[Row]]


def devices(parts: int = 2) -> list[str]:
    """All GPUs, or the parts of the only one, or logical CPU devices; call it once, at first."""
    chips = tf.config.list_physical_devices(KIND)
    if len(chips) == 1:
        limit = {} if CPU else {"memory_limit": int(SHARE_OF_A_CHIP * memory_of_a_chip() / parts)}
        pieces = [tf.config.LogicalDeviceConfiguration(**limit) for _ in range(parts)]
        tf.config.set_logical_device_configuration(chips[0], pieces)
    return [f"{KIND}:{number}" for number in range(parts if len(chips) == 1 else len(chips))]


def memory_of_a_chip() -> float:
    """The memory of the first GPU in MiB, as its driver reports it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout.splitlines()[0])


def strategy(names: list[str]) -> tf.distribute.Strategy:
    """The strategy over these devices, as users have it on GPUs."""
    if not CPU:
        return kmg.strategy("mirrored", devices=names)
    # `kmg.strategy` would choose another way to sum for CPUs.
    if tuple(names) not in _strategies:
        _strategies[tuple(names)] = tf.distribute.MirroredStrategy(names)
    return _strategies[tuple(names)]


def exact() -> None:
    """Switch off TensorFloat-32, which rounds factors to ten bits."""
    tf.config.experimental.enable_tensor_float_32_execution(False)


def in_a_process_of_its_own(module: str, function: str, *args: Any, **variables: str) -> Any:
    """What a function of a module here returns, which must be JSON, with other variables.

    For what counts from the start of a process: memory, and compiled programs.
    """
    command = [sys.executable, str(PROGRAM), "--call", json.dumps([module, function, *args])]
    done = subprocess.run(
        [*command, *OPTIONS],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **variables},
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-600:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RETURNS"))
    return json.loads(line.removeprefix("RETURNS"))
