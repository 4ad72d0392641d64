"""Time of a training step with each callback that works inside steps, against one without.

    python tests/benchmarks/bench_callbacks.py             print the table
    python tests/benchmarks/bench_callbacks.py --write     also into docs/benchmarks.md

All run in one process, in turn, on the same data on two logical CPU devices. In each round every
callback trains for some epochs right after a training without any; a figure is the median of the
rounds' ratios. "empty" is a second training without a callback: what the machine's noise alone
does to a ratio. Callbacks that act at their default frequency do so here.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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
FOLDER = Path(tempfile.mkdtemp())

# How each is made where it needs arguments. One that is not there is left out.
MAKE: dict[str, Callable[[type], Any]] = {
    "ReplicaMetrics": lambda cls: cls(),
    "ThroughputReport": lambda cls: cls(verbose=0),
    "GradientNoiseScale": lambda cls: cls(),
    "NaNGuard": lambda cls: cls(),
    "ReplicaDriftCheck": lambda cls: cls(),
    "ResumableCheckpoint": lambda cls: cls(FOLDER / "checkpoints"),
    "LearningRateWarmup": lambda cls: cls(steps=50),
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


MODELS = {"small MLP": (mlp, 200), "MobileNetV2": (mobilenet, 6)}
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
    # A checkpoint of a run that has ended leaves nothing to train.
    shutil.rmtree(FOLDER, ignore_errors=True)
    start = time.perf_counter()
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[] if callback is None else [callback])
    return time.perf_counter() - start


def rows(name: str, rounds: int) -> list[str]:
    """A row of the table for each callback on one model."""
    build, steps = MODELS[name]
    random = np.random.default_rng(0)
    x = random.random((64 * steps, *build().input_shape[1:]), "float32")
    y = random.integers(0, 4, 64 * steps)
    plain, sides = made(build), {}
    for each, make in {"empty": lambda cls: None, **MAKE}.items():
        if each == "empty" or hasattr(callbacks, each):
            sides[each] = made(build), make(getattr(callbacks, each, type(None)))
    for model, callback in [(plain, None), *sides.values()]:
        seconds(model, x, y, callback)
    ratios: dict[str, list[float]] = {each: [] for each in sides}
    for _ in range(rounds):
        for each, (model, callback) in sides.items():
            without = seconds(plain, x, y, None)
            ratios[each].append(seconds(model, x, y, callback) / without)
    found = []
    for each, of_rounds in ratios.items():
        middle = statistics.median(of_rounds)
        spread = f"{min(of_rounds):.2f} to {max(of_rounds):.2f}"
        found.append(f"| {name} | {each} | {middle:.3f} ({spread}) |")
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
    header = "| model, 2 replicas | callback | time of a step, against none (range) |"
    print(machine(), header, sep="\n", flush=True)
    lines = [header, "| --- | --- | --- |"]
    for name in arguments.models:
        lines += rows(name, arguments.rounds)
    if arguments.write:
        write_section("callbacks", [machine(), "", *lines])


if __name__ == "__main__":
    main()
