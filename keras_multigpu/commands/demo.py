"""`keras-multigpu demo`: trains on two replicas, and compares them with one device."""

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from keras_multigpu.commands import demo_picture
from keras_multigpu.commands.demo_cases import Results
from keras_multigpu.commands.demo_cases import ours_is_one_device
from keras_multigpu.commands.demo_comparison import Comparison
from keras_multigpu.commands.demo_comparison import table
from keras_multigpu.commands.demo_digits import SIZE
from keras_multigpu.commands.demo_digits import write_digits

CLOSING = """
All start from the same weights and see the same batches of images, shuffled anew in each epoch. So
two replicas should end where one device does, but for rounding (about 1e-06). Stock Keras averages
the means of two replicas though one has fewer examples, gives each its own BatchNorm statistics,
and one without examples makes NaN. That its numbers are sometimes better is luck: they are not
those of one device. keras_multigpu ran with `kmg.distribute(model, sync_batch_norm=True)`.

{picture}

Next, ask whether a model of your own trains on two and on four replicas as on one device:
    keras-multigpu verify my_package.models:build_model --data my_package.data:load
or start from the script that trained the convnet above: it is in `keras_multigpu.commands.demo`.
"""


def train_digits(folder: Path) -> None:
    """An ordinary Keras script; the lines marked `+` read the images and spread it over replicas.

    Args:
        folder: Images, those of each class in a folder of their own.
    """
    import keras

    import keras_multigpu as kmg  # +

    two_replicas = kmg.strategy(devices=2)  # +
    digits = kmg.data.from_directory(  # +
        folder, color_mode="grayscale", image_size=SIZE, replica_batch_size=32
    )
    train, validation = digits.for_replicas(2).split(0.2)  # +
    print(f"Training:   {train}\nValidation: {validation}\n")

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = kmg.distribute(model, two_replicas)  # +
    rate = keras.optimizers.schedules.CosineDecay(0.004, decay_steps=15 * len(train))
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(train, epochs=15, validation_data=validation)
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    count = validation.num_examples
    print(f"\nValidation accuracy: {scores['accuracy']:.4f} on {count} new digits.\n")


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train on two replicas and compare them with one device; about a minute",
        description="Train a small convnet on a folder of drawn digits on two replicas, "
        "then compare one device, two replicas with this package and two with stock Keras. Needs "
        "no GPU and no network.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("demo_results"),
        help="where the picture goes (default: demo_results)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, draw."""
    with tempfile.TemporaryDirectory() as name, Comparison(Path(name)) as comparison:
        digits = Path(name)
        write_digits(digits)
        # It takes longest, so it runs in the background from the beginning.
        comparison.start("stock")
        hide_a_lone_gpu()
        print("1. A convnet learns digits, a folder of PNG files, on two replicas.\n")
        train_digits(digits)
        print("2. Small trainings whose batches cannot be shared evenly, on one device and on two")
        print("   replicas, with this package and with stock Keras. Please wait ...\n")
        comparison.start("one")
        comparison.start("ours")
        results = comparison.results()
    print(table(results))
    print(CLOSING.format(picture=picture_of(results, arguments.folder / "loss_curves.png")))
    if ours_is_one_device(results):
        return 0
    print("keras_multigpu did not do as one device does on this machine. Please report the table.")
    return 1


def picture_of(results: Results, path: Path) -> str:
    """Draw the curves, if that is possible; a sentence that says where they are."""
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "There is no picture of the loss curves, because matplotlib is not installed:\n"
            "    pip install matplotlib"
        )
    return f"The loss curves are in {demo_picture.draw(results, path)}."


def hide_a_lone_gpu() -> None:
    """Two replicas need two GPUs, or none: then the CPU is split in two."""
    import tensorflow as tf

    if len(tf.config.list_physical_devices("GPU")) == 1:
        print("One GPU was found and two replicas are wanted, so the demo uses the CPU.\n")
        tf.config.set_visible_devices([], "GPU")
