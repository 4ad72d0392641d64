"""Time of training steps: against stock Keras, against one device, and of the first one.

    python tests/benchmarks/bench_step.py [step|one|check ...] [--write]

Both sides run in one process, in turn, on the same data and on the same logical CPU devices; every
ratio is the median of those of pairs. Absolute times depend on the machine and its load, the ratios
much less. A first step has a process of its own.
"""

import functools
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import alone, main, measures, split_cpu, spread, verdict

import keras_multigpu as kmg

DEVICES = ["CPU:0", "CPU:1"]
LIMITS = {  # what the project promises
    "MobileNetV2": 1.0,
    "small MLP": 0.35,
    "small MLP, steps_per_execution=8": 0.45,
    "language model: fit": 1.0,
    "language model: fit, optimizer sharded": 1.0,
    "language model: evaluate": 1.0,
}


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp():
    """A model so small that dispatch is all of a step."""
    hidden = [layers.Dense(32, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(4)])


def mobilenet(alpha=0.35):
    return keras.applications.MobileNetV2(
        (96, 96, 3), alpha, weights=None, classes=10, classifier_activation=None
    )


def language_model():
    """Predicts the next word, of 20,000, after each of sixteen."""
    parts = [layers.Embedding(20_000, 64), layers.Dense(64, "relu"), layers.Dense(20_000)]
    return keras.Sequential([keras.Input((16,)), *parts])


def compiled(model, **options):
    model.compile("adam", crossentropy(), metrics=["accuracy"], **options)
    return model


@functools.cache
def stock_strategy():
    """Made once: a second one in a process breaks both."""
    return tf.distribute.MirroredStrategy(DEVICES)


def stock(build):
    """A model as the Keras guide distributes it."""
    with stock_strategy().scope():
        return compiled(build())


def ours(model, **options):
    return kmg.distribute(model, devices=DEVICES, **options)


def data(build, steps):
    """Random examples for steps of 64."""
    random = np.random.default_rng(0)
    x = random.random((64 * steps, *build().input_shape[1:]), "float32")
    return x, random.integers(0, 4, 64 * steps)


def seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments, verbose=0)
    return time.perf_counter() - start


def row(name, pairs, steps):
    theirs, mine = (statistics.median(side) / steps * 1e3 for side in zip(*pairs, strict=True))
    ratios, limit = [second / first for first, second in pairs], LIMITS[name]
    met = f"{limit:.2f} {verdict(ratios, at_most=limit)}"
    return name, f"{theirs:.1f} ms", f"{mine:.1f} ms", spread(ratios), met


def steps_in_fit(rounds):
    for name, build, steps, options in (
        ("small MLP", mlp, 300, {}),
        ("small MLP, steps_per_execution=8", mlp, 304, {"steps_per_execution": 8}),
        ("MobileNetV2", mobilenet, 10, {}),
    ):
        x, y = data(build, steps)
        sides = stock(build), compiled(ours(build()), **options)
        pairs = [[seconds(model.fit, x, y, 64) for model in sides] for _ in range(rounds + 1)]
        yield row(name, pairs[1:], steps)


def against_one_device(rounds):
    """Where predictions are large."""
    words = np.random.default_rng(0).integers(0, 20_000, (16 * 10, 16))
    plain, whole = language_model(), ours(language_model())
    sharded = ours(language_model(), shard="optimizer")
    for model in (plain, whole, sharded):
        top_5 = keras.metrics.SparseTopKCategoricalAccuracy(5)
        model.compile("adam", crossentropy(), metrics=["accuracy", top_5])
    for name, mine in (("fit", whole), ("fit, optimizer sharded", sharded), ("evaluate", whole)):
        method = name.partition(",")[0]
        pairs = [
            [seconds(getattr(model, method), words, words, 16) for model in (plain, mine)]
            for _ in range(3 * rounds + 1)
        ]
        # The first pair traces the steps.
        yield row(f"language model: {name}", pairs[1:], steps=10)


def large_mobilenet():
    """Many layers, with a sum over replicas after most of them."""
    random = np.random.default_rng(0)
    return mobilenet(1.0), random.random((32, 96, 96, 3), "float32"), random.integers(0, 10, 32)


def transformer():
    """Twelve layers that predict the next word."""
    words = np.random.default_rng(0).integers(0, 2000, (16, 32))
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(2000, 64)(inputs)
    for _ in range(12):
        attended = layers.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + attended)
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, "relu")(x)))
    return keras.Model(inputs, layers.Dense(2000)(x)), words, words


FIRST = {"MobileNetV2": large_mobilenet, "12-layer transformer": transformer}


def measure_first_step(name, self_check):
    """Processor and wall seconds of the first `fit` of a new model."""
    model, x, y = FIRST[name]()
    model = ours(model, self_check=bool(int(self_check)))
    model.compile("adam", crossentropy())
    start = time.process_time(), time.perf_counter()
    model.fit(x, y, batch_size=len(x), verbose=0)
    return time.process_time() - start[0], time.perf_counter() - start[1]


def first_steps(rounds):
    for name in FIRST:
        pairs = [
            [alone(__file__, name, self_check) for self_check in (0, 1)] for _ in range(rounds)
        ]
        times = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
        cpu, wall = ([new[kind] / old[kind] for old, new in pairs] for kind in (0, 1))
        sides = [f"{each:.1f} s" for each in times]
        yield name, *sides, spread(cpu), f"{statistics.median(wall):.2f}"


CHECK = "first step, 2 replicas | without self-check | with self-check | processor time (range)"
TABLES = {
    "step": ("model, 2 replicas | stock | ours | ratio (range) | limit", steps_in_fit),
    "one": ("2 replicas | plain Keras | ours | ratio (range) | limit", against_one_device),
    "check": (f"{CHECK} | wall", first_steps),
}

if __name__ == "__main__":
    split_cpu(len(DEVICES))
    if asked := measures():
        print(*measure_first_step(*asked))
    else:
        main(__doc__, TABLES)
