"""Time of training steps, this package against stock Keras.

    python tests/benchmarks/bench_step.py                    all tables
    python tests/benchmarks/bench_step.py step one           some of them
    python tests/benchmarks/bench_step.py --write            also into docs/benchmarks.md

Both sides run in one process, in turn, on the same data and under the same number of
logical CPU devices; every figure is the median of the ratios of five such pairs. Absolute
times depend on the machine and its load, the ratios much less.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from report import machine, spread, verdict, write_section

import keras_multigpu as kmg
from keras_multigpu.training import replication
from keras_multigpu.training.runners.runner import Runner

ROUNDS = 5
REPLICAS = 2
LIMIT_OF_PYTHON = 0.15
LIMITS = {  # what the project promises
    "MobileNetV2": 1.0,
    "small MLP": 0.35,
    "small MLP, steps_per_execution=8": 0.45,
    "language model: fit": 1.0,
    "language model: fit, optimizer sharded": 1.0,
    "language model: evaluate": 1.0,
}


def mlp() -> keras.Model:
    """A model so small that dispatch is all of a step."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )


def mobilenet() -> keras.Model:
    """A small convolutional network of many layers."""
    return keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), alpha=0.35, weights=None, classes=10
    )


def compiled(model: keras.Model, **options: object) -> keras.Model:
    """The model as both sides train it."""
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def stock(build: Callable[[], keras.Model], replicas: int) -> keras.Model:
    """A model as the Keras guide distributes it."""
    with stock_strategy(replicas).scope():
        return compiled(build())


@functools.cache
def stock_strategy(replicas: int) -> tf.distribute.Strategy:
    """TensorFlow's strategy, made once: a second one in a process breaks both."""
    return tf.distribute.MirroredStrategy(names(replicas))


def ours(build: Callable[[], keras.Model], replicas: int, **options: object) -> keras.Model:
    """The same model under this package."""
    strategy = kmg.strategy("mirrored", devices=names(replicas))
    return compiled(kmg.distribute(build(), strategy), **options)


def names(replicas: int) -> list[str]:
    """The names of the first CPU devices."""
    return [f"CPU:{index}" for index in range(replicas)]


def data(build: Callable[[], keras.Model], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Random examples for `steps` steps of 64."""
    shape = build().input_shape[1:]
    random = np.random.default_rng(0)
    return random.random((64 * steps, *shape), "float32"), random.integers(0, 4, 64 * steps)


def seconds(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """How long an epoch takes."""
    start = time.perf_counter()
    model.fit(x, y, batch_size=64, verbose=0)
    return time.perf_counter() - start


def row(name: str, pairs: list[tuple[float, float]], steps: int) -> str:
    """One row of the table: medians of both sides and of their ratios."""
    theirs, mine = (statistics.median(side) / steps * 1e3 for side in zip(*pairs, strict=True))
    ratios, limit = [second / first for first, second in pairs], LIMITS[name]
    return (
        f"| {name} | {theirs:.1f} ms | {mine:.1f} ms | {spread(ratios)} | "
        f"{limit:.2f} {verdict(ratios, at_most=limit)} |"
    )


def bench_steps() -> list[str]:
    """Time of one training step inside `fit`."""
    rows = []
    for name, build, steps, options in (
        ("small MLP", mlp, 300, {}),
        ("small MLP, steps_per_execution=8", mlp, 304, {"steps_per_execution": 8}),
        ("MobileNetV2", mobilenet, 10, {}),
    ):
        x, y = data(build, steps)
        sides = stock(build, REPLICAS), ours(build, REPLICAS, **options)
        for model in sides:
            model.fit(x, y, batch_size=64, verbose=0)
        pairs = []
        for _ in range(ROUNDS):
            pairs.append(tuple(seconds(m, x, y) for m in sides))
        rows.append(row(name, pairs, steps))
        print(rows[-1], flush=True)
    return rows


def language_model() -> keras.Model:
    """Predicts the next word, of 20,000, after each of sixteen."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Embedding(20_000, 64),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(20_000),
        ]
    )


