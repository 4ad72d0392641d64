"""`keras-multigpu demo`: train on two replicas, and compare them with one device.

It runs on logical CPU devices, whose arithmetic is the same on every machine.
"""

import argparse
import contextlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.commands.demo_digits import SIZE, draw_digits
from keras_multigpu.pictures import new_figure, plain_axes, write_png

BATCH_SIZE = 16
EPOCHS = 8

WAYS = {
    "one": "one device",
    "ours": "two replicas, keras_multigpu",
    "stock": "two replicas, stock Keras",
}

STYLES: dict[str, dict[str, Any]] = {
    "ours": {"color": "#0b6e99", "linewidth": 2, "marker": "o", "markersize": 5},
    "stock": {"color": "#d1495b", "linewidth": 2, "linestyle": "--", "marker": "s"},
}

ROUNDING = 1e-4
"""The relative difference allowed. Another order of float32 sums costs 1e-6, stock Keras 1e-2."""

CLOSING = """
All trainings start from the same weights and see the same batches, reshuffled in each epoch. So two
replicas should end where one device does, up to rounding (about 1e-06). Stock Keras averages the
means of both replicas even if one has fewer examples, keeps separate BatchNorm statistics on each,
and gets NaN from a replica without examples. If its numbers look better, that is luck: they are not
those of one device.

{picture}

Next, check whether your own model trains on two and on four replicas as on one device:
    keras-multigpu verify my_package.models:build_model --data my_package.data:load
"""


class Case(NamedTuple):
    """A small training with a batch that two replicas cannot share evenly."""

    title: str
    batches: str
    convolutions: bool
    batch_norm: bool
    examples: int


CASES = (
    Case("convnet", "101 digits: the last batch has 5", True, False, 101),
    Case("convnet with BatchNorm", "101 digits: the last batch has 5", True, True, 101),
    Case("dense net with BatchNorm", "97 digits: the last batch has 1", False, True, 97),
)


class Result(NamedTuple):
    """The losses of a training, and how it ended; `error` is set if it failed."""

    losses: list[float]
    accuracy: float | None
    weights: np.ndarray
    error: str = ""


Results = dict[str, list[Result]]
"""The results of all cases, for each way of training."""


def compare() -> Results:
    """Train each case in each way, and print how it ended."""
    import keras
    import tensorflow as tf

    import keras_multigpu as kmg

    # Optimising the graphs takes longer than such short trainings.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    two_replicas = kmg.strategy(devices=2)
    digits = kmg.data.from_arrays(*draw_digits(), global_batch_size=BATCH_SIZE)
    training, validation = digits.split(0.2)
    results: Results = {way: [] for way in WAYS}
    width = max(map(len, WAYS.values()))
    print(f"{'':{width + 4}}final loss  accuracy  weights differ by")
    for case in CASES:
        print(f"{case.title}, {case.batches} (of {BATCH_SIZE})", flush=True)
        some = training.take(case.examples)
        for way, label in WAYS.items():
            with two_replicas.scope() if way == "stock" else contextlib.nullcontext():
                model = build(case)
                if way == "ours":
                    model = kmg.distribute(model, two_replicas)
                model.compile(
                    keras.optimizers.SGD(0.05, momentum=0.9),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=["accuracy"],
                )
            data: Any = (some, None, validation)
            if way != "ours":
                # Stock Keras needs datasets; these have the same batches in each epoch.
                data = (some.epochs(), len(some), validation.evaluation().epoch(0))
            results[way].append(train(model, *data))
            columns = row(results[way][-1], results["one"][-1], way == "one")
            print(f"  {label:{width}}  {columns}", flush=True)
    return results


def build(case: Case) -> Any:
    """A new model with the same initial weights each time."""
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    norm = [layers.BatchNormalization()] if case.batch_norm else []
    if case.convolutions:
        first = [layers.Conv2D(16, 3, padding="same"), *norm, layers.Activation("gelu")]
        first += [layers.Conv2D(32, 3, strides=2), layers.Activation("gelu"), layers.Flatten()]
    else:
        first = [layers.Flatten(), layers.Dense(64), *norm, layers.Activation("gelu")]
    inputs = [keras.Input((*SIZE, 1)), layers.Rescaling(1 / 255)]
    return keras.Sequential([*inputs, *first, layers.Dense(10)])


