"""Strategies of different sizes in one process, which TensorFlow's collectives take for one."""

from collections.abc import Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from machine import Check, Row, devices, exact, strategy
from parity import difference, mlp

import keras_multigpu as kmg

LIMIT = 2e-5
Schedule = Sequence[tuple[int, tf.distribute.Strategy]]
"""Which model trains, and where, one epoch after the other."""


def checks() -> dict[str, Check]:
    exact()
    names = devices(parts=4)
    one, two = tf.distribute.OneDeviceStrategy(names[0]), strategy(names[:2])
    own = tf.distribute.MirroredStrategy(names[:2])
    schedules: dict[str, Schedule] = {
        "2, 1, 2 devices": [(0, two), (0, one), (0, two)],
        "2 devices, and a user's strategy over them": [(0, two), (0, own), (0, two)],
        "two models, on 2 devices and on 1": [(0, two), (1, one), (0, two), (1, one)],
    }
    if (count := len(names)) > 2:
        every = strategy(names)
        schedules |= {
            f"2, {count}, 2 devices": [(0, two), (0, every), (0, two)],
            f"two models, on 2 devices and on {count}": [(0, two), (1, every)] * 2,
        }
    if count > 3:
        others = strategy(names[2:4])
        schedules["two models, on 2 devices and on 2 others"] = [(0, two), (1, others)] * 2
    found: dict[str, Check] = {each: partial(alike, each, schedules[each]) for each in schedules}
    return {**found, "kmg.verify": partial(verified, [2, 4] if count > 3 else [2])}


def trained(schedule: Schedule, placed: bool) -> list[np.ndarray]:
    """The weights after each turn; all turns are on one device by plain Keras if not `placed`."""
    keras.utils.set_random_seed(1)
    models = [compiled() for _ in {number for number, _ in schedule}]
    x, y = data()
    found = []
    for number, place in schedule:
        model = models[number]
        if placed and getattr(model, "distribute_strategy", None) is not place:
            kmg.distribute(model, place, on_inexact="error")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found += [weight.numpy() for weight in model.weights]
    return found


def alike(name: str, schedule: Schedule) -> Row:
    worst = difference(trained(schedule, placed=False), trained(schedule, placed=True))
    return Row(name, f"<= {LIMIT:g}", worst, worst <= LIMIT)


def verified(replicas: list[int]) -> Row:
    found = kmg.verify(compiled, data(), replicas=replicas, steps=3)
    expected = [True] * len(replicas)
    got = [report.agrees for report in found.reports]
    return Row(f"kmg.verify(replicas={replicas})", expected, got, got == expected)


def compiled() -> keras.Model:
    model = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(29, 8)).astype("float32"), random.integers(0, 3, 29)
