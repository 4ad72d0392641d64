"""Time and memory of training steps, this package against stock Keras.

    python tests/benchmarks/bench_step.py                    all tables
    python tests/benchmarks/bench_step.py step start memory  some of them
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
import psutil
import tensorflow as tf
from report import machine, write_section

import keras_multigpu as kmg
from keras_multigpu.training.exchange import packing
from keras_multigpu.training.feed.feed import Group
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import normalized

ROUNDS = 5
REPLICAS = 2
LIMITS = {  # what the project promises
    "MobileNetV2": 1.0,
    "small MLP": 0.35,
    "small MLP, steps_per_execution=8": 0.45,
    "first step, 8 replicas": 0.45,
    "language model, 20,000 words: fit": 1.0,
    "language model, 20,000 words: evaluate": 1.0,
}


def mlp() -> keras.Model:
    """A model so small that a step is all dispatch."""
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
    """Random examples for so many steps of 64."""
    shape = build().input_shape[1:]
    random = np.random.default_rng(0)
    return random.random((64 * steps, *shape), "float32"), random.integers(0, 4, 64 * steps)


def seconds(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """How long an epoch takes."""
    start = time.perf_counter()
    model.fit(x, y, batch_size=64, verbose=0)
    return time.perf_counter() - start


def row(name: str, pairs: list[tuple[float, float]], steps: int = 1) -> str:
    """One row of the table: medians of both sides and of their ratios."""
    theirs, mine = (statistics.median(side) / steps * 1e3 for side in zip(*pairs, strict=True))
    ratios = [second / first for first, second in pairs]
    ratio, limit = statistics.median(ratios), LIMITS[name]
    verdict = "met" if ratio <= limit else "missed"
    return (
        f"| {name} | {theirs:.1f} ms | {mine:.1f} ms | {ratio:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {limit:.2f} {verdict} |"
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
    """Sixteen words, of which it predicts the next ones among 20,000."""
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
    models = language_model(), kmg.distribute(language_model(), strategy)
    for model in models:
        top_5 = keras.metrics.SparseTopKCategoricalAccuracy(5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy", top_5])
    rows = []
    for method in ("fit", "evaluate"):
        pairs = []
        for _ in range(3 * ROUNDS + 1):
            pair = []
            for model in models:
                start = time.perf_counter()
                getattr(model, method)(words, words, batch_size=16, verbose=0)
                pair.append(time.perf_counter() - start)
            pairs.append(tuple(pair))
        # The first pair has traced the steps.
        rows.append(row(f"language model, 20,000 words: {method}", pairs[1:], steps=10))
        print(rows[-1], flush=True)
    return rows


def bench_input() -> list[str]:
    """Time of `fit` over data on the host, against the same batches already on the devices."""
    rows = []
    for name, build, steps in (("small MLP", mlp, 300), ("MobileNetV2", mobilenet, 10)):
        x, y = data(build, steps)
        model = ours(build, REPLICAS)
        waiting = on_devices(model, x, y)
        seconds(model, x, y)
        trained_on(model, waiting)
        pairs = [(trained_on(model, waiting), seconds(model, x, y)) for _ in range(ROUNDS)]
        there, host = (statistics.median(side) / steps * 1e3 for side in zip(*pairs, strict=True))
        ratios = [second / first for first, second in pairs]
        rows.append(
            f"| {name} | {there:.1f} ms | {host:.1f} ms | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
        print(rows[-1], flush=True)
    return rows


def on_devices(model: keras.Model, x: np.ndarray, y: np.ndarray) -> list[Group]:
    """All batches as shares that lie on the replicas' devices."""
    groups = []
    for start in range(0, len(x), 64):
        batch = normalized((x[start : start + 64], y[start : start + 64]))
        shares = replication_of(model).cutter(batch)
        rows = []
        for share, replica in zip(shares.rows, replication_of(model).group.replicas, strict=True):
            with tf.device(replica.device):
                rows.append(keras.tree.map_structure(copied, share))
        groups.append(Group(1, 1, [shares._replace(rows=tuple(rows))], None))
    return groups


def copied(leaf: tf.Tensor | None) -> tf.Tensor | None:
    """A tensor on the present device; there are no sample weights."""
    return None if leaf is None else tf.identity(leaf)


def trained_on(model: keras.Model, groups: list[Group]) -> float:
    """How long a step on each of these batches takes in all."""
    start = time.perf_counter()
    for group in groups:
        logs = replication_of(model).run(model, "train", group, None)
    float(logs["loss"])
    return time.perf_counter() - start


def wide() -> keras.Model:
    """Many numbers for few examples: 40 MiB of gradients, 1 MiB in each layer."""
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(40)]
    return keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(10)])


