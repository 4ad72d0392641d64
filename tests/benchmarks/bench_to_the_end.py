"""Whole trainings to their accuracy: one device, N replicas, and stock Keras on N replicas.

    python tests/benchmarks/bench_to_the_end.py band        is a difference more than rounding?
    python tests/benchmarks/bench_to_the_end.py accuracy    dropout and augmentation, five seeds
    ... --write                                             into the page, with its picture

Handwritten digits, those that scikit-learn ships, are learned by a convnet with BatchNormalization
and by a small transformer, from 300 of them in batches of 64: 8 digits on each of 8 replicas. The
last batch of an epoch has 44; the other 1,497 digits are the test. All sides see the same batches
and start with the same weights.

The band: rounding depends on the order in which a batch's rows are added, which no framework
promises. So one device trains again, several times, with the rows of each batch in another order.
How far these trainings are from the first is what rounding alone does, and how far N replicas are
can be compared with it. Augmentation and dropout are off there, as their draws belong to rows.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import MEASURE, main, measures, split_cpu
from scipy import stats

import keras_multigpu as kmg
from keras_multigpu import pictures

EXAMPLES, BATCH, EPOCHS, SEEDS = 300, 64, 60, 5
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 300)
"""Where the band is measured; the last is the end: 60 epochs of 5 batches."""

SIDES = {
    "one device": ("one", 1),
    **{f"{n} replicas": ("ours", n) for n in (2, 4, 8)},
    **{f"stock, {n} replicas": ("stock", n) for n in (2, 4, 8)},
}
ORDERS = 6
"""How many other orders of rows make the band."""

PICTURE = Path(__file__).parents[2] / "docs" / "how_it_works" / "images" / "band.png"

Data = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Data, Data]:
    """Those to learn from, and the others."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order].reshape(-1, 8, 8, 1) / 16).astype("float32")
    labels = labels[order].astype("int32")
    return (images[:EXAMPLES], labels[:EXAMPLES]), (images[EXAMPLES:], labels[EXAMPLES:])


def convnet(random: bool) -> keras.Model:
    """Convolutions and BatchNormalization."""
    blocks = [
        block
        for filters in (16, 32)
        for block in (
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
        )
    ]
    head = [layers.Flatten(), layers.Dropout(0.2 * random), layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *augmentation(random), *blocks, *head])


def transformer(random: bool) -> keras.Model:
    """Attention between the eight rows of a digit."""
    rate = 0.1 * random
    x = inputs = keras.Input((8, 8, 1))
    for layer in augmentation(random):
        x = layer(x)
    x = layers.Dense(32)(layers.Reshape((8, 8))(x))
    x = x + layers.Embedding(8, 32)(keras.ops.arange(8)[None])
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16, dropout=rate)(x, x))
        hidden = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(rate)(hidden))
    x = layers.Dropout(rate)(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def augmentation(random: bool) -> list[keras.Layer]:
    """Shifts and turns, drawn for each image."""
    if not random:
        return []
    return [layers.RandomTranslation(0.1, 0.1), layers.RandomRotation(0.03)]


MODELS = {"convnet": convnet, "transformer": transformer}

# In the process of one side.


def work(command: str, side: str, name: str, number: int) -> Any:
    """The accuracy and loss of a seed, or the weights at `STEPS` with an order of rows."""
    kind, replicas = SIDES[side]
    names = split_cpu(replicas)
    # With the collective operations that it would choose, eight CPU devices hang.
    sums = tf.distribute.ReductionToOneDevice()
    stock = tf.distribute.MirroredStrategy(names, sums) if kind == "stock" else None
    strategy = stock or kmg.strategy(devices=names)
    if command == "accuracy":
        return scores(trained(kind, strategy, name, seed=number), name)
    return trained(kind, strategy, name, seed=0, order=number)


def trained(kind: str, strategy: Any, name: str, seed: int, order: int | None = None) -> Any:
    """Train; the model, or with an order of rows the weights at `STEPS`."""
    keras.utils.set_random_seed(seed)
    random = order is None
    with strategy.scope() if kind == "stock" else contextlib.nullcontext():
        model = MODELS[name](random)
        model = kmg.distribute(model, strategy) if kind == "ours" else model
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, STEPS[-1])),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    weights = Weights()
    callbacks = [] if random else [weights]
    model.fit(AllBatches(seed, order), shuffle=False, verbose=0, callbacks=callbacks)
    return model if random else weights.found


