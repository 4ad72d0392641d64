"""Validation accuracy with this package's augmentation, with that of Keras, and with none.

    python tests/benchmarks/quality_of_augmentation.py                     the tables
    python tests/benchmarks/quality_of_augmentation.py photographs         one of them
    python tests/benchmarks/quality_of_augmentation.py --plot curves.png   and a picture
    python tests/benchmarks/quality_of_augmentation.py --write             into README.md here

A small network learns handwritten digits, those that scikit-learn ships, from 100 images, and is
judged by the other 1,697. Then it learns which of ten photographs a tile of 32x32 pixels is from.
The augmentation is part of the model in all cases, and draws from the same ranges. For each seed,
all start with the same weights and have the same images.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from photographs import originals
from report import machine, write_section

from keras_multigpu import augmentation

SEEDS = (3, 4, 5)
"""Sizes, epochs and ranges were chosen with two other seeds, 0 and 1."""

BATCH = 25
LAST = 5
"""How many of the last measurements are averaged."""

Data = tuple[np.ndarray, np.ndarray]
Maker = Callable[[], keras.Layer]

# Digits.

DIGIT, DIGITS = 16, 100
"""The side of a digit, and how many there are to learn from."""

GEOMETRY = {"rotation": 0.03, "translation": 0.06, "zoom": 0.1, "shear": 0.1}
COLOR = {"brightness": 0.1, "contrast": 0.2}
"""Digits are not mirrored: a mirrored 2 is not a 2."""

BLACK = {"fill_mode": "constant", "fill_value": 0.0}


def six_layers() -> keras.Layer:
    """The layers of Keras for digits."""
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
    """The same with this package."""
    return augmentation.Sequence(
        [
            augmentation.RandomGeometry(**GEOMETRY, **BLACK),
            augmentation.RandomColor(**COLOR),
        ]
    )


def digits(seed: int) -> tuple[Data, Data]:
    """Training and validation data, `uint8` images of 16x16."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images[..., None].astype(np.float32) * (255 / 16)
    images = keras.ops.image.resize(images, (DIGIT, DIGIT), interpolation="bicubic")
    images = np.clip(np.round(images), 0, 255).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(images))
    training, validation = np.split(order, [DIGITS])
    return (images[training], data.target[training]), (images[validation], data.target[validation])


# Photographs.

SIDE, TILE = 384, 32
"""The shorter side of a photograph, and the side of the tiles that it is cut into."""

TILES_TO_LEARN, TILES_TO_JUDGE = 10, 120
"""Of each photograph."""


def guide() -> keras.Layer:
    """What `recipe("standard")` does, with Keras's layers."""
    layers = keras.layers
    return layers.Pipeline(
        [
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(0.15),
            layers.RandomTranslation(0.1, 0.1),
            layers.RandomContrast(0.1, value_range=(0, 255)),
        ]
    )


def tiles(seed: int) -> tuple[Data, Data]:
    """Training and validation data: tiles, which do not overlap, and of which photograph."""
    import skimage.data

    found = originals() | {
        "hubble_deep_field": skimage.data.hubble_deep_field(),
        "motorcycle": skimage.data.stereo_motorcycle()[0],
    }
    random = np.random.default_rng(seed)
    parts = []
    for name in sorted(found):
        cut = tiles_of(found[name])
        parts.append(cut[random.permutation(len(cut))[: TILES_TO_LEARN + TILES_TO_JUDGE]])
    each = np.stack(parts)
    learnt, judged = np.split(each, [TILES_TO_LEARN], axis=1)
    return with_labels(learnt), with_labels(judged)


