"""Peak memory of the whole process on two replicas, first step included, against stock Keras.

The last column has four, and what each of them holds against each of two.

    python tests/benchmarks/bench_peak_memory.py             print the table
    python tests/benchmarks/bench_peak_memory.py --write     also into docs/benchmarks.md

Each training has a process of its own, which has trained a small model before: what it holds then
does not count. On logical CPU devices both replicas share the memory of one process.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import machine, write_section

import keras_multigpu as kmg

BATCH = 16
SIDES = ["stock", "ours", "ours, optimizer sharded", "ours, weights sharded"]
ON_FOUR = "ours, weights sharded on 4"


def dense(width: int = 3072) -> keras.Model:
    """Six layers, each of 36 MiB by default."""
    parts = [layers.Dense(width, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((width,)), *parts, layers.Dense(1)])


def convnet() -> keras.Model:
    """Convolutions and BatchNormalization."""
    x = inputs = keras.Input((32, 32, 3))
    for filters in (128, 256, 512, 1024):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def transformer() -> keras.Model:
    """Three blocks, and an embedding."""
    x = inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(4000, 1024)(x)
    for _ in range(3):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 256)(normal, normal)])
        wide = layers.Dense(4096, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(1024)(wide)])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def small() -> keras.Model:
    """A model that starts TensorFlow, Keras and this package."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(1)])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "dense": dense,
    "convnet": convnet,
    "transformer": transformer,
    "small dense": lambda: dense(1024),
}


def resident(kind: str) -> float:
    """The memory of this process in MiB: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


@functools.cache
def stock_strategy() -> tf.distribute.Strategy:
    """One for both trainings, because two mix up their sums."""
    return tf.distribute.MirroredStrategy(devices_of("stock"))


def devices_of(side: str) -> list[str]:
    return [f"CPU:{number}" for number in range(4 if side == ON_FOUR else 2)]


def trained(side: str, make: Callable[[], keras.Model]) -> keras.Model:
    """A model after some steps."""
    is_stock = side == "stock"
    with stock_strategy().scope() if is_stock else contextlib.nullcontext():
        model = make()
        if not is_stock:
            shard = side.split()[1] if "sharded" in side else None
            model = kmg.distribute(model, devices=devices_of(side), shard=shard)
        model.compile("adam", "mse", jit_compile=False)
    shape, dtype = model.inputs[0].shape[1:], model.inputs[0].dtype
    x = np.random.default_rng(0).integers(0, 9, (BATCH, *shape)).astype(dtype)
    for _ in range(2):
        model.fit(x, np.zeros((BATCH, 1)), BATCH, epochs=3, verbose=0)
    return model


def measure(side: str, name: str) -> None:
    """Print the peak over what was held before, in sizes of the weights."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in devices_of(side)]
    tf.config.set_logical_device_configuration(cpu, logical)
    trained(side, small)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    model = trained(side, MODELS[name])
    weights = sum(weight.nbytes for weight in model.get_weights()) / 2**20
    print((resident("VmHWM") - before) / weights)


def peak(side: str, name: str) -> float:
    """What `measure` prints in a process of its own."""
    command = [sys.executable, __file__, "--measure", side, name]
    # Each tensor comes from the system by itself: oneDNN's allocator and the C library's would also
    # hold memory between tensors, now more and now less.
    alone = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    return float(ended.stdout.split()[-1])


def main() -> None:
    """Measure all sides, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "MODEL"))
    chosen = parser.parse_args()
    if chosen.measure:
        return measure(*chosen.measure)
    head = ["model", *SIDES, "ours / stock", "weights sharded on 4, each / each of 2"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    print(machine(), *lines, sep="\n", flush=True)
    for name in list(MODELS)[:3]:
        peaks = [peak(side, name) for side in SIDES]
        on_four = peak(ON_FOUR, name)
        cells = [name, *(f"{each:.1f}" for each in peaks), f"{peaks[1] / peaks[0]:.2f}"]
        cells.append(f"{on_four:.1f}, {on_four / 4 / (peaks[3] / 2):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if chosen.write:
        write_section("peak memory", lines)


if __name__ == "__main__":
    main()
