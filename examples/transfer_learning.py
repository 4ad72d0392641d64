"""Transfer learning: find flaws on photos of steel with a MobileNetV2, frozen, then fine-tuned.

    python examples/transfer_learning.py --replicas 2 --weights imagenet

Without `--weights` nothing is downloaded, and the network begins untrained. The photos are drawn by
the script. The picture needs matplotlib: pip install matplotlib
"""

import argparse
from pathlib import Path

import keras
import numpy as np

import keras_multigpu as kmg

KINDS = ("clean", "dent", "rust", "scratch")
SIDE = 96


def photograph(kind, random):
    """Brushed steel, lit from one side, and perhaps a flaw."""
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    brushed = random.normal(0, 5, (SIDE, 1)) + random.normal(0, 3, (SIDE, SIDE))
    photo = np.stack([140 + 20 * random.uniform(-1, 1) * x + brushed] * 3, axis=-1)
    x, y = x - random.uniform(-0.5, 0.5), y - random.uniform(-0.5, 0.5)
    distance = np.hypot(x, y) / random.uniform(0.3, 0.5)
    if kind == "dent":
        photo += (250 * x * np.exp(-(distance**2)))[..., None]
    elif kind == "rust":
        photo -= np.exp(-(distance**4))[..., None] * [20, 70, 110]
    elif kind == "scratch":
        angle = random.uniform(0, np.pi)
        photo[np.abs(x * np.sin(angle) - y * np.cos(angle)) < 0.04] += 90
    return np.clip(photo, 0, 255).astype("uint8")


def write_photos(folder, each=60):
    """Write `folder/rust/007.png` and others: as many of each kind."""
    random = np.random.default_rng(0)
    for kind in KINDS:
        Path(folder, kind).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            photo = photograph(kind, random)
            keras.utils.save_img(Path(folder, kind, f"{number:03}.png"), photo, scale=False)


# --8<-- [start:model]
def build_base(weights):
    """A MobileNetV2 without its classifier."""
    base = keras.applications.MobileNetV2(
        (SIDE, SIDE, 3), alpha=0.35, include_top=False, pooling="avg", weights=weights
    )
    if weights is None:
        calibrate(base)
    return base


def build_model(base):
    """Augmentation, the network, and a classifier for our four kinds."""
    inputs = keras.Input((SIDE, SIDE, 3))
    x = kmg.augmentation.RandomGeometry(flip="horizontal", rotation=0.1)(inputs)
    x = kmg.augmentation.RandomColor(brightness=0.1, contrast=0.1)(x)
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(x)  # What MobileNetV2 was trained with.
    x = keras.layers.Dropout(0.2)(base(x))
    return keras.Model(inputs, keras.layers.Dense(len(KINDS), activation="softmax")(x))


# --8<-- [end:model]


def calibrate(base):
    """Give an untrained network the statistics of our photos, without which it sees nothing."""
    random = np.random.default_rng(1)
    photos = np.stack([photograph(kind, random) for kind in KINDS for _ in range(16)])
    for layer in base.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    base(photos / 127.5 - 1, training=True)


# --8<-- [start:phases]
def freeze(base, model):
    """Train the new classifier only."""
    base.trainable = False
    compile_with(model, learning_rate=0.01)


def unfreeze(base, model, layers=12):
    """Train the last layers of the network, too, with a small learning rate."""
    base.trainable = True
    for layer in base.layers:
        # BatchNormalization keeps the statistics that it came with. `base(x, training=False)` would
        # not see to that: Keras 3.15 passes the `training` of `fit` on to all layers.
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        layer.trainable = layer in base.layers[-layers:] and not normalizes
    compile_with(model, learning_rate=0.0001)


def compile_with(model, learning_rate):
    """Compile anew: Keras reads `trainable` when it makes the training step."""
    optimizer = keras.optimizers.Adam(learning_rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])


# --8<-- [end:phases]


def main(epochs=10, replicas=None, weights=None):
    """Train in two phases; returns the accuracy on new photos."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)

    # --8<-- [start:data]
    write_photos("steel")
    photos = kmg.data.from_directory("steel", image_size=(SIDE, SIDE), global_batch_size=32)
    train, validation = photos.split(0.25)
    # --8<-- [end:data]

    # --8<-- [start:train]
    base = build_base(weights)
    model = kmg.distribute(build_model(base), strategy)

    freeze(base, model)
    model.fit(train, epochs=epochs, verbose=2)
    frozen = model.evaluate(validation, verbose=0, return_dict=True)["accuracy"]

    unfreeze(base, model)
    model.fit(train, epochs=epochs, verbose=2)
    tuned = model.evaluate(validation, verbose=0, return_dict=True)["accuracy"]
    # --8<-- [end:train]

    # --8<-- [start:look]
    train.with_(augment=model.layers[1:3]).preview("transfer_learning.png", count=6)
    # --8<-- [end:look]

    print(f"New photos that are right: {frozen:.0%} frozen, {tuned:.0%} fine-tuned.")
    return tuned


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    parser.add_argument("--weights", choices=["imagenet"], help="default: untrained")
    main(**vars(parser.parse_args()))