class AllBatches(keras.utils.PyDataset):
    """The batches of all epochs one after another, so that sides differ in nothing but steps."""

    def __init__(self, seed: int, order: int | None) -> None:
        super().__init__()
        (self._x, self._y), _ = digits()
        self._rows: list[np.ndarray] = []
        others = np.random.default_rng(order)
        for epoch in range(EPOCHS):
            rows = np.random.default_rng([seed, epoch]).permutation(EXAMPLES)
            batches = np.split(rows, range(BATCH, EXAMPLES, BATCH))
            self._rows += [others.permutation(each) for each in batches] if order else batches

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Data:
        return self._x[self._rows[number]], self._y[self._rows[number]]


class Weights(keras.callbacks.Callback):
    """Keeps the trained weights at `STEPS`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        if step in STEPS:
            values = [v.numpy().ravel() for v in self.model.trainable_variables]
            self.found.append(np.concatenate(values).tolist())


def scores(trained: keras.Model, name: str) -> tuple[float, float]:
    """The percentage of new digits that are recognized, and their loss, on one device."""
    _, (x, y) = digits()
    model = MODELS[name](random=True)
    model.set_weights(trained.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    loss, accuracy = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return 100 * accuracy, loss


# In the process that counts.


def results_of(command: str, side: str, name: str, numbers: int) -> list[Any]:
    """What each seed, or each order of rows, gives, in processes of their own."""
    found = []
    for number in range(numbers):
        arguments = [sys.executable, __file__, MEASURE, command, side, name, str(number)]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def accuracies(rounds: int) -> Iterator[tuple[str, ...]]:
    """Means and deviations over seeds; p of a paired t-test of losses against one device."""
    for name in MODELS:
        expected: Any = None
        for side in SIDES:
            accuracies, losses = zip(*results_of("accuracy", side, name, SEEDS), strict=True)
            print(side, file=sys.stderr, flush=True)
            p = f"{stats.ttest_rel(losses, expected).pvalue:.2f}" if expected else ""
            expected = expected or losses
            yield name, side, mean_of(accuracies, 2), mean_of(losses, 4), p


def mean_of(values: tuple[float, ...], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def band(rounds: int) -> Iterator[tuple[str, ...]]:
    """Distances from the first training of one device, relative to its weights."""
    distances = {name: distances_of(name) for name in MODELS}
    for name, sides in distances.items():
        for step in (1, 100, STEPS[-1]):
            at = {side: rows[:, STEPS.index(step)] for side, rows in sides.items()}
            orders = at.pop("one device")
            found = (f"{distance[0]:.1e}" for distance in at.values())
            yield name, str(step), f"{orders.min():.1e} to {orders.max():.1e}", *found
    draw(distances)


def distances_of(name: str) -> dict[str, np.ndarray]:
    """For each side, and each order of rows, the distance at each step."""
    found = {
        side: np.array(results_of("band", side, name, 1 + ORDERS if kind == "one" else 1))
        for side, (kind, _) in SIDES.items()
    }
    first, found["one device"] = found["one device"][0], found["one device"][1:]
    size = np.linalg.norm(first, axis=-1)
    return {side: np.linalg.norm(each - first, axis=-1) / size for side, each in found.items()}


def draw(distances: dict[str, dict[str, np.ndarray]]) -> None:
    """The band, N replicas and stock Keras by step."""
    figure = pictures.new_figure((9, 3.8))
    for axes, (name, sides) in zip(
        figure.subplots(1, 2, sharey=True), distances.items(), strict=True
    ):
        pictures.plain_axes(axes)
        band = sides["one device"]
        label = "one device, rows in another order"
        axes.fill_between(
            STEPS, band.min(0), band.max(0), color=pictures.GREY, alpha=0.3, label=label
        )
        for side, rows in sides.items():
            if side != "one device":
                color = "#c8553d" if side.startswith("stock") else "#2a7f62"
                style = {"2": "-", "4": "--", "8": ":"}[side.split(" replicas")[0][-1]]
                axes.plot(STEPS, rows[0], style, color=color, label=side)
        axes.set(xscale="log", yscale="log", title=name, xlabel="step")
    figure.axes[0].set_ylabel("distance of the weights from one device's")
    figure.axes[0].legend(fontsize=7, frameon=False, loc="center right")
    pictures.write_png(figure, PICTURE)


if __name__ == "__main__":
    if chosen := measures():
        *what, number = chosen
        print(json.dumps(work(*what, int(number))))
    else:
        of_stock = "stock, 2 | 4 | 8"
        tables = {
            "band": (f"model | step | rounding alone | 2 replicas | 4 | 8 | {of_stock}", band),
            "accuracy": ("model | trained on | accuracy, % | loss | p", accuracies),
        }
        main(__doc__, tables)
