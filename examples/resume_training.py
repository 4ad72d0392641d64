"""Stop a training in the middle of an epoch, resume it, and end as if nothing had happened.

    python examples/resume_training.py                  # all GPUs, or one CPU
    python examples/resume_training.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse
import os
import shutil
import signal

import keras
import numpy as np

import keras_multigpu as kmg


def load():
    """Handwritten digits: three quarters to train on, the rest to validate."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return model_selection.train_test_split(images, labels, stratify=labels, random_state=0)


def build_model(strategy):
    """A new compiled model, each time with the same first weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = kmg.distribute(model, strategy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# --8<-- [start:train]
def train(model, data, validation, epochs, folder, *callbacks):
    """The whole training: run it again after a stop, and it resumes."""
    checkpoint = kmg.callbacks.ResumableCheckpoint(folder, every_steps=10)
    reduce = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    return model.fit(
        data,
        validation_data=validation,
        epochs=epochs,
        callbacks=[checkpoint, reduce, *callbacks],
        verbose=0,
    )


# --8<-- [end:train]


class Steps(keras.callbacks.Callback):
    """Notes the loss of each step; ends the process after one of them, as a cluster would."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.losses = {}
        self.stop_after = stop_after

    def on_train_batch_end(self, batch, logs=None):
        """A step is done."""
        run = self.model.training_run
        self.losses[run.epoch * run.steps_per_epoch + run.step] = logs["loss"]
        if (run.epoch, run.step) == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


def draw(whole, parts, path):
    """The losses of the run that was never stopped, and over them those of the parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(whole.keys(), whole.values(), color="#c9d1d9", linewidth=7, label="never stopped")
    for number, (part, color) in enumerate(
        zip(parts, ("#0b6e99", "#d9822b", "#4c9a52"), strict=True)
    ):
        label = f"process {number + 1}"
        axes.plot(part.keys(), part.values(), color=color, linewidth=1.8, label=label)
        if number < 2:
            last = max(part)
            axes.plot(last, part[last], "X", color=color, markersize=11, markeredgecolor="white")
    axes.set_xlabel("step")
    axes.set_ylabel("loss of the epoch so far")
    axes.set_title("Stopped twice in the middle of an epoch (X)", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(epochs=8, replicas=None, folder="digits_run", picture="resume_training.png"):
    """Train with two stops and without; returns the validation accuracy."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    x, x_new, y, y_new = load()
    data = kmg.data.from_arrays(x, y, global_batch_size=64, seed=1)
    validation = kmg.data.from_arrays(x_new, y_new, global_batch_size=64)
    for old in (folder, f"{folder}_whole"):
        shutil.rmtree(old, ignore_errors=True)

    # --8<-- [start:stops]
    parts = []
    for stop_after in [(epochs // 3, 14), (epochs // 2 + 1, 5), None]:
        # As a new process would: everything is made anew.
        model, steps = build_model(strategy), Steps(stop_after)
        try:
            history = train(model, data, validation, epochs, folder, steps)
        except SystemExit as stopped:
            print("ended with status", stopped.code)
        parts.append(steps.losses)
    # --8<-- [end:stops]

    # --8<-- [start:compare]
    whole, steps = build_model(strategy), Steps()
    whole_history = train(whole, data, validation, epochs, f"{folder}_whole", steps)
    same = [
        np.array_equal(one.numpy(), other.numpy())
        for one, other in zip(whole.variables, model.variables, strict=True)
    ]
    print("weights equal bit for bit:", all(same))
    print("histories equal:", whole_history.history == history.history)
    # --8<-- [end:compare]
    draw(steps.losses, parts, picture)
    print(f"See {picture}.")
    return history.history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