def tiles_of(photograph: np.ndarray) -> np.ndarray:
    """All tiles of a photograph, `uint8[n, 32, 32, 3]`."""
    from PIL import Image

    rows, columns = photograph.shape[:2]
    scale = SIDE / min(rows, columns)
    down, across = (round(length * scale) // TILE for length in (rows, columns))
    size = (round(columns * scale), round(rows * scale))
    image = np.asarray(Image.fromarray(photograph).resize(size, Image.Resampling.BICUBIC))
    grid = image[: down * TILE, : across * TILE].reshape(down, TILE, across, TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, TILE, TILE, 3)


def with_labels(each: np.ndarray) -> Data:
    """The tiles of all photographs in one array, and the number of each one's photograph."""
    photographs, number = each.shape[:2]
    return each.reshape(-1, *each.shape[2:]), np.repeat(np.arange(photographs), number)


# Training.


class Comparison(NamedTuple):
    """A data set, and the augmentations that are compared on it."""

    data: Callable[[int], tuple[Data, Data]]
    filters: tuple[int, ...]
    epochs: int
    every: int
    """Epochs between two measurements of accuracy."""
    ways: dict[str, Maker]


COMPARISONS = {
    "digits": Comparison(
        digits,
        (32, 64),
        200,
        5,
        {
            "none": keras.layers.Identity,
            "Keras, six layers": six_layers,
            "RandomGeometry, RandomColor": fused,
        },
    ),
    "photographs": Comparison(
        tiles,
        (16, 32, 64),
        100,
        10,
        {
            "none": keras.layers.Identity,
            "Keras, four layers": guide,
            'recipe("standard")': lambda: augmentation.recipe("standard"),
        },
    ),
}


def network(shape: tuple[int, ...], widths: tuple[int, ...]) -> keras.Model:
    """A small convolutional network, without the augmentation."""
    layers = keras.layers
    blocks = [
        layer
        for filters in widths
        for layer in (
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
        )
    ]
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Rescaling(1 / 255),
            *blocks,
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


def accuracies(comparison: Comparison, maker: Maker, seed: int) -> list[float]:
    """The validation accuracy, every few epochs."""
    keras.utils.set_random_seed(seed)
    training, validation = comparison.data(seed)
    shape = training[0].shape[1:]
    # Before the augmentation, whose draws would change the first weights.
    inside = network(shape, comparison.filters)
    model = keras.Sequential([keras.Input(shape), maker(), inside])
    steps = comparison.epochs * -(-len(training[0]) // BATCH)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        *training,
        batch_size=BATCH,
        epochs=comparison.epochs,
        verbose=0,
        validation_data=validation,
        validation_batch_size=800,
        validation_freq=comparison.every,
    )
    return history.history["val_accuracy"]


Curves = dict[str, list[list[float]]]
"""The accuracies of each seed, by the name of the augmentation."""


def trained(name: str) -> Curves:
    """Train everything of a comparison."""
    comparison = COMPARISONS[name]
    curves: Curves = {way: [] for way in comparison.ways}
    for seed in SEEDS:
        for way, maker in comparison.ways.items():
            start = time.perf_counter()
            curves[way].append(accuracies(comparison, maker, seed))
            accuracy, seconds = curves[way][-1][-1], time.perf_counter() - start
            print(f"{name}, seed {seed}, {way}: {accuracy:.2%}, {seconds:.0f} s", flush=True)
    return curves


# What is shown.


def table(found: dict[str, Curves]) -> list[str]:
    """A row for each augmentation: accuracy on average, and for the worst and the best seed."""
    rows = ["| data | augmentation | accuracy (range of seeds) |", "|" + "---|" * 3]
    for name, curves in found.items():
        for way, runs in curves.items():
            values = [statistics.mean(run[-LAST:]) for run in runs]
            mean, low, high = statistics.mean(values), min(values), max(values)
            rows.append(f"| {name} | {way} | {mean:.1%} ({low:.1%}–{high:.1%}) |")
    return rows


def plot(found: dict[str, Curves], path: str) -> None:
    """Draw the means over the seeds, epoch by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(found), 4), layout="constrained")
    for axes, (name, curves) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        for way, runs in curves.items():
            means = 100 * np.mean(runs, axis=0)
            axes.plot(COMPARISONS[name].every * np.arange(1, len(means) + 1), means, label=way)
        axes.set(title=name, xlabel="epoch", ylabel="validation accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(title="augmentation")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train all, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMPARISONS)}; all without")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves")
    parser.add_argument("--write", action="store_true", help="write README.md, too")
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write needs all comparisons.")
    found = {name: trained(name) for name in arguments.names or COMPARISONS}
    lines = table(found)
    print(machine(), *lines, sep="\n")
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.write:
        write_section("augmentation quality", lines)


if __name__ == "__main__":
    main()
