"""`keras-multigpu demo`: trains on two replicas, and compares them with one device."""

import argparse
from pathlib import Path
from typing import Any

from keras_multigpu.commands import demo_comparison
from keras_multigpu.commands import demo_picture
from keras_multigpu.commands.usage import require_package


def train_digits(digits: Any) -> float:
    """An ordinary Keras script; the three lines marked `+` spread it over two replicas."""
    import keras

    import keras_multigpu as kmg  # +

    two_replicas = kmg.strategy(devices=2)  # +

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = kmg.distribute(model, two_replicas)  # +
    model.compile(
        keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(
        *digits.training, batch_size=64, epochs=12, validation_data=digits.validation, verbose=1
    )
    return model.evaluate(*digits.validation, batch_size=64, verbose=0, return_dict=True)["accuracy"]


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
    # It takes longest, and there is a second CPU core.
    stock = demo_comparison.start("stock")

    from keras_multigpu.commands.demo_digits import load_digits

    hide_a_lone_gpu()
    digits = load_digits()
    print(f"1. A convnet learns {len(digits.training[0])} handwritten digits on two replicas.\n")
    accuracy = train_digits(digits)
    print(f"\nValidation accuracy: {accuracy:.1%} of {len(digits.validation[0])} new digits.\n")

    print("2. The same small trainings on one device, and on two replicas with this package and")
    print("   with stock Keras. The data cannot be shared evenly. Please wait ...\n")
    results = demo_comparison.finish(
        {"one": demo_comparison.start("one"), "ours": demo_comparison.start("ours"), "stock": stock}
    )
    print(demo_comparison.table(results))
    picture = demo_picture.draw(results, arguments.folder / "loss_curves.png")
    print(f"\nThe loss curves are in {picture}.\n")
    print("Next: take a model of your own and ask whether it trains on N replicas as on one device:")
    print("  keras-multigpu verify my_package.models:build_model --data my_package.data:load")
    return 0


def hide_a_lone_gpu() -> None:
    """Two replicas need two GPUs, or none: then the CPU is split in two."""
    import tensorflow as tf

    if len(tf.config.list_physical_devices("GPU")) == 1:
        print("One GPU was found and two replicas are wanted, so the demo uses the CPU.\n")
        tf.config.set_visible_devices([], "GPU")
