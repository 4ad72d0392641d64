"""What `kmg.memory` estimates for activations, against what a step takes.

    python tests/benchmarks/bench_memory_estimate.py             print the table
    python tests/benchmarks/bench_memory_estimate.py --write     also into README.md here

For two batch sizes each, in processes of their own: the most memory during a step, above what was
held before it, once a first step has compiled everything. What does not depend on the batch falls
out of the difference of the two. The C library takes each tensor from the system by itself: as it
is set otherwise, it also holds memory between tensors, of an LSTM a quarter more.
"""

import argparse
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from report import machine, write_section

import keras_multigpu as kmg


def language_model() -> keras.Model:
    """A transformer that predicts the next word, of 2,000."""
    x = inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(2000, 64)(x)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(4, 16)(normal, normal, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(0.1)(attended)])
        wide = layers.Dense(256, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(wide)])
    return keras.Model(inputs, layers.Dense(2000, "softmax")(x))


def lstm() -> keras.Model:
    """Two recurrent layers."""
    recurrent = [layers.LSTM(128, return_sequences=True), layers.LSTM(128)]
    return keras.Sequential([keras.Input((50, 32)), *recurrent, layers.Dense(10, "softmax")])


def unet() -> keras.Model:
    """A network that labels each pixel."""
    x = inputs = keras.Input((64, 64, 3))
    known = []

    def convolved(x: object, filters: int) -> object:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    for filters in (16, 32, 64):
        x = convolved(x, filters)
        known.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, 128)
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([x, known.pop()]), filters)
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(x))


def vgg() -> keras.Model:
    """Convolutions and dense layers in a row."""
    parts: list[keras.Layer] = [keras.Input((32, 32, 3))]
    for filters, count in ((32, 2), (64, 2), (128, 3)):
        for _ in range(count):
            parts.append(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        parts.append(layers.MaxPooling2D())
    parts += [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(10, "softmax")]
    return keras.Sequential(parts)


def resnet() -> keras.Model:
    """Residual blocks with BatchNormalization."""
    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same")(x)
    for filters, strides in ((32, 1), (64, 2), (128, 2)):
        short = layers.Conv2D(filters, 1, strides)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, strides, "same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([short, layers.Conv2D(filters, 3, padding="same")(x)])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, "softmax")(x))


def mobilenet() -> keras.Model:
    """MobileNetV2 for small images."""
    return keras.applications.MobileNetV2(weights=None, classes=10, input_shape=(96, 96, 3))


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, int]]] = {
    "U-Net": (unet, (16, 64)),
    "transformer": (language_model, (16, 64)),
    "LSTM": (lstm, (128, 512)),
    "VGG-like": (vgg, (64, 256)),
    "ResNet-like": (resnet, (64, 256)),
    "MobileNetV2": (mobilenet, (16, 64)),
}
"""How to make each model, and the two batch sizes."""


def memory(name: str) -> float:
    """An amount of this process's memory, as Linux names it, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def made(name: str) -> keras.Model:
    model = kmg.distribute(MODELS[name][0](), devices=1, self_check=False)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    return model


def measure(name: str, size: int) -> None:
    """Print how much more memory a step takes than what is held before."""
    model = made(name)
    inputs, outputs = model.inputs[0], model.outputs[0]
    x = np.zeros((size, *inputs.shape[1:]), inputs.dtype)
    y = np.zeros((size, *outputs.shape[1:-1]), "int32")
    model.train_on_batch(x, y)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    for _ in range(3):
        model.train_on_batch(x, y)
    print(memory("VmHWM") - before)


def compared(name: str) -> tuple[float, float]:
    """MiB per example, estimated and measured."""
    model, sizes = made(name), MODELS[name][1]
    found = [kmg.memory(model, batch_size=size).devices[0] for size in sizes]
    estimates = [(each.update + each.activations) / 2**20 for each in found]
    measured = []
    for size in sizes:
        command = [sys.executable, __file__, "--measure", name, str(size)]
        alone = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
        measured.append(float(ended.stdout.split()[-1]))
    few, many = sizes
    estimate, truth = ((b - a) / (many - few) for a, b in (estimates, measured))
    return estimate, truth


def main() -> None:
    """Compare all models, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "SIZE"))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args()
    if chosen.measure:
        return measure(chosen.measure[0], int(chosen.measure[1]))
    head = ["model", "batch sizes", "MiB an example, estimated", "measured", "ratio"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    print(machine(), *lines, sep="\n", flush=True)
    for name in chosen.models:
        estimate, truth = compared(name)
        few, many = MODELS[name][1]
        cells = [name, f"{few}, {many}", f"{estimate:.2f}", f"{truth:.2f}"]
        lines.append(f"| {' | '.join([*cells, f'{estimate / truth:.2f}'])} |")
        print(lines[-1], flush=True)
    if chosen.write:
        write_section("memory estimate", lines)


if __name__ == "__main__":
    main()
