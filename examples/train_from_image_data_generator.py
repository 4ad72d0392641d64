"""Move from `ImageDataGenerator` to several replicas: the same flow before and after.

    python examples/train_from_image_data_generator.py                  # all GPUs, or one CPU
    python examples/train_from_image_data_generator.py --replicas 2     # or a CPU split in two

You need: pip install opencv-python-headless scipy scikit-image matplotlib
"""

import argparse
import os
import timeit
from pathlib import Path

import keras
import numpy as np
from tensorflow.keras.preprocessing import image  # noqa: TID251  # `keras` has it no more.

import keras_multigpu as kmg

PHOTOS = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "retina", "rocket")
SIZE = (224, 224)


def write_parts(folder, each):
    """Save parts of six photographs, 500x375 pixels each: `folder/coffee/000.jpg` and so on."""
    from PIL import Image
    from skimage import data

    random = np.random.default_rng(0)
    for name in PHOTOS:
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        photo = Image.fromarray(getattr(data, name)())
        for number in range(each):
            height = min(photo.height, photo.width * 0.75) * random.uniform(0.5, 1)
            top, left = random.uniform(0, (photo.height - height, photo.width - height / 0.75))
            part = photo.resize((500, 375), box=(left, top, left + height / 0.75, top + height))
            part.save(Path(folder, name, f"{number:03}.jpg"), quality=92)


def build_model():
    """A convnet too small to need a GPU."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((*SIZE, 3))])
    for filters in (16, 32, 64):
        model.add(keras.layers.Conv2D(filters, 3, strides=3, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(len(PHOTOS), activation="softmax"))
    adam = keras.optimizers.Adam(0.005)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def images_per_second(batches):
    """How fast images can be read: the best of three times 96 images."""
    iterator = iter(batches)
    return 96 / min(timeit.repeat(lambda: [next(iterator) for _ in range(3)], number=1, repeat=3))


def draw(rates, pictures, path):
    """Draw some images of each way, and how many it gave in a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    grid = figure.add_gridspec(len(rates), 8)
    for row, (way, rate) in enumerate(rates.items()):
        *images, bar = (figure.add_subplot(grid[row, c]) for c in (0, 1, 2, 3, 4, slice(5, 8)))
        for axes, picture in zip(images, pictures[way][:5], strict=True):
            axes.imshow(picture)
            axes.axis("off")
        bar.barh(0, rate, 0.4, color="#b9c2cc" if row == 0 else "#0b6e99")
        bar.text(0, 0.3, f"{way}\n{rate:,.0f} images per second", fontsize=11)
        bar.set(xlim=(0, max(rates.values())), ylim=(-0.4, 0.9))
        bar.axis("off")
    figure.savefig(f"{path}.partial", format="png", dpi=80)
    os.replace(f"{path}.partial", path)  # So that no half picture is ever seen.


def main(epochs=4, replicas=None, each=32, folder="photographs"):
    """Train before and after, draw a picture; returns the accuracy after."""
    strategy = kmg.strategy(devices=replicas)  # First, before TensorFlow starts.
    write_parts(folder, each)
    # --8<-- [start:flow]
    generator = image.ImageDataGenerator(
        rotation_range=20,
        width_shift_range=0.1,
        height_shift_range=0.1,
        zoom_range=0.2,
        horizontal_flip=True,
        rescale=1 / 255,
    )
    flow = generator.flow_from_directory(folder, SIZE, class_mode="sparse", batch_size=32, seed=0)
    # --8<-- [end:flow]
    # --8<-- [start:before]
    before = build_model().fit(flow, epochs=epochs, verbose=0)
    # --8<-- [end:before]
    # --8<-- [start:after]
    model = kmg.distribute(build_model(), strategy)
    batches = kmg.data.from_flow(flow)
    after = model.fit(batches, epochs=epochs, verbose=0)
    # --8<-- [end:after]
    print(batches)
    accuracies = [history.history["accuracy"][-1] for history in (before, after)]
    print("Accuracy before: {:.2f}, after: {:.2f}".format(*accuracies))
    # --8<-- [start:speed]
    ways = {"ImageDataGenerator": flow, "from_flow": batches.epochs()}
    rates = {way: images_per_second(images) for way, images in ways.items()}
    # --8<-- [end:speed]
    for way, rate in rates.items():
        print(f"{way:20} {rate:4.0f} images/s, {rate / rates['ImageDataGenerator']:4.1f} x")
    pictures = {way: next(iter(images))[0] for way, images in ways.items()}
    draw(rates, pictures, "train_from_image_data_generator.png")
    return accuracies[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
