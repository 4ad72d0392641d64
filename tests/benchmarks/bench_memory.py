"""Memory and time of a step of a model whose layers are recomputed, against one that keeps all.

    python tests/benchmarks/bench_memory.py             print the table
    python tests/benchmarks/bench_memory.py --write     also into README.md here

Each training has its own process: after a step to warm up come its peak memory, less what it held
before `fit`, and the processor time of the steps that follow. On logical CPU devices all replicas
share the memory of one process.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from report import machine, write_section

import keras_multigpu as kmg

BLOCKS, LAYERS, WIDTH, BATCH, STEPS = 4, 6, 256, 8192, 5
WAYS = {"all kept": None, "`keras.RematScope`": "full"}
"""Ways to train, and the mode of the scope in each."""


class Block(keras.layers.Layer):
    """Layers that are recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        with keras.RematScope(mode=None):
            self.parts = [keras.layers.Dense(WIDTH, "gelu") for _ in range(LAYERS)]
            self.dropout = keras.layers.Dropout(0.1, seed=1)

    def build(self, shape: tuple[int | None, ...]) -> None:
        for part in self.parts:
            part.build(shape)

    def call(self, x: object, training: bool | None = None) -> object:
        """Apply the layers in order."""
        for part in self.parts:
            x = part(x)
        return self.dropout(x, training=training)


def most_memory() -> float:
    """The peak memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def measured(replicas: int, way: str, jit_compile: bool) -> None:
    """Print the memory and the time of one training, and its weights."""
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(1)
    with keras.RematScope(mode=WAYS[way]):
        blocks = [Block() for _ in range(BLOCKS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *blocks, keras.layers.Dense(1)])
    model = kmg.distribute(model, strategy, self_check=False)
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    before = most_memory()
    model.train_on_batch(x, x[:, :1])
    taken, start = most_memory() - before, time.process_time()
    for _ in range(STEPS):
        model.train_on_batch(x, x[:, :1])
    weights = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
    print(f"{taken} {(time.process_time() - start) / STEPS} {weights}")


def in_a_process(*arguments: str) -> list[float]:
    command = [sys.executable, __file__, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in ended.stdout.split()[-3:]]


def main() -> None:
    """Measure all ways, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--jit-compile", action="store_true")
    chosen = parser.parse_args()
    if chosen.way:
        return measured(chosen.replicas, chosen.way, chosen.jit_compile)
    head = [
        f"{what}, {n} replica{'s' if n > 1 else ''}" for n in (1, 2) for what in ("MiB", "time")
    ]
    lines = [f"| {' | '.join(['activations', *head])} |", "|---" * 5 + "|"]
    found = {
        (way, n): in_a_process(f"--way={way}", f"--replicas={n}") for way in WAYS for n in (1, 2)
    }
    for way in WAYS:
        cells = []
        for n in (1, 2):
            memory, seconds, weights = found[way, n]
            _, usual, expected = found["all kept", n]
            assert abs(weights - expected) < 1e-5 * expected, (way, n, weights, expected)
            cells += [f"{memory:,.0f}", f"{seconds / usual:.2f}"]
        lines.append(f"| {' | '.join([way, *cells])} |")
    print(machine(), *lines, sep="\n")
    if chosen.write:
        write_section("memory", lines)


if __name__ == "__main__":
    main()
