"""Processor and wall time of the first step of `fit` on two replicas, self-check included.

    python tests/benchmarks/bench_first_step.py                      with and without the self-check
    python tests/benchmarks/bench_first_step.py --write              also into README.md here
    python tests/benchmarks/bench_first_step.py --against FOLDER     against another checkout

Each step has a process of its own, and both sides run in turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import machine, spread, write_section

import keras_multigpu as kmg

ROOT = Path(__file__).parents[2]
ROUNDS = 5


def mobilenet() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Many layers, with a sum over replicas after most of them."""
    random = np.random.default_rng(0)
    model = keras.applications.MobileNetV2(
        (96, 96, 3), weights=None, classes=10, classifier_activation=None
    )
    return model, random.random((32, 96, 96, 3), "float32"), random.integers(0, 10, 32)


def transformer() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Twelve layers that predict the next word."""
    words = np.random.default_rng(0).integers(0, 2000, (16, 32))
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(2000, 64)(inputs)
    for _ in range(12):
        attended = layers.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + attended)
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, "relu")(x)))
    return keras.Model(inputs, layers.Dense(2000)(x)), words, words


MODELS = {"MobileNetV2": mobilenet, "12-layer transformer": transformer}


def measure(name: str, self_check: bool) -> None:
    """Print how long a first step takes: processor and wall seconds."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    model, x, y = MODELS[name]()
    model = kmg.distribute(model, devices=2, self_check=self_check)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    start = time.process_time(), time.perf_counter()
    model.fit(x, y, batch_size=len(x), verbose=0)
    print(time.process_time() - start[0], time.perf_counter() - start[1])


def seconds(name: str, self_check: bool, checkout: Path) -> tuple[float, float]:
    """What `measure` prints in a new process, with the package of this checkout."""
    command = [sys.executable, __file__, "--measure", name, *["--unchecked"] * (not self_check)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    cpu, wall = map(float, done.stdout.split()[-2:])
    return cpu, wall


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--unchecked", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, not arguments.unchecked)
        return
    print(machine())
    other = "without self-check" if arguments.against is None else "the other checkout"
    sides = (arguments.against is not None, arguments.against or ROOT), (True, ROOT)
    head = f"| first step, 2 replicas | {other} | with self-check | processor time (range) | wall |"
    rows = [head, "|" + "---|" * (head.count("|") - 1)]
    print(head, flush=True)
    for name in MODELS:
        pairs = [[seconds(name, *side) for side in sides] for _ in range(ROUNDS)]
        one, two = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
        cpu, wall = ([new[kind] / old[kind] for old, new in pairs] for kind in (0, 1))
        ratios = f"{spread(cpu)} | {statistics.median(wall):.2f}"
        rows.append(f"| {name} | {one:.1f} s | {two:.1f} s | {ratios} |")
        print(rows[-1], flush=True)
    if arguments.write:
        write_section("check", rows)


if __name__ == "__main__":
    main()
