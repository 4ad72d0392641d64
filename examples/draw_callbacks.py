"""Draw what callbacks found: the finders, each replica, and the time of a step.

    python examples/draw_callbacks.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn matplotlib
"""

import argparse

import keras
import numpy as np
from train_on_replicas import build_model, load_digits

import keras_multigpu as kmg


# --8<-- [start:draw]
def draw_replicas(axes, history, name):
    """A value that `ReplicaMetrics` measures, of each replica, in each epoch."""
    for key in history:
        if key.startswith("replica_") and key.endswith(f"/{name}"):
            axes.plot(history[key], "-o", markersize=3, label=key.split("/")[0])
    axes.set(xlabel="epoch", ylabel=name)
    axes.legend()


def draw_throughput(axes, reports):
    """How many milliseconds each part of a step took, from `ThroughputReport.reports`."""
    reports = [report for report in reports if report.steps]
    epochs, below = [report.epoch for report in reports], np.zeros(len(reports))
    for part in reports[0].parts:
        heights = np.array([1e3 * report.parts[part] / report.steps for report in reports])
        axes.bar(epochs, heights, bottom=below, label=part)
        below += heights
    axes.set(xlabel="epoch", ylabel="milliseconds a step")
    axes.legend()


def draw_rates(axes, finder):
    """The loss of the next batch after each rate that `LearningRateFinder` tried."""
    axes.semilogx(finder.curve.rates, finder.curve.losses, alpha=0.3)
    axes.semilogx(finder.curve.rates, finder.curve.smoothed)
    axes.axvline(finder.suggested_rate, linestyle="--", label=f"{finder.suggested_rate:.2g}")
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(0, 2 * finder.curve.smoothed[0]))
    axes.legend(title="suggested")


def draw_sizes(axes, finder):
    """The speed of each size that fitted into memory, from `BatchSizeFinder.tries`."""
    fitted = sorted((one.replica_batch_size, one.seconds) for one in finder.tries if one.fits)
    sizes, seconds = np.transpose(fitted)
    axes.semilogx(sizes, sizes / seconds, "-o", base=2)
    axes.set(xlabel="examples on each replica", ylabel="examples a second and replica")


# --8<-- [end:draw]


def main(epochs=8, replicas=None, path="callbacks.png"):
    """Search, train and draw; returns the validation accuracy."""
    from matplotlib.figure import Figure

    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    x, x_new, y, y_new = load_digits()
    model = kmg.distribute(build_model(), strategy)
    sgd = keras.optimizers.SGD(0.1)
    model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
    rates = kmg.callbacks.LearningRateFinder(1e-4)
    sizes = kmg.callbacks.BatchSizeFinder(None, maximum=256)
    each, speed = kmg.callbacks.ReplicaMetrics(), kmg.callbacks.ThroughputReport()
    callbacks = [sizes, rates, each, speed]
    history = model.fit(
        x, y, 64, epochs, verbose=0, validation_data=(x_new, y_new), callbacks=callbacks
    ).history

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    draw_rates(panels[0, 0], rates)
    draw_sizes(panels[0, 1], sizes)
    draw_replicas(panels[1, 0], history, "gradient_norm")
    draw_throughput(panels[1, 1], speed.reports)
    figure.savefig(path)
    print(f"See {path}.")
    return history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
