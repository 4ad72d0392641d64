"""The time of a step, against one device and against `MirroredStrategy`; images a second.

Systems take turns. The last check has images from the host and images that the device makes: the
difference is the copy that is not hidden.
"""

import statistics
import time
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from machine import CPU, Check, Row, devices
from networks import BATCH, SYSTEMS, batches, images, made, resnet

TURNS, STEPS, WARM_UP = (1, 3, 2) if CPU else (5, 10, 2)


def checks() -> dict[str, Check]:
    names = devices()
    return {
        "train": partial(steps, names),
        "evaluate": partial(rates, "evaluate", names),
        "predict": partial(rates, "predict", names),
        "copy": partial(copies, names),
    }


class Clock(keras.callbacks.Callback):
    """Notes when the timed steps of an epoch begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time once all devices have finished."""
        if batch + 1 in (WARM_UP, WARM_UP + STEPS):
            tf.test.experimental.sync_devices()
            self.times.append(time.perf_counter())


def milliseconds(model: keras.Model, data: tf.data.Dataset) -> float:
    """The mean time of a step."""
    clock = Clock()
    model.fit(data, epochs=1, verbose=0, callbacks=[clock])
    return 1e3 * (clock.times[1] - clock.times[0]) / STEPS


def turns(models: dict[str, keras.Model], data: dict[str, tf.data.Dataset]) -> dict[str, float]:
    """The median time of a step, after a turn to warm up."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS + 1):
        for name, model in models.items():
            value = milliseconds(model, data[name])
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def steps(names: list[str]) -> list[Row]:
    models = {name: made(name, names) for name in SYSTEMS}
    found = turns(models, dict.fromkeys(models, batches(images(), WARM_UP + STEPS)))
    return [Row(f"{name}, ms a step", "", value) for name, value in found.items()]


def rates(what: str, names: list[str]) -> list[Row]:
    data = batches(images(), WARM_UP + STEPS)
    models, found = {name: made(name, names) for name in SYSTEMS}, []
    for name, model in models.items():
        times = []
        for _ in range(TURNS + 1):
            began = time.perf_counter()
            getattr(model, what)(data, verbose=0)
            times.append(time.perf_counter() - began)
        rate = BATCH * (WARM_UP + STEPS) / statistics.median(times[1:])
        found.append(Row(f"{what}, {name}, images a second", "", rate))
    return found


def copies(names: list[str]) -> list[Row]:
    models: dict[str, keras.Model] = {}
    data: dict[str, tf.data.Dataset] = {}
    for where, drawn in (("host", False), ("device", True)):
        for name in ("one", "ours"):
            models[f"{name}, {where}"] = made(name, names, partial(resnet, on_device=drawn))
            data[f"{name}, {where}"] = batches(images(on_device=drawn), WARM_UP + STEPS)
    found = turns(models, data)
    return [Row(f"{name}: images made there, ms a step", "", found[name]) for name in found]
