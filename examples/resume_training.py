"""Train a forecast, stop twice in mid-epoch, resume, and end as if nothing had happened.

    python examples/resume_training.py                  # all GPUs, or one CPU
    python examples/resume_training.py --replicas 2     # two GPUs, or a CPU split in two

The picture needs matplotlib: pip install matplotlib
"""

import argparse
import os
import shutil
import signal

import keras
import numpy as np

import keras_multigpu as kmg

DAY, WEEK = 24, 24 * 7


def load():
    """The electricity that a town uses each hour: a week as input, the next day as target."""
    hours = np.arange(40 * WEEK)
    day = 8 * np.sin(2 * np.pi * (hours - 9) / DAY) + 3 * np.sin(4 * np.pi * hours / DAY)
    working = 6 * (hours // DAY % 7 < 5)
    noise = np.random.default_rng(0).normal(scale=1.5, size=len(hours))
    used = 50 + hours / 500 + day * (1 + working / 20) + working + noise
    known = 30 * WEEK  # Validation forecasts the ten weeks after them.
    used = ((used - used[:known].mean()) / used[:known].std()).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(used, WEEK + DAY)
    parts = windows[: known - WEEK - DAY], windows[known:]
    return [(part[:, :WEEK, None], part[:, WEEK:]) for part in parts]


def build_model(strategy):
    """A new compiled model, each time with the same first weights."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((WEEK, 1)),
        keras.layers.Conv1D(32, DAY, strides=6, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(DAY),
    ]
    model = kmg.distribute(keras.Sequential(layers), strategy)
    model.compile("adam", "mse")
    return model


# --8<-- [start:train]
def train(model, data, validation, epochs, folder, *callbacks):
    """The whole training: run it again after a stop, and it resumes."""
    checkpoint = kmg.callbacks.ResumableCheckpoint(folder, every_steps=10)
    reduce = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    callbacks = [checkpoint, reduce, *callbacks]
    return model.fit(
        data, validation_data=validation, epochs=epochs, callbacks=callbacks, verbose=0
    )


# --8<-- [end:train]


class Steps(keras.callbacks.Callback):
    """Notes the loss of each step; ends the process after one of them, as a cluster would."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.losses, self.stop_after = {}, stop_after

    def on_train_batch_end(self, batch, logs=None):
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
    for number, color in enumerate(("#0b6e99", "#d9822b", "#4c9a52")):
        steps, losses = zip(*parts[number].items(), strict=True)
        axes.plot(steps, losses, color=color, linewidth=1.8, label=f"process {number + 1}")
        if number < 2:
            axes.plot(steps[-1], losses[-1], "X", color=color, ms=11, markeredgecolor="white")
    axes.set(xlabel="step", ylabel="loss of the epoch so far", yscale="log")
    axes.set_title("Stopped twice in the middle of an epoch (X)", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(epochs=8, replicas=None, folder="forecast_run", picture="resume_training.png"):
    """Train with two stops and without; the share of the variance that the forecast explains."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    (x, y), (x_new, y_new) = load()
    data = kmg.data.from_arrays(x, y, global_batch_size=128, seed=1)
    validation = kmg.data.from_arrays(x_new, y_new, global_batch_size=128)
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
    pairs = zip(whole.variables, model.variables, strict=True)
    same = [np.array_equal(one.numpy(), other.numpy()) for one, other in pairs]
    print("weights equal bit for bit:", all(same))
    print("histories equal:", whole_history.history == history.history)
    # --8<-- [end:compare]
    draw(steps.losses, parts, picture)
    explained = 1 - history.history["val_loss"][-1] / np.var(y_new)
    print(f"The forecast explains {explained:.0%} of the variance. See {picture}.")
    return float(explained)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
