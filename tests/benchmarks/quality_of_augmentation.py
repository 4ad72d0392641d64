"""Validation accuracy with this package's augmentation, with that of Keras, and with none.

    python tests/benchmarks/quality_of_augmentation.py                     the table
    python tests/benchmarks/quality_of_augmentation.py --plot curves.png   and a picture
    python tests/benchmarks/quality_of_augmentation.py --write             into docs/benchmarks.md

A small network learns handwritten digits, those that scikit-learn ships, from 100 images, and is
judged by the other 1,697. The augmentation is part of the model in all cases, and draws from the
same ranges. For each seed, all start with the same weights and have the same 100 images.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from report import machine
from report import write_section

from keras_multigpu import augmentation

SEEDS = (0, 1, 2)
SIZE = 16
TRAINING, EPOCHS, BATCH = 100, 200, 25
EVERY, LAST = 5, 5
"""Accuracy is measured every so many epochs; the mean of the last few says more than one."""

GEOMETRY = {"rotation": 0.03, "translation": 0.06, "zoom": 0.1, "shear": 0.1}
COLOR = {"brightness": 0.1, "contrast": 0.2}
"""Digits are not mirrored: a mirrored 2 is no 2."""

BLACK = {"fill_mode": "constant", "fill_value": 0.0}


def stock() -> keras.Layer:
    """The layers of Keras."""
    layers = keras.layers
    return layers.Pipeline(
        [
            layers.RandomRotation(GEOMETRY["rotation"], **BLACK),
            layers.RandomTranslation(GEOMETRY["translation"], GEOMETRY["translation"], **BLACK),
            layers.RandomZoom(GEOMETRY["zoom"], **BLACK),
            layers.RandomShear(GEOMETRY["shear"], GEOMETRY["shear"], **BLACK),
            layers.RandomBrightness(COLOR["brightness"], value_range=(0, 255)),
            layers.RandomContrast(COLOR["contrast"], value_range=(0, 255)),
        ]
    )


def fused() -> keras.Layer:
    """The same by this package."""
    return augmentation.Sequence(
        [
            augmentation.RandomGeometry(**GEOMETRY, **BLACK),
            augmentation.RandomColor(**COLOR),
        ]
    )


WAYS: dict[str, Callable[[], keras.Layer]] = {
    "none": lambda: keras.layers.Identity(),
    "Keras, six layers": stock,
    "RandomGeometry, RandomColor": fused,
}


def digits(seed: int) -> tuple[Any, Any]:
    """Training and validation data, `uint8` images of 16x16."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images[..., None].astype(np.float32) * (255 / 16)
    images = keras.ops.image.resize(images, (SIZE, SIZE), interpolation="bicubic")
    images = np.clip(np.round(images), 0, 255).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(images))
    parts = np.split(order, [TRAINING])
    return tuple((images[part], data.target[part]) for part in parts)


def network() -> keras.Model:
    """A small convolutional network, without the augmentation."""
    layers = keras.layers
    blocks = [
        layer
        for filters in (32, 64)
        for layer in (
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
        )
    ]
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Rescaling(1 / 255),
            *blocks,
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


def accuracies(maker: Callable[[], keras.Layer], seed: int) -> list[float]:
    """The validation accuracy after each epoch."""
    keras.utils.set_random_seed(seed)
    training, validation = digits(seed)
    inside = network()  # Before the augmentation, whose draws would change the first weights.
    model = keras.Sequential([keras.Input((SIZE, SIZE, 1)), maker(), inside])
    steps = EPOCHS * -(-TRAINING // BATCH)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        *training,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_data=validation,
        validation_batch_size=800,
        validation_freq=EVERY,
    )
    return history.history["val_accuracy"]


def table(curves: dict[str, list[list[float]]]) -> list[str]:
    """A row for each way, with each seed's accuracy."""
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    rows = [f"| augmentation | mean | {seeds} |", "|" + " --- |" * (2 + len(SEEDS))]
    for name, runs in curves.items():
        values = [statistics.mean(run[-LAST:]) for run in runs]
        cells = " | ".join(f"{value:.2%}" for value in [statistics.mean(values), *values])
        rows.append(f"| {name} | {cells} |")
    return rows


def plot(curves: dict[str, list[list[float]]], path: str) -> None:
    """Draw the mean over the seeds, epoch by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, runs in curves.items():
        axes.plot(np.arange(EVERY, EPOCHS + 1, EVERY), 100 * np.mean(runs, axis=0), label=name)
    axes.set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(80, 100))
    axes.grid(alpha=0.3)
    axes.legend(title="augmentation")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the curves")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, too")
    arguments = parser.parse_args()
    curves: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for seed in SEEDS:
        for name, maker in WAYS.items():
            start = time.perf_counter()
            curves[name].append(accuracies(maker, seed))
            accuracy, seconds = curves[name][-1][-1], time.perf_counter() - start
            print(f"seed {seed}, {name}: {accuracy:.2%}, {seconds:.0f} s", flush=True)
    lines = table(curves)
    print("\n".join(lines))
    if arguments.plot:
        plot(curves, arguments.plot)
    if arguments.write:
        write_section("augmentation quality", [machine(), "", *lines])


if __name__ == "__main__":
    main()