def bench_buckets() -> list[str]:
    """Processor time of one step with gradients in buckets of several sizes, against one bucket."""
    x, y = data(wide, 4)
    models = {}
    default = f"{packing.BUCKET >> 20} MiB, then halves to {packing.SMALLEST >> 20}"
    sizes = {1000: (1000, 1000), default: (packing.BUCKET >> 20, packing.SMALLEST >> 20)}
    sizes |= {f"{size} MiB": (size, size) for size in (1, 4, 10, 25)}
    for size, mebibytes in sizes.items():
        packing.BUCKET, packing.SMALLEST = (each * 2**20 for each in mebibytes)
        models[size] = kmg.distribute(wide(), kmg.strategy("mirrored", devices=names(REPLICAS)))
        models[size].compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        # Traced now, with buckets of this size.
        seconds(models[size], x, y)
    rounds = []
    for _ in range(4 * ROUNDS):
        times = {}
        for size, model in models.items():
            start = time.process_time()
            seconds(model, x, y)
            times[size] = time.process_time() - start
        rounds.append(times)
    rows = []
    for size in list(models)[1:]:
        one, several = (statistics.median(r[which] for r in rounds) for which in (1000, size))
        ratios = [times[size] / times[1000] for times in rounds]
        rows.append(
            f"| {size} | {one / 4 * 1e3:.1f} ms | {several / 4 * 1e3:.1f} ms | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
        print(rows[-1], flush=True)
    return rows


def bench_start() -> list[str]:
    """Time from calling `fit` to the end of the first step, 8 replicas."""
    x, y = data(mobilenet, 1)
    pairs = []
    for _ in range(ROUNDS):
        pair = []
        for side in (stock, ours):
            model = side(mobilenet, 8)
            pair.append(seconds(model, x, y))
            del model
            keras.utils.clear_session()
        pairs.append(tuple(pair))
        print(f"first step: stock {pair[0]:.1f} s, ours {pair[1]:.1f} s", flush=True)
    rows = [row("first step, 8 replicas", pairs)]
    print(rows[-1], flush=True)
    return rows


def bench_self_check() -> list[str]:
    """What it adds to the first step, that a step is tried before it is relied on."""
    rows = []
    for name, build in (("small MLP", mlp), ("MobileNetV2", mobilenet)):
        x, y = data(build, 1)
        pairs = []
        for _ in range(ROUNDS):
            pair = []
            for self_check in (False, True):
                strategy = kmg.strategy("mirrored", devices=names(REPLICAS))
                model = compiled(kmg.distribute(build(), strategy, self_check=self_check))
                pair.append(seconds(model, x, y))
                del model
                keras.utils.clear_session()
            pairs.append(tuple(pair))
        without, tried = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [second / first for first, second in pairs]
        rows.append(
            f"| {name} | {without:.2f} s | {tried:.2f} s | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
        print(rows[-1], flush=True)
    return rows


def bench_memory() -> list[str]:
    """Growth of memory over 200 calls of `fit` and `predict`, after the first 20."""
    x, y = data(mlp, 2)
    rows = []
    for name, model in (("stock", stock(mlp, REPLICAS)), ("ours", ours(mlp, REPLICAS))):
        sizes = []
        for _ in range(200):
            model.fit(x, y, batch_size=64, verbose=0)
            model.predict(x, batch_size=64, verbose=0)
            sizes.append(psutil.Process().memory_info().rss / 2**20)
        early, late = sizes[19], sizes[-1]
        rows.append(f"| {name} | {early:.0f} MiB | {late:.0f} MiB | {late - early:+.1f} MiB |")
        print(rows[-1], flush=True)
    return rows


TABLES = {
    "step": (bench_steps, "| model, 2 replicas | stock | ours | ratio (range) | limit |"),
    "one": (bench_one_device, "| 2 replicas | plain Keras | ours | ratio (range) | limit |"),
    "input": (bench_input, "| model, 2 replicas | on the devices | on the host | ratio (range) |"),
    "buckets": (bench_buckets, "| bucket, 2 replicas | one bucket | buckets | ratio (range) |"),
    "start": (bench_start, "| MobileNetV2 | stock | ours | ratio (range) | limit |"),
    "check": (
        bench_self_check,
        "| first step, 2 replicas | without self-check | with it | ratio (range) |",
    ),
    "memory": (bench_memory, "| 200 x `fit` + `predict` | after 20 | after 200 | growth |"),
}


def main() -> None:
    """Run the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=[], metavar="table", help="|".join(TABLES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    print(machine())
    for name in arguments.tables or TABLES:
        function, header = TABLES[name]
        print(header, flush=True)
        lines = [header, "|" + " --- |" * (header.count("|") - 1), *function()]
        if arguments.write:
            write_section(name, [machine(), "", *lines])


if __name__ == "__main__":
    main()
