"""Several models at once: cross-validate, all folds in parallel, and let their models vote.

    python examples/train_separately.py                 # a fold on each GPU; on each core without
    python examples/train_separately.py --devices 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse
import functools
import os

import keras
import numpy as np

import keras_multigpu as kmg


def load():
    """Handwritten digits, and a tenth of them that no fold gets."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return model_selection.train_test_split(
        images, labels, test_size=0.1, stratify=labels, random_state=0
    )


# --8<-- [start:fold]
def train_fold(fold, folds, epochs):
    """Train on all folds but one; the model, and how good it was on that one."""
    keras.utils.set_random_seed(fold)
    x, _, y, _ = load()
    held_out = np.arange(len(x)) % folds == fold
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    history = model.fit(
        x[~held_out],
        y[~held_out],
        validation_data=(x[held_out], y[held_out]),
        batch_size=64,
        epochs=epochs,
        verbose=2,
    )
    return {"model": model, "val_accuracy": history.history["val_accuracy"]}


# --8<-- [end:fold]


def draw(curves, together, path):
    """The validation accuracy of each fold, and what all models reach together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for fold, curve in enumerate(curves):
        axes.plot(range(1, len(curve) + 1), curve, label=f"fold {fold}")
    axes.axhline(together, color="#24292f", linestyle="--", label="all models, on new digits")
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy on the fold held out")
    axes.set_title("Each fold on a device of its own", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(folds=4, epochs=8, devices=None, picture="train_separately.png"):
    """Train all folds; returns the accuracy of their models together, on digits new to all."""
    # --8<-- [start:together]
    jobs = [functools.partial(train_fold, fold, folds, epochs) for fold in range(folds)]
    results = kmg.train_separately(jobs, devices=devices)

    for result in results:
        print(
            result.name, "reached", f"{result.value['val_accuracy'][-1]:.3f}", "on", result.device
        )
    # --8<-- [end:together]

    # --8<-- [start:ensemble]
    _, x_new, _, y_new = load()
    votes = sum(result.value["model"].predict(x_new, verbose=0) for result in results)
    together = float(np.mean(votes.argmax(axis=1) == y_new))
    print(f"together: {together:.3f}")
    # --8<-- [end:ensemble]
    draw([result.value["val_accuracy"] for result in results], together, picture)
    print(f"See {picture}.")
    return together


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--devices", type=int, help="default: all GPUs, or all cores")
    main(**vars(parser.parse_args()))
