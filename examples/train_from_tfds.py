"""Train on a TensorFlow Datasets (TFDS) data set: one that you make, or a published one.

    python examples/train_from_tfds.py                       # digits, without a download
    python examples/train_from_tfds.py --name cifar10        # 50,000 photographs; downloads 160 MB
    python examples/train_from_tfds.py --replicas 2          # two GPUs, or a CPU split in two

You need: pip install tensorflow-datasets importlib_resources array_record scikit-learn matplotlib
"""

import argparse
import os

import keras
import numpy as np

import keras_multigpu as kmg

SIZE = (32, 32)


# --8<-- [start:write]
def write_digits(data_dir):
    """Store handwritten digits as a TFDS data set of the name "digits"."""
    import tensorflow_datasets as tfds
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images * 255 / 16).astype("uint8").reshape(-1, 8, 8, 1)
    digits = [
        {"image": image, "label": label}
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    examples = list(enumerate(digits))
    features = {
        "image": tfds.features.Image(shape=(8, 8, 1)),
        "label": tfds.features.ClassLabel(num_classes=10),
    }
    tfds.dataset_builders.store_as_tfds_dataset(
        name="digits",
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={"train": examples[:1500], "test": examples[1500:]},
        data_dir=data_dir,
        file_format="array_record",
    )


# --8<-- [end:write]


def build_model(classes):
    """A small convnet. Images come as whole numbers from 0 to 255."""
    model = keras.Sequential([keras.Input((*SIZE, 3)), keras.layers.Rescaling(1 / 255)])
    for filters in (16, 32, 64):
        model.add(keras.layers.Conv2D(filters, 3, activation="relu", padding="same"))
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(classes, activation="softmax"))
    return model


def draw(history, test, shares, path):
    """Draw how the accuracy grew, and the test images that the model is least sure of."""
    from matplotlib.figure import Figure

    images, labels = (np.concatenate(parts) for parts in zip(*test.epoch(0), strict=True))
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    left.suptitle("Accuracy after each epoch")
    axes = left.subplots()
    axes.set_xlabel("epoch")
    epochs = range(1, len(history["accuracy"]) + 1)
    axes.plot(epochs, history["accuracy"], "o-", color="#b9c2cc", label="training")
    axes.plot(epochs, history["val_accuracy"], "o-", color="#0b6e99", label="test")
    axes.legend(frameon=False)
    right.suptitle("The test images it is least sure of, and what it says")
    least_sure = shares.max(axis=1).argsort()[:18]
    for axes, number in zip(right.subplots(3, 6).flat, least_sure, strict=True):
        answer, share = shares[number].argmax(), shares[number].max()
        axes.imshow(images[number])
        color = "black" if answer == labels[number] else "#d1495b"
        axes.set_title(f"{test.class_names[answer]}: {share:.0%}", color=color, fontsize=10)
        axes.axis("off")
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=85)
    os.replace(f"{path}.partial", path)


def main(epochs=6, replicas=None, name="digits", data_dir="tfds_data"):
    """Train and draw a picture; returns the accuracy on the test images."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    if name == "digits":
        write_digits(data_dir)
    # --8<-- [start:data]
    options = {"features": ("image", "label"), "image_size": SIZE, "color_mode": "rgb"}
    options.update(data_dir=data_dir, global_batch_size=64)
    train = kmg.data.from_tfds(name, "train", **options)
    test = kmg.data.from_tfds(name, "test", shuffle=False, **options)
    print(train)
    # --8<-- [end:data]
    # --8<-- [start:train]
    model = kmg.distribute(build_model(len(train.class_names)), strategy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=test, epochs=epochs, verbose=2).history
    # --8<-- [end:train]
    draw(history, test, model.predict(test, verbose=0), "train_from_tfds.png")
    accuracy = history["val_accuracy"][-1]
    print(f"{accuracy:.1%} of {test.num_examples} test images are right. See train_from_tfds.png.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    parser.add_argument("--name", default="digits", help="such as cifar10, downloaded if need be")
    parser.add_argument("--data-dir", default="tfds_data", help="where the data is kept")
    main(**vars(parser.parse_args()))
