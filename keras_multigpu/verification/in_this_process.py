"""Runs a comparison in this process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.devices import device_count, require_logical_cpus
from keras_multigpu.replicas import get_strategy
from keras_multigpu.verification.batches import first_batches
from keras_multigpu.verification.comparison import compare, tolerance
from keras_multigpu.verification.participants import Recipe
from keras_multigpu.verification.verification import Verification


def usual_replicas() -> list[int]:
    """The numbers of replicas to compare, if the user names none: on GPUs if there are two."""
    gpus = device_count("GPU")
    if gpus > 1:
        return sorted({2, gpus})
    return [2, 4] if devices_are_ready(4) else [2]


def devices_are_ready(count: int) -> bool:
    """Whether this process has that many devices; create logical ones if TensorFlow permits."""
    try:
        if device_count("GPU"):
            # Even to compare on the CPU, because this process may train on the GPUs afterwards.
            get_strategy("one_device")
        if device_count("GPU") < count:
            require_logical_cpus(count)
    except RuntimeError:
        return False
    return True


def run(
    build_model: Callable[[], keras.Model], data: Any, replicas: Sequence[int], steps: int
) -> Verification:
    # All on one kind of device: a CPU and a GPU differ in their own rounding.
    kind = "GPU" if device_count("GPU") >= max(replicas) else "CPU"
    strategies = {
        count: get_strategy("mirrored", devices=[f"{kind}:{index}" for index in range(count)])
        for count in replicas
    }
    with exact_float32():
        batches = first_batches(data, steps)
        recipe = Recipe(build_model, batches[0], f"{kind}:0")
        reports = compare(recipe, batches, strategies)
    return Verification(
        tuple(reports),
        steps,
        "GPUs" if kind == "GPU" else "logical CPU devices",
        tolerance(recipe.precision),
    )


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Make GPUs multiply in full float32 instead of TF32 with its three digits."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(allowed)