def bench_one_device() -> list[str]:
    """Time of one step where predictions are large, against plain Keras on one device."""
    words = np.random.default_rng(0).integers(0, 20_000, (16 * 10, 16))
    strategy = kmg.strategy("mirrored", devices=names(REPLICAS))
    plain, whole = language_model(), kmg.distribute(language_model(), strategy)
    sharded = kmg.distribute(language_model(), strategy, shard="optimizer")
    for model in (plain, whole, sharded):
        top_5 = keras.metrics.SparseTopKCategoricalAccuracy(5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy", top_5])
    rows = []
    for name, ours_is in (("fit", whole), ("fit, optimizer sharded", sharded), ("evaluate", whole)):
        pairs = []
        for _ in range(3 * ROUNDS + 1):
            pair = []
            for model in (plain, ours_is):
                start = time.perf_counter()
                getattr(model, name.partition(",")[0])(words, words, batch_size=16, verbose=0)
                pair.append(time.perf_counter() - start)
            pairs.append(tuple(pair))
        # The first pair traces the steps.
        rows.append(row(f"language model: {name}", pairs[1:], steps=10))
        print(rows[-1], flush=True)
    return rows


class Many(keras.layers.Layer):
    """Has so many scalar weights, which its output ignores."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        for number in range(weights):
            self.add_weight(shape=(), name=f"weight_{number}")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x


class Nothing(Runner):
    """A step that does nothing."""

    def __call__(self, shares: object) -> dict[str, tf.Tensor]:
        return {"loss": tf.zeros(())}


def bench_python() -> list[str]:
    """What Python does between two steps, besides TensorFlow's calls that read and run a batch."""
    rows = []
    for weights in (10, 1000):
        model = keras.Sequential([keras.Input((16,)), Many(weights), keras.layers.Dense(4)])
        strategy = kmg.strategy("mirrored", devices=names(REPLICAS))
        model = compiled(kmg.distribute(model, strategy, self_check=False))
        x, y = data(mlp, 600)
        own = replication.replication_of(model)
        original, replication.make_runner = replication.make_runner, lambda request: Nothing()
        try:
            model.fit(x[:64], y[:64], batch_size=64, verbose=0)
        finally:
            replication.make_runner = original
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        waiting = own.cutter.ahead(dataset)
        (steps,) = own.steps_of("train")

        def fitted(count: int, model: keras.Model = model, dataset: object = dataset) -> float:
            start = time.thread_time()
            model.fit(dataset.take(count), verbose=0)
            return time.thread_time() - start

        seconds = []
        for _ in range(ROUNDS):
            each = (fitted(600) - fitted(100)) / 500
            graph, start = next(iter(steps._made.values())).graph, time.thread_time()
            for leaves in waiting._dataset:
                graph(*leaves)
            seconds.append(each - (time.thread_time() - start) / 600)
        took = 1e3 * statistics.median(seconds)
        rows.append(f"| {weights} | {took:.3f} ms | {LIMIT_OF_PYTHON:.2f} ms |")
        print(rows[-1], flush=True)
    return rows


TABLES = {
    "step": (bench_steps, "| model, 2 replicas | stock | ours | ratio (range) | limit |"),
    "one": (bench_one_device, "| 2 replicas | plain Keras | ours | ratio (range) | limit |"),
    "python": (bench_python, "| variables, 2 replicas | Python between two steps | limit |"),
}


def main() -> None:
    """Run the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=[], metavar="table", help="|".join(TABLES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    print(machine())
    for name in arguments.tables or TABLES:
        function, header = TABLES[name]
        print(header, flush=True)
        lines = [header, "|" + "---|" * (header.count("|") - 1), *function()]
        if arguments.write:
            write_section(name, lines)


if __name__ == "__main__":
    main()
