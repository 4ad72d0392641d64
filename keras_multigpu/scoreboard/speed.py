"""Steps, scaling and peak memory of a network, and how much of its sums is hidden.

Each replica has as much to do as the one device, so perfect scaling takes no more time for a step.
Systems take turns.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.devices import forget_peaks
from keras_multigpu.scoreboard.machine import CPU, Checks, Row, chips, devices, strategy
from keras_multigpu.scoreboard.networks import SYSTEMS, batches, made
from keras_multigpu.scoreboard.overlap import hidden_sums

TURNS, STEPS, WARM_UP, TRACED = (1, 3, 2, 3) if CPU else (5, 10, 3, 3)
SHARE = 4 if CPU else 32
"""Examples of a replica."""


def checks(network: str, policy: str = "float32", jit: bool = False) -> Checks:
    # First of all, since it lets GPUs take memory as they need it.
    strategy()
    return {network: partial(measured, network, policy, jit)}


class Clock(keras.callbacks.Callback):
    """Notes when the timed steps of an epoch begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 in (WARM_UP, WARM_UP + STEPS):
            tf.test.experimental.sync_devices()
            self.times.append(time.perf_counter())


def measured(network: str, policy: str, jit: bool) -> Iterator[Row]:
    models: dict[str, keras.Model] = {}
    if jit:
        yield Row("stock: a step", skipped="stock Keras fails with XLA on several devices")
    for system in SYSTEMS[: 2 if jit else 3]:
        held, began = held_bytes("current"), time.perf_counter()
        forget_peaks()
        try:
            model = made(system, network, policy, jit)
            model.fit(batches(network, batch_of(system), WARM_UP), verbose=0)
        except Exception as error:
            # That stock Keras fails is a result, and the others go on.
            if system != "stock":
                raise
            yield Row("stock: a step", f"fails: {type(error).__name__}")
            continue
        models[system] = model
        yield Row(f"{system}: seconds to its first {WARM_UP} steps", time.perf_counter() - began)
        yield memory_of(system, held)
    times: dict[str, list[float]] = {system: [] for system in models}
    for _ in range(TURNS):
        for system, model in models.items():
            times[system].append(milliseconds(model, network, batch_of(system)))
    for system, of_turns in times.items():
        step, batch = statistics.median(of_turns), batch_of(system)
        yield Row(f"{system}: ms a step of {batch}", step)
        yield Row(f"{system}: examples a second", 1e3 * batch / step)
        if system == "one":
            continue
        name = f"{system}: efficiency, its least and most"
        if len(devices()) > chips():
            yield Row(name, skipped="the devices share one chip")
            continue
        ratios = [one / own for one, own in zip(times["one"], of_turns, strict=True)]
        yield Row(name, [statistics.median(ratios), min(ratios), max(ratios)])
    for system in [*models][1:]:
        fit = partial(models[system].fit, batches(network, batch_of(system), TRACED), verbose=0)
        for row in hidden_sums(fit, TRACED):
            yield row._replace(name=f"{system}: {row.name}")


def batch_of(system: str) -> int:
    """As many examples for each device."""
    return SHARE * (1 if system == "one" else len(devices()))


def milliseconds(model: keras.Model, network: str, batch: int) -> float:
    """The mean time of a step of a turn."""
    clock = Clock()
    model.fit(batches(network, batch, WARM_UP + STEPS), verbose=0, callbacks=[clock])
    return 1e3 * (clock.times[1] - clock.times[0]) / STEPS


def memory_of(system: str, held: list[int]) -> Row:
    """What a system has added to the peak of each GPU, its first step included."""
    name = f"{system}: peak MB of each GPU"
    if CPU:
        return Row(name, skipped="devices of a CPU share one memory")
    peaks = held_bytes("peak")
    added = [round((peak - before) / 1e6, 1) for peak, before in zip(peaks, held, strict=True)]
    return Row(name, added[:1] if system == "one" else added)


def held_bytes(kind: str) -> list[int]:
    """The bytes that each GPU holds now ("current"), or has held since the last reset ("peak")."""
    names = [] if CPU else devices()
    return [tf.config.experimental.get_memory_info(name)[kind] for name in names]
