"""What it costs to divide the optimizer's state or the weights: bytes of a step, and its time.

    python tests/benchmarks/bench_sharding.py ["sharding bytes" ...] [--write]

Bytes are counted by the sizes of what replicas exchange, as rings or an all-to-all move them: for a
sum twice its size, for rows that are gathered or scattered once. Buckets are as small against these
models as 25 MiB are against large ones. Times are of rounds in turn. The link is that of
bench_scaling.py, and needs root.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_scaling
import keras
import numpy as np
from helpers.moved_bytes import counting
from keras import layers
from report import main, split_cpu, spread

import keras_multigpu as kmg
from keras_multigpu.partition.planning import gathering
from keras_multigpu.training.replication import replication_of

SHARDS = (None, "optimizer", "weights")
BATCH, LENGTH, WORDS, WIDTH, STEPS = 8, 16, 4096, 256, 8
UPDATE = 2
"""Of how many steps an update is that accumulates."""
gathering.BUCKET = 2**21


def dense():
    """Twelve layers of 4 MiB."""
    parts = [layers.Dense(1024, "relu") for _ in range(12)]
    return keras.Sequential([keras.Input((1024,)), *parts])


def language_model():
    """A decoder of six blocks, 26 MiB with its two tables of words."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(6):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal, use_causal_mask=True)
        wide = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(WIDTH)(wide)
    return keras.Model(words, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def with_lora():
    """The language model, frozen, with narrow kernels beside those of its dense layers."""
    model = language_model()
    for layer in model.layers:
        layer.trainable = isinstance(layer, layers.Dense)
        if layer.trainable:
            layer.enable_lora(8)
    return model


MODELS = {
    "dense": dense,
    "language model": language_model,
    "language model, LoRA": with_lora,
}
OPTIMIZERS = {
    "Adam": keras.optimizers.Adam,
    "Adam, clipped and accumulated": lambda: keras.optimizers.Adam(
        global_clipnorm=1.0, gradient_accumulation_steps=UPDATE
    ),
}


def compiled(name, shard, optimizer="Adam"):
    """A model on two devices."""
    devices = ["CPU:0", "CPU:1"]
    model = kmg.distribute(MODELS[name](), devices=devices, shard=shard, self_check=False)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = "mse" if name == "dense" else sparse
    model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=False)
    return model


def trained(model, steps):
    """How many seconds a step takes."""
    shape, dtype = model.inputs[0].shape[1:], model.inputs[0].dtype
    x = np.random.default_rng(0).integers(0, 9, (BATCH * steps, *shape)).astype(dtype)
    began = time.perf_counter()
    model.fit(x, x, batch_size=BATCH, verbose=0)
    return (time.perf_counter() - began) / steps


def bench_bytes(rounds):
    """The bytes of a step, in those of plain data parallel."""
    for name in MODELS:
        for optimizer in OPTIMIZERS if name == "dense" else ["Adam"]:
            found = []
            for shard in SHARDS:
                model = compiled(name, shard, optimizer)
                with counting(replication_of(model).group) as moved:
                    trained(model, UPDATE)
                found.append(moved.total() / UPDATE)
            plain, *others = found
            yield name, optimizer, f"{plain / 2e6:,.1f}", *(f"{n / plain:.2f}" for n in others)


def bench_time(rounds):
    """The time of a step, whose replicas share all cores."""
    models = [compiled("dense", shard) for shard in SHARDS]
    for model in models:
        trained(model, 1)
    times = [[trained(model, STEPS) for model in models] for _ in range(rounds)]
    yield compared(times)


def compared(times):
    """The row of a table of times, given those of each side in each round."""
    plain = statistics.median(each[0] for each in times)
    ratios = [spread([each[place] / each[0] for each in times]) for place in (1, 2)]
    return "step", f"{1000 * plain:.1f} ms", *ratios


def bench_link(rounds):
    """The time of a step of two workers, with a core and two devices each, at 1 Gbit/s."""
    os.environ["KERAS_MULTIGPU_CPU_DEVICES"] = "2"
    with bench_scaling.link("1gbit", None), contextlib.ExitStack() as ends:
        sides = []
        for shard in SHARDS:
            os.environ["SCALING_OURS"] = json.dumps({"shard": shard, "self_check": False})
            workers = ("ours", "dense", 2, bench_scaling.SPACES)
            sides.append(bench_scaling.Workers(sys.executable, *workers))
            ends.callback(sides[-1].end)
        times = [[side.step() for side in sides] for _ in range(rounds)]
    yield compared(times)


def bench_accumulation(rounds):
    """A step of two workers at 1 Gbit/s, of which four make an update, with its bytes."""
    bench_scaling.STEPS = 99  # And one more: 25 updates.
    count = "cat /sys/class/net/veth/statistics/tx_bytes"
    inside = f"ip netns exec {bench_scaling.SPACES[0]} {count}".split()

    def sent():
        return int(subprocess.run(inside, capture_output=True, check=True, timeout=60).stdout)

    with bench_scaling.link("1gbit", None), contextlib.ExitStack() as ends:
        sides, moved = [], [0, 0]
        for waits in (False, True):
            options = {"accumulates": 4, "waits": waits, "self_check": False}
            os.environ["SCALING_OURS"] = json.dumps(options)
            workers = ("ours", "dense", 2, bench_scaling.SPACES)
            sides.append(bench_scaling.Workers(sys.executable, *workers))
            ends.callback(sides[-1].end)
        times = []
        for _ in range(rounds):
            times.append([])
            for place, side in enumerate(sides):
                before = sent()
                times[-1].append(side.step())
                moved[place] += sent() - before
    plain = statistics.median(each[0] for each in times)
    yield "step", f"{1000 * plain:.1f} ms", spread([each[1] / each[0] for each in times])
    steps = rounds * (bench_scaling.STEPS + 1)
    yield "bytes", f"{moved[0] / steps / 1e6:.1f} MB", f"{moved[1] / moved[0]:.2f}"


HEAD = "nothing sharded | optimizer (range) | weights (range)"
TABLES = {
    "sharding bytes": (
        "model, 2 replicas | optimizer | MB, nothing sharded | optimizer | weights",
        bench_bytes,
    ),
    "sharding time": (f"dense, 2 replicas | {HEAD}", bench_time),
    "sharding link": (f"one layer of 4 MB, 2 workers x 2 devices | {HEAD}", bench_link),
    "accumulation": (
        "one layer of 4 MB, 2 workers, 4 steps an update | summed in each | once (range)",
        bench_accumulation,
    ),
}


if __name__ == "__main__":
    split_cpu(2)
    main(__doc__, TABLES, 7)
