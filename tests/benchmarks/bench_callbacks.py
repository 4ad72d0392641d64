"""Time of a training step with each callback that works inside steps, against one without.

    python tests/benchmarks/bench_callbacks.py             print the table
    python tests/benchmarks/bench_callbacks.py --write     also into docs/benchmarks.md

All run in one process, in turn, on the same data on two logical CPU devices. In each round every
callback trains for some epochs right after a training without any; a figure is the median of the
rounds' ratios. "empty" is a second training without a callback: what the machine's noise alone
does to a ratio. ReplicaDriftCheck and ResumableCheckpoint act now and then, not in every step;
their pages have what one check and one save cost.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from report import machine
from report import write_section

import keras_multigpu as kmg
from keras_multigpu import callbacks

REPLICAS = 2
MAKE: dict[str, Callable[[], Any]] = {
    "empty": lambda: None,
    "ReplicaMetrics": callbacks.ReplicaMetrics,
    "ThroughputReport": lambda: callbacks.ThroughputReport(verbose=0),
    "GradientNoiseScale": callbacks.GradientNoiseScale,
    "NaNGuard": callbacks.NaNGuard,
    "LearningRateWarmup": lambda: callbacks.LearningRateWarmup(steps=50),
    "BatchSizeScaling": lambda: callbacks.BatchSizeScaling(base_batch_size=32),
}


def mlp() -> keras.Model:
    """A model so small that a step is all dispatch."""
    layers = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])


def mobilenet() -> keras.Model:
    """A convolutional network of many layers."""
    return keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), alpha=0.35, weights=None, classes=4, classifier_activation=None
    )


def convolutions() -> keras.Model:
    """A few convolutions, the usual size of a tutorial."""
    layers = [keras.layers.Conv2D(width, 3, 2, activation="relu") for width in (32, 64)]
    last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((64, 64, 3)), *layers, *last])


MODELS = {
    "small MLP": (mlp, 200),
    "two convolutions": (convolutions, 30),
    "MobileNetV2": (mobilenet, 6),
}
"""Each model, and how many steps are timed."""


def made(build: Callable[[], keras.Model]) -> keras.Model:
    """A model on two devices."""
    devices = [f"CPU:{index}" for index in range(REPLICAS)]
    model = kmg.distribute(build(), kmg.strategy("mirrored", devices=devices))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def seconds(model: keras.Model, x: Any, y: Any, callback: Any) -> float:
    """How long an epoch takes."""
    start = time.perf_counter()
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[] if callback is None else [callback])
    return time.perf_counter() - start


def rows(name: str, rounds: int) -> list[str]:
    """A row of the table for each callback on one model."""
    build, steps = MODELS[name]
    random = np.random.default_rng(0)
    x = random.random((64 * steps, *build().input_shape[1:]), "float32")
    y = random.integers(0, 4, 64 * steps)
    plain = made(build)
    sides = {each: (made(build), make()) for each, make in MAKE.items()}
    for model, callback in [(plain, None), *sides.values()]:
        seconds(model, x, y, callback)
    step = min(seconds(plain, x, y, None) for _ in range(3)) / steps
    ratios: dict[str, list[float]] = {each: [] for each in sides}
    for _ in range(rounds):
        for each, (model, callback) in sides.items():
            without = seconds(plain, x, y, None)
            ratios[each].append(seconds(model, x, y, callback) / without)
    found = []
    for each, of_rounds in ratios.items():
        middle = statistics.median(of_rounds)
        spread = f"{min(of_rounds):.2f} to {max(of_rounds):.2f}"
        found.append(f"| {name}, {1e3 * step:.1f} ms | {each} | {middle:.3f} ({spread}) |")
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Run all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    header = "| model, and a step of it | callback | time of a step, against none (range) |"
    print(machine(), header, sep="\n", flush=True)
    lines = [header, "| --- | --- | --- |"]
    for name in arguments.models:
        lines += rows(name, arguments.rounds)
    if arguments.write:
        write_section("callbacks", [machine(), "", *lines])


if __name__ == "__main__":
    main()
