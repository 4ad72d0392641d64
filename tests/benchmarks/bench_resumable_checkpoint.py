"""What `ResumableCheckpoint` costs: how many steps' time a save delays training by.

    python tests/benchmarks/bench_resumable_checkpoint.py

Prints a table. Saves are timed alone, since the times of whole trainings differ by more than a
save takes.
"""

import shutil
import statistics
import tempfile
import time

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint

STEPS, EVERY, ROUNDS = 60, 10, 4


class Timed(ResumableCheckpoint):
    """Notes how long each save delays training."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds = []

    def _save(self, *args, **kwargs):
        began = time.perf_counter()
        super()._save(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)


def build():
    """Two million weights; with Adam's moments three times as many values."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((512,)), *(keras.layers.Dense(1024, "relu") for _ in range(2))]
    model = kmg.distribute(
        keras.Sequential([*layers, keras.layers.Dense(512), keras.layers.Dense(10)]),
        kmg.strategy("one_device", devices=["CPU:0"]),
    )
    model.compile("adam", "mse")
    return model


def step_seconds(model, data):
    """How long a step takes without callbacks."""
    began = time.perf_counter()
    model.fit(data, epochs=1, verbose=0)
    return (time.perf_counter() - began) / STEPS


def save_seconds(model, data):
    """How long each save of an epoch delays training."""
    folder = tempfile.mkdtemp(dir=".")
    checkpoint = Timed(folder, every_steps=EVERY)
    model.fit(data, epochs=1, callbacks=[checkpoint], verbose=0)
    size = max(path.stat().st_size for path in checkpoint.folder.glob("*.kmg"))
    shutil.rmtree(folder)
    return checkpoint.seconds, size


def main():
    """Measure and print."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(STEPS * 256, 512)), random.normal(size=(STEPS * 256, 10))
    data = kmg.data.from_arrays(x.astype("float32"), y.astype("float32"), global_batch_size=256)
    model = build()
    step_seconds(model, data)
    steps, saves, size = [], [], 0
    for _ in range(ROUNDS):
        steps.append(step_seconds(model, data))
        more, size = save_seconds(model, data)
        saves += more
    step = statistics.median(steps)
    print(f"A step takes {1e3 * step:.1f} ms, a checkpoint has {size / 1e6:.0f} MB.")
    held = statistics.median(saves)
    print(
        f"A save holds training up for {1e3 * held:.1f} ms = {held / step:.2f} steps; "
        f"every 100 steps {held / step / 100:.2%}"
    )


if __name__ == "__main__":
    main()
