"""`keras-multigpu demo`: trains on two replicas, and compares them with one device."""

import argparse
from pathlib import Path
from typing import Any

from keras_multigpu.commands import demo_picture
from keras_multigpu.commands.demo_cases import ours_is_one_device
from keras_multigpu.commands.demo_comparison import Comparison
from keras_multigpu.commands.demo_comparison import table
from keras_multigpu.commands.demo_digits import Digits
from keras_multigpu.commands.demo_digits import load_digits
from keras_multigpu.commands.usage import require_package

CLOSING = """
All start from the same weights and see the same batches, so two replicas should end where one
device does, but for rounding (about 1e-06). Stock Keras averages the means of two replicas though
one has fewer examples, gives each its own BatchNorm statistics, and one without examples makes
NaN. That its numbers are sometimes better is luck: they are not those of one device. keras_multigpu
ran with `kmg.distribute(model, sync_batch_norm=True)`.

The loss curves are in {picture}.

Next, ask whether a model of your own trains on two and on four replicas as on one device:
    keras-multigpu verify my_package.models:build_model --data my_package.data:load
or start from the script that trained the convnet above: it is in `keras_multigpu.commands.demo`.
"""


def train_digits(digits: Digits) -> float:
    """An ordinary Keras script; the three lines marked `+` spread it over two replicas."""
    import keras

    import keras_multigpu as kmg  # +

    two_replicas = kmg.strategy(devices=2)  # +

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = kmg.distribute(model, two_replicas)  # +
    rate = keras.optimizers.schedules.CosineDecay(0.004, decay_steps=345)
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(*digits.training, batch_size=64, epochs=15, validation_data=digits.validation)
    return model.evaluate(*digits.validation, verbose=0, return_dict=True)["accuracy"]


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train on two replicas and compare them with one device; about a minute",
        description="Train a small convnet on scikit-learn's handwritten digits on two replicas, "
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
    require_package("sklearn", "scikit-learn")
    require_package("matplotlib", "matplotlib")
    with Comparison() as comparison:
        # It takes longest, so it runs in the background from the beginning.
        comparison.start("stock")
        hide_a_lone_gpu()
        digits = load_digits()
        print(
            f"1. A convnet learns {len(digits.training[0])} handwritten digits on two replicas.\n"
        )
        accuracy = train_digits(digits)
        print(f"\nValidation accuracy: {accuracy:.4f} on {len(digits.validation[0])} new digits.\n")
        print("2. Small trainings whose batches cannot be shared evenly, on one device and on two")
        print("   replicas, with this package and with stock Keras. Please wait ...\n")
        comparison.start("one")
        comparison.start("ours")
        results = comparison.results()
    print(table(results))
    picture = demo_picture.draw(results, arguments.folder / "loss_curves.png")
    print(CLOSING.format(picture=picture))
    if ours_is_one_device(results):
        return 0
    print("keras_multigpu did not do as one device does on this machine. Please report the table.")
    return 1


def hide_a_lone_gpu() -> None:
    """Two replicas need two GPUs, or none: then the CPU is split in two."""
    import tensorflow as tf

    if len(tf.config.list_physical_devices("GPU")) == 1:
        print("One GPU was found and two replicas are wanted, so the demo uses the CPU.\n")
        tf.config.set_visible_devices([], "GPU")
