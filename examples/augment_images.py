"""Segmentation: find cells and their nuclei on photos of a microscope, augmented with their masks.

    python examples/augment_images.py                  # all GPUs, or one CPU
    python examples/augment_images.py --replicas 2     # two GPUs, or a CPU split in two

The photos are drawn by the script. The pictures need matplotlib: pip install matplotlib
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg

KINDS = ("background", "cell", "nucleus")
SIDE = 64


def photograph(random, stray_light):
    """Cells with green fibers and a blue nucleus, and the kind of each pixel."""
    y, x = np.mgrid[:SIDE, :SIDE]
    photo, mask = np.zeros((SIDE, SIDE, 3)), np.zeros((SIDE, SIDE), "int32")
    for _ in range(random.integers(4, 7)):
        dx, dy = x - random.uniform(0, SIDE), y - random.uniform(0, SIDE)
        away, angle, light = np.hypot(dx, dy), np.arctan2(dy, dx), random.uniform(0.4, 1)
        waves = [
            random.uniform(0, 5) / n * np.cos(n * angle + random.uniform(0, 6)) for n in (2, 3, 5)
        ]
        size = random.uniform(9, 14)
        cell, nucleus = size + sum(waves) - away, 0.45 * size + waves[0] / 2 - away
        blue = 1 / (1 + np.exp(-nucleus))
        fibers = 0.7 + 0.3 * np.cos(random.integers(9, 17) * angle + 0.3 * away)
        green = fibers * (1 - 0.7 * blue) / (1 + np.exp(-cell))
        colors = green[..., None] * [40, 190, 50] + blue[..., None] * [0, 60, 230]
        photo = np.maximum(photo, light * colors)
        mask = np.maximum(mask, np.where(nucleus > 0, 2, cell > 0))
    photo = random.poisson((photo + [4, 12, 22]) / 5) * 5 + stray_light
    return np.clip(photo, 0, 255).astype("uint8"), mask


def photographs(count, seed, stray_light=0):
    """Photos and their masks."""
    random = np.random.default_rng(seed)
    photos, masks = zip(*(photograph(random, stray_light) for _ in range(count)), strict=True)
    return np.stack(photos), np.stack(masks)


def build_augmentation():
    """Layers of this package and of Keras, as one layer that takes masks, too."""
    # --8<-- [start:layers]
    return kmg.augmentation.Sequence(
        [
            kmg.augmentation.RandomGeometry(flip="horizontal_and_vertical", rotation=0.5, zoom=0.2),
            kmg.augmentation.RandomColor(brightness=0.2, contrast=0.2),
            keras.layers.RandomSharpness(0.5),
        ]
    )
    # --8<-- [end:layers]


def convolved(x, filters):
    """A convolution, normalized."""
    x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))


def build_model():
    """A small U-Net."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIDE, SIDE, 3))
    whole = convolved(keras.layers.Rescaling(1 / 255)(inputs), 16)
    half = convolved(keras.layers.MaxPooling2D()(whole), 32)
    x = convolved(keras.layers.MaxPooling2D()(half), 64)
    for filters, skipped in ((32, half), (16, whole)):
        x = keras.layers.Concatenate()([keras.layers.UpSampling2D()(x), skipped])
        x = convolved(x, filters)
    model = keras.Model(inputs, keras.layers.Conv2D(len(KINDS), 1, activation="softmax")(x))
    iou = keras.metrics.MeanIoU(len(KINDS), sparse_y_pred=False, name="iou")
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=[iou])
    return model


def draw(model, augmentation, photos, masks, picture):
    """Photos and masks, both augmented, and what the model makes of the photos, as one picture."""
    from matplotlib.figure import Figure

    colors = np.array([[16, 24, 32], [42, 157, 143], [233, 196, 106]], "uint8")
    augmented = augmentation({"images": photos, "segmentation_masks": masks}, training=True)
    columns = {
        "photo": photos,
        "mask": colors[masks],
        "augmented": np.uint8(augmented["images"]),
        "its mask": colors[np.array(augmented["segmentation_masks"])],
        "prediction": colors[model.predict(photos, verbose=0).argmax(axis=-1)],
    }
    figure = Figure(figsize=(9, 1.95 * len(photos)), layout="constrained", dpi=90)
    for axes, name in zip(figure.subplots(1, len(columns)), columns, strict=True):
        axes.imshow(np.concatenate(np.insert(columns[name], [0, 0], 255, axis=1)))
        axes.set_title(name, fontsize=15)
        axes.set_axis_off()
    figure.savefig(picture)


def replay(augmentation, photos):
    """Do the same to the same photos again."""
    # --8<-- [start:replay]
    seeds = np.arange(2 * len(photos), dtype="int32").reshape(-1, 2)
    drawn = augmentation.draw(seeds, photos.shape[1:])
    print("drawn by", *drawn, sep="\n    ")
    once, again = augmentation.apply(photos, drawn), augmentation.apply(photos, drawn)
    print("the same again:", np.array_equal(once, again))
    # --8<-- [end:replay]


def main(epochs=60, replicas=None):
    """Train with and without augmentation; returns the IoU with it on photos with stray light."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    # --8<-- [start:data]
    photos, masks = photographs(8, seed=0)
    new_photos, new_masks = photographs(32, seed=1, stray_light=40)
    train = kmg.data.from_arrays(photos, masks, global_batch_size=8)
    # --8<-- [end:data]
    augmentation = build_augmentation()
    # --8<-- [start:look]
    train.with_(augment=augmentation).preview("augmented.png", count=6)
    # --8<-- [end:look]
    replay(augmentation, photos)

    # --8<-- [start:train]
    for name, augment in (("as they are", None), ("augmented", augmentation)):
        model = kmg.distribute(build_model(), strategy)
        model.fit(train.with_(augment=augment), epochs=epochs, verbose=0)
        iou = model.evaluate(new_photos, new_masks, verbose=0, return_dict=True)["iou"]
        print(f"IoU on new photos, trained on photos {name:12} {iou:.2f}")
    # --8<-- [end:train]

    draw(model, augmentation, new_photos[:3], new_masks[:3], "segmented.png")
    return iou


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
