"""Where shares are, and whether those of a step reach their devices before the last one ends."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from machine import CPU, Check, Row, devices
from networks import batches, images, made

from keras_multigpu.training.feed.cutter import AHEAD
from keras_multigpu.training.replication import replication_of

PATIENCE = 10
"""How many seconds a step waits for a busy machine."""
STEPS = 12


def checks() -> dict[str, Check]:
    return {"ahead": partial(ahead, devices())}


class Ends(keras.callbacks.Callback):
    """Notes when steps end.

    Args:
        lasts: Whether a step takes longer than its devices, given its number.
    """

    def __init__(self, lasts: Callable[[int], bool]) -> None:
        super().__init__()
        self.lasts = lasts
        self.times: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time once all devices have finished."""
        tf.test.experimental.sync_devices()
        latest = time.perf_counter() + PATIENCE
        while self.lasts(batch) and time.perf_counter() < latest:
            time.sleep(0.001)
        self.times[batch] = time.perf_counter()


def ahead(names: list[str]) -> list[Row]:
    """AHEAD shares wait on the host for each GPU.

    That batch k + AHEAD + 2 is being made says that the GPUs have taken their shares of batch
    k + 1.
    """
    began: dict[int, float] = {}

    def note(number: np.ndarray) -> np.ndarray:
        began[int(number)] = time.perf_counter()
        return number

    def batch(
        number: tf.Tensor, example: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([tf.numpy_function(note, [number], tf.int64)]):
            return tf.identity(example[0]), example[1]

    later, model = 2 if CPU else AHEAD + 2, made("ours", names)
    # On a busy machine a CPU finishes a small step before the thread that makes batches runs. There
    # the step waits for that thread: the batch comes if it is made before anybody asks for it.
    ends = Ends(lambda step: CPU and step + later < STEPS and step + later not in began)
    data = tf.data.Dataset.zip(tf.data.Dataset.range(STEPS), batches(images(), STEPS)).map(batch)
    shares = next(iter(replication_of(model).cutter.ahead(data)))
    found = [rows.data[0].device.rpartition("device:")[2] for rows in shares.rows]
    model.fit(data, verbose=0, callbacks=[ends])
    began.clear()
    model.fit(data, verbose=0, callbacks=[ends])
    most = STEPS - later
    in_time = sum(began.get(step + later, np.inf) < ends.times[step] for step in range(most))
    return [
        Row("devices of the shares", names, found, None if CPU else found == names),
        Row("steps whose batch came in time", most, in_time, in_time == most if CPU else None),
    ]
