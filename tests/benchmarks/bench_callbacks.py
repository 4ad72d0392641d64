"""What callbacks cost: time of a step with each that works inside steps, and that of a save.

    python tests/benchmarks/bench_callbacks.py [callbacks|checkpoint] [--write]

In each round every callback trains for some epochs right before or right after a training without
any; a figure is the median of the ratios of the processor time of all threads, steadier than wall
time on a shared machine. The first epoch is left out, in which some callbacks do what they do once.
"empty" is a second model without a callback: what the machine's noise alone does to a ratio. Saves
are timed alone, since the times of whole trainings differ by more than a save takes.
"""

import statistics
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from keras import layers
from report import main, split_cpu, spread

import keras_multigpu as kmg
from keras_multigpu import callbacks

MAKE = {
    "empty": lambda: None,
    "ReplicaMetrics": callbacks.ReplicaMetrics,
    "ThroughputReport": lambda: callbacks.ThroughputReport(verbose=0),
    "NaNGuard": callbacks.NaNGuard,
    "LearningRateWarmup": lambda: callbacks.LearningRateWarmup(steps=50),
    "BatchSizeScaling": lambda: callbacks.BatchSizeScaling(base_batch_size=32),
}


def mlp():
    """A model so small that dispatch is all of a step."""
    hidden = [layers.Dense(32, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(4)])


def convolutions():
    """A few convolutions, the size of a tutorial's model."""
    parts = [layers.Conv2D(width, 3, 2, activation="relu") for width in (32, 64)]
    last = [layers.GlobalAveragePooling2D(), layers.Dense(4)]
    return keras.Sequential([keras.Input((64, 64, 3)), *parts, *last])


MODELS = {"small MLP": (mlp, 100), "two convolutions": (convolutions, 10)}
"""Each model, and its steps per epoch."""


class Clock(keras.callbacks.Callback):
    """The last callback: how long epochs take until they have ended."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(time.process_time() - self.begun)


def side_of(build, callback):
    model = kmg.distribute(build(), devices=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model, callback


def seconds(side, x, y):
    """The processor time of two epochs, after one to warm up."""
    (model, callback), clock = side, Clock()
    listed = [clock] if callback is None else [callback, clock]
    model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0, callbacks=listed)
    return sum(clock.epochs[1:])


def compared(build, steps, rounds):
    """The ratios of each callback."""
    random = np.random.default_rng(0)
    x = random.random((64 * steps, *build().input_shape[1:]), "float32")
    y = random.integers(0, 4, 64 * steps)
    plain, sides = side_of(build, None), {name: side_of(build, MAKE[name]()) for name in MAKE}
    for side in (plain, *sides.values()):
        seconds(side, x, y)
    ratios = {name: [] for name in MAKE}
    for number in range(rounds):
        for name, side in sides.items():
            order = 1 if number % 2 else -1
            without, with_it = [seconds(one, x, y) for one in (plain, side)[::order]][::order]
            ratios[name].append(with_it / without)
    return ratios


def inside_steps(rounds):
    columns = [compared(*model, rounds) for model in MODELS.values()]
    for name in MAKE:
        yield name, *(spread(column[name]) for column in columns)


class Timed(callbacks.ResumableCheckpoint):
    """Notes how long each save delays training."""

    seconds: list[float] = []

    def _save(self, *args, **kwargs):
        began = time.perf_counter()
        super()._save(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)


def saves(rounds):
    """Two million weights; with Adam's moments three times as many values."""
    parts = [*(layers.Dense(1024, "relu") for _ in range(2)), layers.Dense(512), layers.Dense(10)]
    model = kmg.distribute(keras.Sequential([keras.Input((512,)), *parts]), devices=["CPU:0"])
    model.compile("adam", "mse")
    random, count = np.random.default_rng(0), 60
    x, y = (random.normal(size=(count * 256, n)).astype("float32") for n in (512, 10))
    data = kmg.data.from_arrays(x, y, global_batch_size=256)
    steps = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        steps.append((time.perf_counter() - began) / count)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            checkpoint = Timed(folder, every_steps=10)
            model.fit(data, epochs=1, callbacks=[checkpoint], verbose=0)
            size = max(path.stat().st_size for path in Path(checkpoint.folder).glob("*.kmg"))
    step, save = statistics.median(steps[1:]), statistics.median(Timed.seconds)
    yield f"{size / 1e6:.0f} MB", f"{1e3 * step:.0f} ms", f"{save / step:.1f} steps"


TABLES = {
    "callbacks": (f"callback | {' | '.join(MODELS)}", inside_steps),
    "checkpoint": ("a checkpoint | a step | a save delays by", saves),
}

if __name__ == "__main__":
    split_cpu(2)
    main(__doc__, TABLES)
