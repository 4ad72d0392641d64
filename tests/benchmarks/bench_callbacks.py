"""Time of a training step with each callback that works inside steps, against a step without.

    python tests/benchmarks/bench_callbacks.py             print the table
    python tests/benchmarks/bench_callbacks.py --write     also into README.md here

All run in one process, in turn, on the same data on two logical CPU devices. In each round every
callback trains for some epochs right before or right after a training without any; a figure is the
median of the rounds' ratios of the processor time of all threads, steadier than wall time on a
shared machine; wall time is printed as well. Epochs are timed from the first step to the end, the
callbacks' own work at the end included; the first one is left out, in which some callbacks do what
they do once. "empty" is a second model without a callback: what the machine's noise alone does to a
ratio. ReplicaDriftCheck and ResumableCheckpoint act now and then, not in every step; their pages
have what one check and one save cost.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from report import machine, spread, write_section

import keras_multigpu as kmg
from keras_multigpu import callbacks

REPLICAS = 2
MAKE: dict[str, Callable[[], Any]] = {
    "empty": lambda: None,
    "ReplicaMetrics": callbacks.ReplicaMetrics,
    "ThroughputReport": lambda: callbacks.ThroughputReport(verbose=0),
    "NaNGuard": callbacks.NaNGuard,
    "LearningRateWarmup": lambda: callbacks.LearningRateWarmup(steps=50),
    "BatchSizeScaling": lambda: callbacks.BatchSizeScaling(base_batch_size=32),
}


def mlp() -> keras.Model:
    """A model so small that dispatch is all of a step."""
    layers = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])


def convolutions() -> keras.Model:
    """A few convolutions, the size of a tutorial's model."""
    layers = [keras.layers.Conv2D(width, 3, 2, activation="relu") for width in (32, 64)]
    last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((64, 64, 3)), *layers, *last])


MODELS = {
    "small MLP": (mlp, 100),
    "two convolutions": (convolutions, 10),
}
"""Each model, and its steps per epoch."""

EPOCHS = 2
"""How many epochs are timed, after one to warm up."""


Side = tuple[keras.Model, Any]
"""A model and its callback, or None."""


class Clock(keras.callbacks.Callback):
    """The last callback: times when epochs begin and when they have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[tuple[float, float]] = []
        self._begun = (0.0, 0.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start both clocks."""
        self._begun = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Read them."""
        wall, processor = self._begun
        self.epochs.append((time.perf_counter() - wall, time.process_time() - processor))


def made(build: Callable[[], keras.Model]) -> keras.Model:
    """A model on two devices."""
    devices = [f"CPU:{index}" for index in range(REPLICAS)]
    model = kmg.distribute(build(), kmg.strategy("mirrored", devices=devices))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def seconds(side: Side, x: Any, y: Any) -> np.ndarray:
    """Wall time and processor time of the timed epochs."""
    model, callback = side
    clock = Clock()
    several = [clock] if callback is None else [callback, clock]
    model.fit(x, y, batch_size=64, epochs=1 + EPOCHS, shuffle=False, verbose=0, callbacks=several)
    return np.sum(clock.epochs[1:], axis=0)


def measured(name: str, rounds: int) -> dict[str, str]:
    """The column of one model: its heading, and a ratio of processor time for each callback."""
    build, steps = MODELS[name]
    random = np.random.default_rng(0)
    x = random.random((64 * steps, *build().input_shape[1:]), "float32")
    y = random.integers(0, 4, 64 * steps)
    plain: Side = made(build), None
    sides: dict[str, Side] = {each: (made(build), make()) for each, make in MAKE.items()}
    for side in (plain, *sides.values()):
        seconds(side, x, y)
    ratios: dict[str, list[np.ndarray]] = {each: [] for each in sides}
    for number in range(rounds):
        for each, side in sides.items():
            order = 1 if number % 2 else -1
            without, with_it = [seconds(one, x, y) for one in (plain, side)[::order]][::order]
            ratios[each].append(with_it / without)
    found = {"callback": name}
    for each, of_rounds in ratios.items():
        wall, processor = (spread(column) for column in np.transpose(of_rounds).tolist())
        print(f"{name} | {each} | {processor} | of wall time {wall}", flush=True)
        found[each] = processor
    return found


def main() -> None:
    """Run all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    print(machine(), flush=True)
    tables = [measured(name, arguments.rounds) for name in arguments.models]
    heading, *rows = (
        "| " + " | ".join([each, *(table[each] for table in tables)]) + " |"
        for each in ("callback", *MAKE)
    )
    lines = [heading, "|" + "---|" * (1 + len(tables)), *rows]
    print("\n".join(lines))
    if arguments.write:
        write_section("callbacks", lines)


if __name__ == "__main__":
    main()
