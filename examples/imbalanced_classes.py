"""Train on classes of very different sizes, with and without `balance`.

    python examples/imbalanced_classes.py                  # all GPUs, or one CPU
    python examples/imbalanced_classes.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse
import os

import keras
import numpy as np

import keras_multigpu as kmg

RARE = {3: 8, 8: 8, 9: 8}  # How many images of these digits are left to train on.


def load():
    """Handwritten digits, half of them to test on; of three digits few remain in the other half."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_new, y, y_new = model_selection.train_test_split(
        images, labels, test_size=0.5, stratify=labels, random_state=0
    )
    kept = np.concatenate([np.flatnonzero(y == digit)[: RARE.get(digit)] for digit in range(10)])
    return x[kept], y[kept], x_new, y_new


def build_model():
    """A new compiled model, each time with the same first weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def recalls(model, x, y):
    """For each digit: which share of its images the model recognises."""
    answers = model.predict(x, verbose=0).argmax(axis=1)
    return np.array([np.mean(answers[y == digit] == digit) for digit in range(10)])


def draw(found, counts, path):
    """A group of bars for each digit: its recall in each of the ways to train."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    colors = ("#b9c2cc", "#e0a030", "#0b6e99")
    for number, (balance, recall) in enumerate(found.items()):
        label, left = f"{balance!r}: mean {recall.mean():.0%}", number * 0.27 - 0.27
        axes.bar(np.arange(10) + left, recall, 0.25, color=colors[number], label=label)
    ticks = [f"{digit}\n{count}" for digit, count in counts.items()]
    axes.set_xticks(range(10), ticks)
    for digit in RARE:
        axes.axvspan(digit - 0.5, digit + 0.5, color="#fdf3dc", zorder=0)
    axes.set_xlabel("digit, and how many images of it there were to train on")
    axes.set_ylabel("recall on new images")
    axes.set_title("How many of each digit's new images are recognised", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="balance", loc="outside right center", frameon=False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(epochs=15, replicas=None, picture="imbalanced_classes.png"):
    """Train in three ways; returns the mean recall with `balance="oversample"`."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    x, y, x_new, y_new = load()

    # --8<-- [start:data]
    train = kmg.data.from_arrays(x, y, global_batch_size=32)
    print(train.class_counts)
    # --8<-- [end:data]

    # --8<-- [start:train]
    found = {}
    for balance in (None, "class_weight", "oversample"):
        batches = train.with_(balance=balance)
        print(batches)
        model = kmg.distribute(build_model(), strategy)
        model.fit(batches, epochs=epochs, verbose=0)
        found[balance] = recalls(model, x_new, y_new)
    # --8<-- [end:train]

    print("digit       ", *(f"{digit:4}" for digit in range(10)), " mean")
    for balance, recall in found.items():
        cells = [f"{value:4.0%}" for value in recall]
        print(f"{balance!s:12}", *cells, f"{recall.mean():5.0%}")
    draw(found, train.class_counts, picture)
    print(f"See {picture}.")
    return float(found["oversample"].mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
