"""Large batches: a learning rate that fits them, a warm-up, and batches that grow.

    python examples/scale_batch_and_warm_up.py                  # all GPUs, or one CPU
    python examples/scale_batch_and_warm_up.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse
import os

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup

RATE = 0.02  # Good for batches of 32.


def load():
    """Handwritten digits of 8 x 8 pixels: the images to train with, and new ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    train, new = order[:1500], order[1500:]
    return images[train], digits.target[train], images[new], digits.target[new]


def build_model():
    """A small convolutional network; its rate is good for batches of 32."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    return model, {"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"]}


def train(data, callbacks, epochs, strategy):
    """Train a new model; its accuracy on new images, and the number of steps."""
    x, y, x_new, y_new, size = data
    model, compiled = build_model()
    model = kmg.distribute(model, strategy)
    model.compile(**compiled)
    batches = kmg.data.from_arrays(x, y, global_batch_size=size, seed=1)
    model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
    accuracy = model.evaluate(x_new, y_new, verbose=0, return_dict=True)["accuracy"]
    return accuracy, int(model.optimizer.iterations)


def draw(scaling, path):
    """Write the rate and the batch size of each step to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = np.arange(1, len(scaling.learning_rates) + 1)
    upper.plot(steps, scaling.learning_rates, color="#2a6f97", linewidth=2)
    upper.axhline(RATE, color="#8d99a6", linewidth=1, linestyle="--")
    upper.annotate(
        "compiled rate", (steps[-1], RATE), (0, 3), textcoords="offset points", ha="right"
    )
    upper.set_ylabel("learning rate")
    upper.set_ylim(0, None)
    lower.step(steps, scaling.batch_sizes, where="mid", color="#bc6c25", linewidth=2)
    lower.set_ylabel("global batch, examples")
    lower.set_xlabel("optimizer step")
    lower.set_ylim(0, None)
    upper.set_title("The rate of each step, and how many examples it saw", fontweight="bold")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(epochs=12, replicas=None, picture="scale_batch_and_warm_up.png"):
    """Train in four ways; returns the accuracy of the last one."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    data = load()

    # --8<-- [start:small]
    small = train((*data, 32), [], epochs, strategy)
    # --8<-- [end:small]

    # --8<-- [start:large]
    large = train((*data, 256), [], epochs, strategy)
    # --8<-- [end:large]

    # --8<-- [start:scaled]
    callbacks = [BatchSizeScaling(base_batch_size=32), LearningRateWarmup(epochs=3)]
    scaled = train((*data, 256), callbacks, epochs, strategy)
    # --8<-- [end:scaled]

    # --8<-- [start:growing]
    growth = {epochs // 3: 128, 2 * epochs // 3: 256}
    scaling = BatchSizeScaling(base_batch_size=32, schedule=growth)
    callbacks = [scaling, LearningRateWarmup(epochs=2)]
    growing = train((*data, 64), callbacks, epochs, strategy)
    # --8<-- [end:growing]

    found = {
        "batches of 32": small,
        "batches of 256": large,
        "256, scaled rate, warm-up": scaled,
        "64, then 128, then 256": growing,
    }
    for name, (accuracy, steps) in found.items():
        print(f"{name:26} {steps:4} steps  accuracy {accuracy:.1%}")
    draw(scaling, picture)
    print(f"See {picture}.")
    return float(growing[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
