"""Watch each replica: whose data differs, which one is slow, where the time goes.

    python examples/watch_each_replica.py                  # all GPUs, or one CPU
    python examples/watch_each_replica.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse

import keras
import numpy as np
from draw_callbacks import draw_replicas, draw_throughput

import keras_multigpu as kmg


# --8<-- [start:data]
def load_digits():
    """Handwritten digits. In every batch of 64, the second half has noise on it."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = images[:1792].reshape(-1, 64, 8, 8, 1).astype("float32") / 16
    noise = np.random.default_rng(0).normal(0, 0.5, images.shape).astype("float32")
    noise[:, :32] = 0
    return (images + noise).reshape(-1, 8, 8, 1), labels[:1792]


# --8<-- [end:data]


def build_model():
    """A small convnet."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# --8<-- [start:draw]
def draw(history, reports):
    """A panel for each value of the replicas, and one for the parts of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    names = ("loss", "gradient_norm", "compute_time", "examples_per_second")
    for axes, name in zip(figure.subplots(2, 2).flat, names, strict=True):
        draw_replicas(axes, history, name)
    figure.savefig("watch_each_replica.png")
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_throughput(figure.subplots(), reports)
    figure.savefig("throughput.png")


# --8<-- [end:draw]


def main(epochs=12, replicas=None):
    """Train and watch; returns the accuracy of the first replica's examples."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    x, y = load_digits()
    model = kmg.distribute(build_model(), strategy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    # --8<-- [start:watch]
    each = kmg.callbacks.ReplicaMetrics(["accuracy"])
    speed = kmg.callbacks.ThroughputReport()
    # Not shuffled, so that the second half of every batch is the second replica's.
    history = model.fit(
        x, y, batch_size=64, epochs=epochs, shuffle=False, verbose=0, callbacks=[each, speed]
    ).history
    # --8<-- [end:watch]
    draw(history, speed.reports)

    print(f"all: accuracy {history['accuracy'][-1]:.0%}")
    for replica in range(strategy.num_replicas_in_sync):
        of_replica = {
            name: history[f"replica_{replica}/{name}"][-1]
            for name in ("accuracy", "loss", "gradient_norm")
        }
        print(
            f"replica {replica}: accuracy {of_replica['accuracy']:.0%}, "
            f"loss {of_replica['loss']:.2f}, gradient norm {of_replica['gradient_norm']:.2f}"
        )
    return history["replica_0/accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