def train(model: Any, x: Any, steps: int | None, validation: Any) -> Result:
    import keras

    history = keras.callbacks.History()
    try:
        with warnings.catch_warnings(action="ignore"):  # Stock Keras warns about the data.
            model.fit(x, steps_per_epoch=steps, epochs=EPOCHS, verbose=0, callbacks=[history])
            scores = model.evaluate(validation, verbose=0, return_dict=True)
    except Exception as error:  # Stock Keras may raise anything.
        losses = getattr(history, "history", {}).get("loss", [])
        return Result(losses, None, np.zeros(0), type(error).__name__)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return Result(history.history["loss"], scores["accuracy"], weights)


def weights_differ_by(one: Result, other: Result) -> float:
    """The largest difference between two weights, relative to the largest weight."""
    return float(np.abs(one.weights - other.weights).max() / np.abs(one.weights).max())


def ours_is_one_device(results: Results) -> bool:
    """Whether this package got the weights of one device, except for rounding."""
    return all(
        not ours.error and weights_differ_by(one, ours) < ROUNDING
        for one, ours in zip(results["one"], results["ours"], strict=True)
    )


def row(result: Result, one: Result, is_one: bool) -> str:
    if result.error:
        after = f" in epoch {len(result.losses) + 1}" if len(result.losses) < EPOCHS else ""
        return f"failed{after}: {result.error}"
    difference = "-" if is_one else f"{weights_differ_by(one, result):.0e}"
    return f"{result.losses[-1]:>10.4f}  {result.accuracy:>8.1%}  {difference:>17}"


def distances(losses: list[float], ones: list[float]) -> np.ndarray:
    """The relative distance of each epoch's loss from that of one device."""
    ones = ones[: len(losses)]
    # Equal losses are drawn at the last digit of float32, as the axis is logarithmic.
    return np.maximum(np.abs(np.subtract(losses, ones)) / np.abs(ones), np.finfo("f4").eps)


def picture_of(results: Results, path: Path) -> str:
    """Draw how far replicas are from one device; return a sentence about the picture."""
    try:
        figure = new_figure((13, 4.5))
    except ImportError:
        return (
            "There is no picture of the losses, because matplotlib is not installed:\n"
            "    pip install matplotlib"
        )
    axes = figure.subplots(1, len(CASES), sharey=True)
    for index, (case, panel) in enumerate(zip(CASES, axes, strict=True)):
        panel.axhspan(1e-8, ROUNDING, color="#e8edf1")
        for way, style in STYLES.items():
            losses = results[way][index].losses
            apart = distances(losses, results["one"][index].losses)
            panel.plot(range(1, len(losses) + 1), apart, label=WAYS[way], **style)
        if missing := EPOCHS - int(np.isfinite(results["stock"][index].losses).sum()):
            note = f"stock Keras: {results['stock'][index].error or 'NaN'}"
            panel.set_xlabel(f"{note} from epoch {EPOCHS - missing + 1}", color="#d1495b")
        else:
            panel.set_xlabel("epoch")
        panel.set(xlim=(0.5, EPOCHS + 0.5), ylim=(1e-8, 10), yscale="log")
        panel.set_title(f"{case.title}\n{case.batches}", fontsize=11)
        plain_axes(panel)
    axes[0].set_ylabel("distance of the loss from one device")
    axes[0].text(0.7, 2e-8, "float32 rounding", color="#5b6b77")
    axes[0].legend(frameon=False, loc="upper left")
    figure.suptitle(
        "Two replicas with keras_multigpu stay within rounding of one device; stock Keras does not",
        fontsize=15,
        fontweight="bold",
    )
    write_png(figure, path)
    return f"The picture of how far the losses are from those of one device is {path}."


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train on two replicas and compare them with one device; half a minute",
        description="Train small models on drawn digits, on one device, and on two replicas with "
        "this package and with stock Keras. Needs no GPU and no network.",
    )
    where = "where the picture goes (default: demo_results)"
    parser.add_argument("--folder", type=Path, default=Path("demo_results"), help=where)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import tensorflow as tf

    import keras_multigpu as kmg

    tf.config.set_visible_devices([], "GPU")
    kmg.strategy(devices=2)  # Splits the CPU before TensorFlow's first operation.
    print("Small networks learn digits, in batches that two replicas cannot share evenly.\n")
    results = compare()
    print(
        CLOSING.format(
            picture=picture_of(results, arguments.folder / "distance_from_one_device.png")
        )
    )
    if ours_is_one_device(results):
        return 0
    print("On this machine keras_multigpu did not match one device. Please report the table.")
    return 1
